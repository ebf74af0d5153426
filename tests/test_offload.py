"""Block inputs in host memory: the same gradients, bit by bit, and nothing left behind."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_qlora.build import compile_blocks
from fsdp_qlora.memory import activation_offload
from fsdp_qlora.memory.activation_offload import _HostStore, apply_activation_offload
from fsdp_qlora.memory.pinned_memory import fault_in, host_bytes, host_tensors
from fsdp_qlora.model.blocks import decoder_blocks
from tests.parts import rest, slow

from .test_checkpointing_policy import loss_and_gradients, tiny_model
from .tiny import padded_batch, save_tiny, tiny_rows

torch.set_num_threads(1)  # threads that share a tiny product only wait for each other

LAYERS = 4
POLICIES = [
    ("recompute_all", False),
    ("recompute_all", True),
    ("keep_attention", False),
    ("keep_linears", False),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


def offloading_model(folder, policy="recompute_all", reentrant=False, dropout=0.0, backend=None):
    model = tiny_model(folder, "qlora", policy, reentrant, dropout)
    if backend:
        compile_whole(model, backend)
    return apply_activation_offload(model, [policy] * LAYERS)


def compile_whole(model, backend):
    """Compile each block; a break in a graph is an error."""
    torch._dynamo.reset()
    for block in decoder_blocks(model):
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


def block_inputs(model) -> list[weakref.ref]:
    """Weak references to what will go into each block."""
    seen = []
    for block in decoder_blocks(model):
        block.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    return seen


def bit_equal(ours, reference) -> bool:
    return torch.equal(ours[0], reference[0]) and all(
        torch.equal(ours[1][name], gradient) for name, gradient in reference[1].items()
    )


@pytest.mark.parametrize("policy, reentrant", POLICIES)
def test_gradients_are_those_without_offload_bit_by_bit(folder, policy, reentrant):
    model = offloading_model(folder, policy, reentrant, dropout=0.1)
    plain = tiny_model(folder, "qlora", policy, reentrant, dropout=0.1)
    assert bit_equal(loss_and_gradients(model), loss_and_gradients(plain))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("policy", [rest("recompute_all"), slow("keep_linears")])
def test_a_compiled_block_stays_one_graph_and_its_gradients_the_same(folder, policy):
    plain = tiny_model(folder, "qlora", policy)
    compile_whole(plain, "aot_eager")
    reference = loss_and_gradients(plain)
    model = offloading_model(folder, policy, backend="aot_eager")
    seen = block_inputs(model)
    assert bit_equal(loss_and_gradients(model), reference) and len(seen) == LAYERS


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_blocks_input_begins_to_leave_before_the_block_runs(folder, monkeypatch):
    """Autograd hears of what a compiled block keeps after it has run: its copy would be waited for."""
    events, put = [], _HostStore.put
    model = tiny_model(folder, "qlora", "recompute_all")
    forwards, backwards = partial(noted, events), partial(noted, [])
    compile_whole(model, aot_autograd(fw_compiler=forwards, bw_compiler=backwards))
    monkeypatch.setattr(_HostStore, "put", lambda *args: events.append("leaves") or put(*args))
    loss_and_gradients(apply_activation_offload(model, ["recompute_all"] * LAYERS))
    assert events == ["leaves", "runs"] * (LAYERS - 1) + ["runs"]


def noted(events, graph, inputs):
    """A compiler that compiles nothing; its graphs note that they run."""
    return make_boxed_func(lambda *args: events.append("runs") or graph(*args))


@pytest.mark.parametrize(
    "policy, reentrant, compiled",
    [(*case, False) for case in POLICIES] + [("recompute_all", False, True)],
)
def test_after_the_forward_only_the_last_blocks_input_is_on_the_device(
    folder, policy, reentrant, compiled
):
    def alive(offload: bool):
        model = tiny_model(folder, "qlora", policy, reentrant)
        if compiled:
            torch._dynamo.reset()
            compile_blocks(model)
        if offload:
            apply_activation_offload(model, [policy] * LAYERS)
        seen = input_memory(model)
        loss = model(**padded_batch(tiny_rows(1, 3)[0])).loss
        assert loss.requires_grad
        return [not memory.expired() for memory in seen]

    assert alive(True) == [False, False, False, True]
    assert all(alive(False))


def input_memory(model) -> list[StorageWeakRef]:
    """The memory of what goes into each block, whichever tensor it is that stays."""
    seen = []
    for block in decoder_blocks(model):
        block.register_forward_pre_hook(
            lambda _, args: seen.append(StorageWeakRef(args[0].untyped_storage()))
        )
    return seen


def test_host_memory_is_one_slot_per_moved_input_and_is_used_again(folder, monkeypatch):
    regions = []
    monkeypatch.setattr(
        activation_offload,
        "host_bytes",
        lambda size, pinned: regions.append(size) or host_bytes(size, pinned),
    )
    model = offloading_model(folder)
    for _ in range(3):
        loss_and_gradients(model)
    rows, tokens = padded_batch(tiny_rows(1, 3)[0])["input_ids"].shape
    assert regions == [(LAYERS - 1) * rows * tokens * 64 * 4]


def test_batches_of_any_size_and_order_are_right(folder):
    """A larger batch needs larger slots; a smaller one fits those."""
    model, plain = offloading_model(folder), tiny_model(folder, "qlora")
    for rows in (2, 5, 1, 3, 5):
        results = []
        for m in (model, plain):
            m.zero_grad()
            m(**padded_batch(tiny_rows(1, rows, seed=rows)[0])).loss.backward()
            results.append([p.grad for p in m.parameters() if p.grad is not None])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_two_forwards_before_a_backward_and_one_without_do_not_disturb_each_other(folder):
    batches = [padded_batch(tiny_rows(1, 3, seed=s)[0]) for s in (1, 2, 3)]
    gradients = []
    for model in (offloading_model(folder), tiny_model(folder, "qlora")):
        first, second, dropped = (model(**b).loss for b in batches)
        del dropped
        with torch.no_grad():
            model(**batches[2])
        (first + second).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_a_block_that_keeps_everything_is_left_alone(folder):
    policies = ["recompute_all", "keep_all"] * 2
    model = apply_activation_offload(tiny_model(folder, "qlora", policies), policies)
    seen = block_inputs(model)
    loss = model(**padded_batch(tiny_rows(1, 3)[0])).loss
    assert [ref() is not None for ref in seen] == [False, True, False, True] and loss.requires_grad


def pages_there(region: torch.Tensor) -> int:
    """How many pages of a region the system has given, which `mincore` knows."""
    flags = (ctypes.c_ubyte * -(-len(region) // mmap.PAGESIZE))()
    start, size = ctypes.c_void_p(region.data_ptr()), ctypes.c_size_t(len(region))
    assert ctypes.CDLL(None).mincore(start, size, flags) == 0
    return sum(flag & 1 for flag in flags)


def test_a_region_has_all_its_pages_before_it_is_locked():
    """Its last piece is shorter than a thread's share, and no whole page."""
    region = host_bytes(2**26 + 3 * mmap.PAGESIZE + 5, pinned=False)
    fault_in(region)
    assert pages_there(region) == 2**26 // mmap.PAGESIZE + 4
    assert not region.any()


def test_host_tensors_share_one_region_without_rounding_to_powers_of_two():
    like = [
        torch.empty(3, 5, dtype=torch.bfloat16, device="meta"),
        torch.empty(0, 4, device="meta"),
        torch.empty(5000, device="meta"),
    ]
    made = host_tensors(like, pinned=False)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in like]
    assert len({t.untyped_storage().data_ptr() for t in made}) == 1
    assert made[0].untyped_storage().nbytes() == 256 + 20224  # 20,000 bytes in steps of 256
    for value, t in enumerate(made):
        t.fill_(value)
    assert all((t == value).all() for value, t in enumerate(made))
