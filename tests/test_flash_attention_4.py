"""FlashAttention 4's operator, with its kernels replaced by the same functions in plain torch.

What is tested is all around the kernels: layouts, windows, borders, autograd, compile, checkpointing,
what is left to sdpa, and when it is chosen. gpu/test_flash_attention_4.py has the kernels themselves.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoModelForCausalLM,
    DeepseekV4Config,
    Gemma2Config,
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
)

from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import collate, collate_packed
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from fsdp_qlora.model import attention
from fsdp_qlora.model import flash_attention_4 as fa4
from fsdp_qlora.model.blocks import decoder_blocks
from fsdp_qlora.plan_draft import draft_plan
from fsdp_qlora.training.cuda_graphs import _why_no_graphs
from tests.parts import slow

from .test_attention import BINS, FAMILIES, ROWS, WINDOW, inputs
from .test_checkpointing_policy import Calls
from .tiny import padded_batch, save_tiny, tiny_rows

GPU, HEADS, KV_HEADS, SIZE = torch.device("cuda"), 4, 2, 16


# ---- the package's functions -------------------------------------------------------------------


def probabilities(q, k, lse, scale, left):
    """What attention gives each key of one row: (H, T, T); the log-sum-exp (H, T) if not given."""
    distance = torch.arange(len(q))[:, None] - torch.arange(len(k))
    seen = (distance >= 0) & ((left is None) | (distance <= (left or 0)))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(~seen, -torch.inf)
    if lse is None:
        lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp(), lse


def rows_of(cu_seqlens, *tensors):
    """Each row of some tensors: of (B, T, ...), or of (N, ...) between borders."""
    if cu_seqlens is None:
        return [*zip(*tensors, strict=True)]
    return [[x[a:b] for x in tensors] for a, b in pairwise(cu_seqlens.tolist())]


def forward(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size_left, return_lse
):
    assert causal and return_lse and cu_seqlens_q is cu_seqlens_k

    def row(q, k, v):
        p, lse = probabilities(q, k, None, softmax_scale, window_size_left)
        v = v.repeat_interleave(len(p) // v.shape[1], 1)
        return torch.einsum("hqk,khd->qhd", p, v), lse

    outs, lses = zip(*(row(*each) for each in rows_of(cu_seqlens_q, q, k, v)), strict=True)
    if cu_seqlens_q is None:
        return torch.stack(outs), torch.stack(lses).float(), None, None, None
    return torch.cat(outs), torch.cat(lses, -1).float(), None, None, None


def backward(
    q,
    k,
    v,
    out,
    dout,
    lse,
    *,
    softmax_scale,
    causal,
    window_size_left,
    cu_seqlens_q,
    cu_seqlens_k,
    deterministic,
    dq,
    dk,
    dv,
):
    assert causal and dout.is_contiguous() and cu_seqlens_q is cu_seqlens_k

    def row(q, k, v, out, dout, lse, dq, dk, dv):
        p, _ = probabilities(q, k, lse.t().to(q.dtype), softmax_scale, window_size_left)
        shared = len(p) // k.shape[1]
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
        ds = p * (torch.einsum("qhd,khd->hqk", dout, v) - (out * dout).sum(-1).t()[..., None])
        ds = ds * (softmax_scale or q.shape[-1] ** -0.5)
        dq.copy_(torch.einsum("hqk,khd->qhd", ds, k))
        for made, given in (
            (dk, torch.einsum("hqk,qhd->khd", ds, q)),
            (dv, torch.einsum("hqk,qhd->khd", p, dout)),
        ):
            made.copy_(given.unflatten(1, (-1, shared)).sum(2))

    for each in rows_of(cu_seqlens_q, q, k, v, out, dout, lse.transpose(-1, -2), dq, dk, dv):
        row(*each)


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch):
    module = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setattr(fa4, "kernels", lambda: module)
    fa4.trial.cache_clear()


# ---- the operator ------------------------------------------------------------------------------


def states(*shape, dtype=torch.float64):
    """q, k and v (*shape, heads, D), strided as a model's often are."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, SIZE, heads, dtype=dtype, generator=generator)
        .transpose(-1, -2)
        .requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def result(out, tensors):
    """An output with its gradients for a fixed gradient of its own."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)


@pytest.mark.parametrize("window, scale", [(None, None), (3, None), (1, 0.5), (100, 0.1)])
def test_output_and_gradients_are_those_of_sdpa(window, scale):
    tensors = states(2, 9)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    seen = (distance >= 0) & (distance < (window or 9))
    expected = scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), attn_mask=seen, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    out, lse = fa4.flash_attention_4(*tensors, None, scale, window)
    assert lse.shape == (2, HEADS, 9) and lse.dtype == torch.float32
    # The log-sum-exp is fp32, as the package's is.
    torch.testing.assert_close(
        result(out, tensors), result(expected, tensors), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("window", [None, 3])
def test_packed_rows_are_those_rows_alone_and_empty_ones_change_nothing(window):
    tensors, borders = states(17), torch.tensor([0, 5, 6, 6, 17, 17, 17], dtype=torch.int32)
    alone = [
        fa4.flash_attention_4(*(x[None, a:b] for x in tensors), None, None, window)[0][0]
        for a, b in pairwise(borders.tolist())
        if a < b
    ]
    out, lse = fa4.flash_attention_4(*tensors, borders, None, window)
    assert lse.shape == (HEADS, 17)
    torch.testing.assert_close(
        result(out, tensors), result(torch.cat(alone), tensors), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_the_operator_keeps_torchs_rules_for_operators(packed, window):
    """Its schema, fake kernel, autograd and what torch.compile traces, in torch's own checks."""
    borders = torch.tensor([0, 4, 12], dtype=torch.int32) if packed else None
    tensors = states(12) if packed else states(2, 6)
    torch.library.opcheck(fa4.flash_attention_4, (*tensors, borders, None, window))
    q, k, v = (x.detach() for x in tensors)
    out, lse = fa4.flash_attention_4(q, k, v, borders, None, window)
    torch.library.opcheck(
        fa4.flash_attention_4_backward, (out, q, k, v, out, lse, borders, None, window)
    )


def test_deterministic_runs_ask_the_kernels_to_be_so(monkeypatch):
    """The stand-in compares what it is told with torch's switch."""
    told = []
    module = SimpleNamespace(
        _flash_attn_fwd=forward,
        _flash_attn_bwd=lambda *args, **more: (
            told.append(more["deterministic"]),
            backward(*args, **more),
        ),
    )
    monkeypatch.setattr(fa4, "kernels", lambda: module)
    tensors = states(1, 4, dtype=torch.float32)
    for strict in (False, True):
        torch.use_deterministic_algorithms(strict)
        result(fa4.flash_attention_4(*tensors, None, None, None)[0], tensors)
    torch.use_deterministic_algorithms(False)
    assert told == [False, True]


# ---- in a model --------------------------------------------------------------------------------


def model_of(folder: str, way: str):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=way, use_cache=False
    ).train()


def loss_and_gradients(model, *batches):
    """The mean loss of some batches and its gradients, by the product's own forward."""
    loss = sum(apply_chunked_cross_entropy(model)(**batch).loss for batch in batches) / len(batches)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_and_packed_rows_have_the_loss_and_gradients_of_sdpa(family, tmp_path):
    folder = save_tiny(tmp_path, family, **FAMILIES[family])
    padded, packed = collate(ROWS, 0), collate_packed(BINS, 0)
    with Calls() as mode:
        found = loss_and_gradients(model_of(folder, "fa4"), padded)
        found_packed = loss_and_gradients(model_of(folder, "fa4_packed"), packed)
    assert mode.counts["fsdp_qlora::flash_attention_4"] == 4  # 2 blocks, twice
    assert mode.counts["fsdp_qlora::flash_attention_4_backward"] == 4
    assert not any("scaled_dot_product" in name for name in mode.counts)
    close = dict(rtol=1e-5, atol=1e-6)
    for batch, ours in ((padded, found), (packed, found_packed)):
        torch.testing.assert_close(
            ours, loss_and_gradients(model_of(folder, "sdpa"), batch), **close
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_training_forwards_make_no_mask_and_put_no_question_to_the_gpu(
    family, tmp_path, monkeypatch
):
    import transformers.masking_utils as masks

    folder, asked = save_tiny(tmp_path, family, **FAMILIES[family]), []
    monkeypatch.setattr(masks, "find_packed_sequence_indices", lambda p: asked.append(1))
    model = apply_chunked_cross_entropy(model_of(folder, "fa4"))
    model(**collate(ROWS, 0))
    model_of(folder, "fa4_packed")(**collate_packed(BINS, 0))
    assert not asked
    assert model.config._attn_implementation == "fa4"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_masks_and_caches_are_left_to_sdpa(family, tmp_path):
    """Rows padded on the left, positions that restart, and generation with cached keys."""
    folder = save_tiny(tmp_path, family, **FAMILIES[family])
    ours, theirs = (model_of(folder, way).eval() for way in ("fa4", "sdpa"))
    left = {name: x.flip(1) for name, x in inputs(padded_batch(tiny_rows(1, 4)[0])).items()}
    positions = dict(
        input_ids=left["input_ids"],
        position_ids=torch.arange(left["input_ids"].shape[1])
        .remainder(4)
        .expand_as(left["input_ids"]),
    )
    with torch.no_grad():
        real = left["attention_mask"].bool()
        assert not real.all()
        torch.testing.assert_close(ours(**left).logits[real], theirs(**left).logits[real])
        torch.testing.assert_close(ours(**positions).logits, theirs(**positions).logits)
        tokens = [
            model.generate(
                **left, max_new_tokens=2 * WINDOW, do_sample=False, use_cache=True, pad_token_id=0
            )
            for model in (ours, theirs)
        ]
    assert torch.equal(*tokens)


def test_packed_models_refuse_batches_that_do_not_say_where_rows_begin(tmp_path):
    model = model_of(save_tiny(tmp_path), "fa4_packed")
    with pytest.raises(ValueError, match="--packing true needs cu_seq_lens_q"):
        model(**padded_batch(tiny_rows(1, 2)[0]))


@pytest.mark.parametrize("way", ["fa4", "fa4_packed"])
@pytest.mark.parametrize(
    "policy, forwards", [("recompute_all", 4), ("keep_attention", 2), ("keep_linears", 2)]
)
def test_its_output_is_kept_where_the_policy_says_so(way, policy, forwards, tmp_path):
    """2 blocks, whose attention runs once, or again in backward."""
    folder = save_tiny(tmp_path)
    batch = collate(ROWS, 0) if way == "fa4" else collate_packed(BINS, 0)
    model = apply_activation_policy(model_of(folder, way), policy)
    with Calls() as mode:
        found = loss_and_gradients(model, batch)
    assert mode.counts["fsdp_qlora::flash_attention_4"] == forwards
    assert mode.counts["fsdp_qlora::flash_attention_4_backward"] == 2
    torch.testing.assert_close(
        found, loss_and_gradients(model_of(folder, "sdpa"), batch), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("policy", ["keep_attention", slow("keep_all"), slow("recompute_all")])
@pytest.mark.parametrize("way", [slow("fa4"), "fa4_packed"])
def test_compiled_blocks_have_no_graph_break_and_few_graphs(way, policy, tmp_path):
    folder = save_tiny(tmp_path, "mistral", sliding_window=WINDOW)
    if way == "fa4":
        batches = [collate(ROWS[:n], 0, pad_to_multiple_of=10 * n) for n in (2, 3, 4)]
    else:
        batches = [
            collate_packed(bins, 0, pad_to=48)
            for bins in (BINS[:2], BINS[1:], [ROWS[:1], ROWS[1:4]])
        ]
    found, graphs = [], []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = apply_activation_policy(model_of(folder, way), policy)
        for block in decoder_blocks(model) if compiled else []:
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        apply_chunked_cross_entropy(model)
        found.append([])
        for batch in batches:
            model(**batch).loss.backward()
            found[-1].append({n: p.grad.clone() for n, p in model.named_parameters()})
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert graphs[3] and graphs[4] == graphs[5]


# ---- when it is chosen -------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    """A GPU as torch tells of it, and the package; what a trial there says is to be set."""
    made = SimpleNamespace(capability=(9, 0), installed=True, trials=[], fault="")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: made.capability)
    monkeypatch.setattr(fa4, "has_flash_attention_4", lambda: made.installed)
    monkeypatch.setattr(fa4, "trial", lambda *args: made.trials.append(args) or made.fault)
    return made


def choose(
    wanted="auto", packing=False, dtype=torch.bfloat16, device=GPU, config=LlamaConfig, **settings
):
    settings = dict(hidden_size=1024, num_attention_heads=8, num_key_value_heads=2) | settings
    return attention.choose_attention(wanted, packing, config(**settings), device, dtype)


@pytest.mark.parametrize("wanted", ["auto", "flash_attention_4"])
@pytest.mark.parametrize("packing, name", [(False, "fa4"), (True, "fa4_packed")])
def test_it_is_taken_where_it_is_installed_and_runs(wanted, packing, name, hopper):
    assert choose(wanted, packing) == (name, "FlashAttention 4")
    assert hopper.trials == [(GPU, torch.bfloat16, 128, 4, (None,), packing)]


def test_another_kernel_that_was_asked_for_is_left_alone(hopper):
    assert choose("sdpa")[0] == "sdpa"
    assert choose("sdpa", packing=True)[0] == "varlen"
    assert choose("eager")[0] == "eager"
    assert not hopper.trials


def test_both_kinds_of_layers_of_a_model_with_windows_are_tried(hopper):
    from transformers import Gemma3TextConfig, MistralConfig, Qwen2Config

    choose(config=MistralConfig, sliding_window=64)
    choose(config=Qwen2Config, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    choose(config=Gemma3TextConfig, sliding_window=64, head_dim=256)
    assert [trial[4] for trial in hopper.trials] == [(64,), (None, 64), (None, 64)]


UNFIT = {  # reason -> what makes it so
    "needs a Hopper GPU or a Blackwell GPU of a data centre": dict(capability=(8, 9)),
    "is not installed": dict(installed=False),
    "computes in 16 bits only": dict(dtype=torch.float32),
    "has no kernel for heads of 32 on this GPU": dict(hidden_size=256),
    "has no kernel for heads of 192 on this GPU": dict(head_dim=192, capability=(10, 0)),
    "has no kernel for heads of 320": dict(head_dim=320),
    "has no attention dropout": dict(attention_dropout=0.1),
    "has no attention dropout, by GPT-2's name": dict(config=GPT2Config),
    "does not run here: RuntimeError: no": dict(fault="does not run here: RuntimeError: no"),
    "can't run layers of chunked_attention": dict(config=Llama4TextConfig),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_where_it_does_not_fit_sdpa_is_taken_and_one_line_says_why(reason, hopper):
    settings, reason = dict(UNFIT[reason]), reason.partition(", by")[0]
    for name in ("capability", "installed", "fault"):
        if name in settings:
            setattr(hopper, name, settings.pop(name))
    name, said = choose(**settings)
    assert name == "sdpa"
    assert (f"FlashAttention 4 {reason}" in said) is (hopper.capability[0] >= 9)
    with pytest.raises(ValueError) as refused:
        choose("flash_attention_4", **settings)
    text = str(refused.value)
    assert text.startswith(f"--attn_implementation flash_attention_4: {reason}")
    assert text.endswith("; use sdpa") and "\n" not in text


def test_without_a_gpu_nothing_is_said_of_it_unless_it_is_asked_for():
    assert choose(device=torch.device("cpu")) == ("sdpa", "--attn_implementation")
    with pytest.raises(ValueError, match="flash_attention_4: needs a GPU; use sdpa"):
        choose("flash_attention_4", device=torch.device("cpu"))


def test_scores_that_are_capped_or_attention_of_a_models_own_are_not_given_to_it(hopper):
    assert choose(config=Gemma2Config)[0] == "flex_attention"
    with pytest.raises(ValueError, match="flash_attention_4: gemma2 caps .* use eager or flex_at"):
        choose("flash_attention_4", config=Gemma2Config)
    assert choose(config=DeepseekV4Config)[0] == "eager"
    with pytest.raises(ValueError, match="deepseek_v4 has attention of its own, .* use eager"):
        choose("flash_attention_4", config=DeepseekV4Config)


def test_a_trial_runs_the_kernels_and_tells_a_fault_in_one_line(monkeypatch):
    cpu, shape = torch.device("cpu"), (torch.float32, 16, 4, (None, 8))
    assert fa4.trial(cpu, *shape, False) == fa4.trial(cpu, *shape, True) == ""

    def broken():
        raise ImportError("libcute.so: no such file\nand more")

    monkeypatch.setattr(fa4, "kernels", broken)
    fa4.trial.cache_clear()
    assert (
        fa4.trial(cpu, *shape, False) == "does not run here: ImportError: libcute.so: no such file"
    )


@pytest.mark.parametrize("way", ["fa4", "fa4_packed"])
def test_its_micro_batches_can_be_replayed_windows_or_not(way, tmp_path):
    plan = draft_plan(RunConfig(packing=way == "fa4_packed"), 1)
    for family in ("llama", "mistral"):
        model = model_of(save_tiny(tmp_path / family, family, **FAMILIES[family]), way)
        assert _why_no_graphs(plan, model, GPU) == ""
