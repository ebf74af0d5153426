"""Attention's kept outputs in host memory: which tensors move, which never do, and the same gradients.

For eager blocks and for compiled ones, whose graphs save them in another way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_qlora.data import collate_packed
from fsdp_qlora.estimate import host_memory, memory
from fsdp_qlora.estimate.kept import Kept, offloaded_of_blocks
from fsdp_qlora.estimate.peak import GIB
from fsdp_qlora.memory import activation_offload
from fsdp_qlora.memory.activation_offload import (
    OffloadedTensor,
    Slots,
    _HostStore,
    apply_activation_offload,
    offloaded,
)
from fsdp_qlora.memory.checkpointing_policy import _packing_contexts, apply_activation_policy
from fsdp_qlora.memory.pinned_memory import host_bytes
from fsdp_qlora.model.attention_kernels import apply_attention_tiles
from fsdp_qlora.model.blocks import base_model, decoder_blocks
from tests.parts import rest, slow

from . import estimates
from .allocations import left_bytes, peak_bytes
from .estimates import LLAMA_8B, PRODUCT, SMALL, tiny
from .families import family_config
from .test_attention import ROWS
from .test_checkpointing_policy import loss_and_gradients, tiny_model
from .test_offload import bit_equal, compile_whole
from .test_sinks import made, plain_kernels  # noqa: F401  a fixture
from .tiny import padded_batch, save_tiny, tiny_rows

torch.set_num_threads(1)  # threads that share a tiny product only wait for each other

LAYERS, HEADS, HEAD = 4, 4, 32  # heads wider than the hidden states together: 128, and 64
HIDDEN = 64
WIDE = dict(num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=HEAD)
BACKENDS = [None, "aot_eager"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), **WIDE)


@dataclass
class Moved:
    """What went to the host: the values of each tensor, and the memory that it was in."""

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    places: set[int] = field(default_factory=set)


@pytest.fixture
def moved(monkeypatch):
    found, put = Moved(), _HostStore.put

    def seen(store, tensor, group, slots=None, late=False):
        (found.outputs if late else found.inputs).append(tensor.numel())
        found.places.add(tensor.untyped_storage().data_ptr())
        return put(store, tensor, group, slots, late)

    monkeypatch.setattr(_HostStore, "put", seen)
    return found


def offloading(model, backend=None, policies=("keep_attention",) * LAYERS):
    if backend:
        compile_whole(model, backend)
    return apply_activation_offload(model, list(policies))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "train_type, dropout", [("qlora", 0.1), rest("full", 0.0), slow("lora", 0.0), slow("dora", 0.0)]
)
def test_outputs_move_no_weight_does_and_gradients_are_bit_equal(
    folder, train_type, dropout, backend, moved
):
    plain = tiny_model(folder, train_type, "keep_attention", dropout=dropout)
    if backend:
        compile_whole(plain, backend)
    reference = loss_and_gradients(plain)
    model = offloading(tiny_model(folder, train_type, "keep_attention", dropout=dropout), backend)
    assert bit_equal(loss_and_gradients(model), reference)
    rows, tokens = padded_batch(tiny_rows(1, 3)[0])["input_ids"].shape
    assert moved.inputs == [rows * tokens * HIDDEN] * (LAYERS - 1)
    assert moved.outputs == [rows * tokens * HEADS * HEAD] * (LAYERS - 1)
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not moved.places & weights


@pytest.mark.filterwarnings("ignore")
def test_a_graph_keeps_and_moves_in_torches_that_make_it_when_they_no_longer_call_it_compiling(
    folder, moved, monkeypatch
):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)  # as 2.11 says then
    reference = loss_and_gradients(tiny_model(folder, "qlora", "keep_attention"))
    model = offloading(tiny_model(folder, "qlora", "keep_attention"), "aot_eager")
    assert bit_equal(loss_and_gradients(model), reference)
    assert len(moved.outputs) == LAYERS - 1


@pytest.mark.parametrize(
    "policy, inputs, outputs",
    [
        ("recompute_all", 3, 0),
        ("keep_linears", 3, 0),
        ("keep_all,keep_linears,keep_attention,keep_attention", 2, 1),
        ("keep_attention,recompute_all,keep_attention,recompute_all", 3, 2),
    ],
)
def test_outputs_of_keep_attention_alone_move(folder, policy, inputs, outputs, moved):
    policies = (policy.split(",") * LAYERS)[:LAYERS]
    reference = loss_and_gradients(tiny_model(folder, "qlora", policies))
    model = offloading(tiny_model(folder, "qlora", policies), policies=policies)
    assert bit_equal(loss_and_gradients(model), reference)
    assert (len(moved.inputs), len(moved.outputs)) == (inputs, outputs)


def test_outputs_stay_where_the_plan_says_so(folder, moved):
    model = tiny_model(folder, "qlora", "keep_attention")
    loss_and_gradients(apply_activation_offload(model, ["keep_attention"] * LAYERS, False))
    assert (len(moved.inputs), len(moved.outputs)) == (LAYERS - 1, 0)


# ---- every kind of attention ---------------------------------------------------------------------


def of_llama(folder, way="sdpa", tiles=1):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=way, use_cache=False
    ).train()
    return apply_attention_tiles(model, tiles, ["keep_attention"] * LAYERS)


def hybrid(folder):
    """Delta nets, and attention in the second of four blocks."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    config = family_config("Qwen3-Next", layer_types=kinds, num_hidden_layers=LAYERS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    model.config.use_cache = False
    return model


def sharing(folder):
    """Blocks that put keys and values where later ones find them, which breaks their graphs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config("Gemma 3n"), dtype=torch.float32).train()
    model.config.use_cache = False
    return model


PACKED = collate_packed([ROWS[:3], ROWS[3:]], 0)
ALONE = padded_batch(tiny_rows(1, 4)[0])
KINDS = {  # a model, a batch, and what of attention moves: tensors of a block, and its blocks
    "tiles": (lambda folder: of_llama(folder, tiles=2), ALONE, 2, LAYERS - 1),
    "packed": (lambda folder: of_llama(folder, "varlen"), PACKED, 1, LAYERS - 1),
    "packed, in tiles": (lambda folder: of_llama(folder, "varlen", 2), PACKED, 2, LAYERS - 1),
    "FlashAttention 4": (lambda folder: of_llama(folder, "fa4_packed"), PACKED, 1, LAYERS - 1),
    "sinks": (lambda folder: made("granite_swa", "torch_fa_packed"), PACKED, 1, 1),
    "hybrid": (hybrid, ALONE, 1, 1),
    "shared keys": (sharing, ALONE, 1, 3),
    "eager attention": (lambda folder: of_llama(folder, "eager"), ALONE, 0, 0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", [None, rest("aot_eager")])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_every_kind_of_attention_move(
    folder,
    kind,
    backend,
    moved,
    plain_kernels,  # noqa: F811
):
    make, batch, parts, blocks = KINDS[kind]
    found = []
    for offload in (False, True):
        torch._dynamo.reset()
        model = make(folder)
        policies = ["keep_attention"] * len(decoder_blocks(model))
        apply_activation_policy(model, "keep_attention")
        for block in decoder_blocks(model) if backend else ():
            block.forward = torch.compile(block.forward, backend=backend)
        if offload:
            apply_activation_offload(model, policies)
        loss = model(**batch).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    config = model.config
    each = batch["input_ids"].numel() * config.num_attention_heads * config.head_dim // (parts or 1)
    assert moved.outputs == [each] * (parts * blocks)
    assert len(moved.inputs) == len(policies) - 1
    trained = {n: g for n, g in found[0][1].items() if g is not None}
    assert trained and bit_equal(found[1], (found[0][0], trained))


# ---- orders of forwards and backwards ------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", [None, rest("aot_eager")])
def test_forwards_in_any_order_and_of_any_size_do_not_disturb_each_other(folder, backend):
    """Two before their backward, one that has none, one without autograd between, other lengths."""
    batches = [padded_batch(tiny_rows(1, n, seed=n)[0]) for n in (3, 5, 2)]
    results = []
    for offload in (False, True):
        model = tiny_model(folder, "qlora", "keep_attention")
        if backend:
            compile_whole(model, backend)
        if offload:
            offloading(model)
        for _ in range(2):
            first, second, dropped = (model(**b).loss for b in batches)
            del dropped
            with torch.no_grad():
                seen = model(**batches[1]).loss
            (first + second).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([seen, first.detach(), second.detach(), *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
def test_host_memory_is_taken_once_and_used_again(folder, backend, monkeypatch):
    """Also where the loss of a step, and with it its graph, is there until that of the next."""
    taken = []
    monkeypatch.setattr(
        activation_offload,
        "host_bytes",
        lambda size, pinned: taken.append(size) or host_bytes(size, pinned),
    )
    model = offloading(tiny_model(folder, "qlora", "keep_attention"), backend)
    losses = []
    for _ in range(3):
        losses.append(model(**ALONE).loss)
        losses[-1].backward()
    values = ALONE["input_ids"].numel()
    assert sorted(taken) == sorted(
        [(LAYERS - 1) * values * HIDDEN * 4] + [values * HEADS * HEAD * 4] * (LAYERS - 1)
    )


@pytest.fixture
def fetches(monkeypatch):
    found, start = [], OffloadedTensor.start_fetch
    monkeypatch.setattr(
        OffloadedTensor,
        "start_fetch",
        lambda stored: found.append(stored.on_host.shape) or start(stored),
    )
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_left_comes_back_once(folder, backend, moved, fetches):
    loss_and_gradients(offloading(tiny_model(folder, "qlora", "keep_attention"), backend))
    assert len(fetches) == len(moved.inputs) + len(moved.outputs) == 2 * (LAYERS - 1)


def test_an_input_that_is_saved_twice_comes_back_once_and_again_for_a_second_backward(fetches):
    hidden = torch.randn(2, 3, 4)
    first, second = (torch.randn(4, requires_grad=True) for _ in range(2))
    made = offloaded(
        lambda x: (x * first).sum() + (x.view(6, 4) * second).sum(),
        _HostStore(Slots(1)),
        None,
        hidden,
    )
    for times in (1, 2):
        made.backward(retain_graph=True)
        assert len(fetches) == times
        expected = times * hidden.sum((0, 1))
        torch.testing.assert_close([first.grad, second.grad], [expected, expected])


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default: (),
    torch.ops.aten._scaled_dot_product_efficient_attention.default: (None, True),
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: (None, True),
}


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_gpus_kernels_give_numbers_and_none_beside_tensors(kernel):
    """What is packed of an eager block is what the hooks gave; all else comes back as it was."""
    packed: list = []

    def unpack(number):
        return packed[number]

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1  # like the numbers that kernels give

    given = [torch.empty(1, 2, 8, 64, device="meta", dtype=torch.bfloat16) for _ in range(3)]
    forward, again = _packing_contexts({kernel}, pack, unpack)
    with forward:
        out = kernel(*given, *KERNELS[kernel])
    with again:
        same = kernel(*given, *KERNELS[kernel])
    assert packed
    for a, b in zip(same, out, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype) if isinstance(b, torch.Tensor) else a == b


def test_a_second_backward_through_kept_outputs_is_refused(folder):
    loss = offloading(tiny_model(folder, "qlora", "keep_attention"))(**ALONE).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()


# ---- what is left on the device, by torch's allocator --------------------------------------------


def run_of(plan):
    """A forward and a step of the model of a plan after warm-up, what they give, and the model's shape."""
    torch._dynamo.reset()
    model, shape = tiny("qwen3-8b", plan.change(compile=False))  # heads of 256 in all, 128 hidden
    if plan.loop.compile:
        compile_whole(model, "inductor")
    if plan.memory.activation_offload:
        policies = plan.memory.policies(shape)
        apply_activation_offload(model, policies, plan.memory.attention_offload)
    ids = torch.randint(0, 97, (plan.batch.micro_batch_size, plan.batch.context_length))
    held: list = []

    def forward():
        held.append(base_model(model).model(input_ids=ids).last_hidden_state)

    def step():
        forward()
        held[-1].backward(torch.ones_like(held[-1]))
        held.clear()

    step()
    step()  # gradients and host memory are there from the first one on
    return forward, step, held, shape


LONG = SMALL.change(context_length=256, activation_policy="keep_attention")
OFF = dict(activation_offload=True, attention_offload=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, rest(True)])
@pytest.mark.parametrize(
    "policy", ["keep_attention", "keep_attention:1,recompute_all:2", "recompute_all"]
)
def test_what_leaves_is_what_the_estimate_says(policy, compiled):
    """Bytes on the device between forward and backward, which the host's memory is no part of."""
    plan = LONG.change(compile=compiled, activation_policy=policy)
    left = []
    for more in ({}, OFF):
        forward, _, held, shape = run_of(plan.change(**more))
        left.append(left_bytes(forward))
        held.clear()
    runs, moves = plan.memory.runs(shape), plan.change(**OFF)
    expected = sum(offloaded_of_blocks(shape, moves, runs))
    assert left[0] - left[1] == pytest.approx(expected, rel=0.01)
    kept = [Kept(shape, p).at_end(runs, shape.layers) for p in (plan, moves)]
    assert kept[0] - kept[1] == pytest.approx(expected)
    assert host_memory(shape, moves)["activations"] * GIB == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, rest(True)])
def test_a_block_more_adds_no_output_to_the_peak(compiled, monkeypatch):
    """Of the outputs those of two blocks are there at once, however many blocks there are."""
    peaks = []
    for layers in (4, 8):
        monkeypatch.setitem(estimates.TINY, "num_hidden_layers", layers)
        _, step, _, shape = run_of(LONG.change(compile=compiled, **OFF))
        peaks.append(peak_bytes(step))
    tokens = LONG.batch.tokens
    output, log_sum_exp = tokens * shape.heads * shape.head_dim * 2, tokens * shape.heads * 4
    assert peaks[1] - peaks[0] < 4 * log_sum_exp + 0.1 * output


def test_the_peak_falls_by_the_outputs_that_leave():
    """Of an 8B's shape: all but those of the last block, and the ones that come back."""
    plan = PRODUCT.change(
        context_length=65536,
        micro_batch_size=1,
        mlp_tiles=8,
        activation_policy="keep_attention",
        activation_offload=True,
    )
    stays, moves = (memory(LLAMA_8B, plan, attention_offload=off) for off in (False, True))
    output = 65536 * 4096 * 2 / GIB
    fell = stays.peak_allocated - moves.peak_allocated
    assert 28 * output < fell < 31 * output
    assert moves.host - stays.host == pytest.approx(31 * output)
    recomputed = memory(LLAMA_8B, plan, activation_policy="recompute_all")
    assert moves.peak_allocated < recomputed.peak_allocated + 3 * output
