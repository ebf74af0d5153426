"""Attention with sinks by the kernels of a GPU, against fp32 softmax with one more logit; one GPU.

Each case is compared with the same softmax in 16 bits: rounding may not take it much further from fp32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_qlora.model import attention
from fsdp_qlora.model.sinks import attention_with_sinks
from tests.families import save_family
from tests.gpu.test_flash_attention_4 import errors, runs_here
from tests.gpu.test_packing import error, long_rows
from tests.ranks import run_ranks
from tests.tiny import save_tiny

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
KERNELS = [False, *([True] if runs_here() else [])]  # torch's, FlashAttention 4's
LENGTHS = [700, 1, 64, 255, 130, 0, 1200, 0, 0]  # rows of no tokens, as graphs fill borders up
SHAPES = [(64, 8, 64), (8, 8, 128), (4, 1, 192)]  # H, K, D


def states(*tokens, shape, dtype=torch.bfloat16):
    """q, k, v (*tokens, heads, D), sinks (H,) and a gradient of the output."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    heads, kv_heads, size = shape

    def random(*sizes):
        made = torch.randn(*sizes, dtype=dtype, device=DEVICE, generator=generator)
        return made.requires_grad_()

    q, k, v, d = (random(*tokens, n, size) for n in (heads, kv_heads, kv_heads, heads))
    return [q, k, v, random(heads), d]


def softmax(window, q, k, v, sinks):
    """Rows (B, T, H, D), their scores kept."""
    at, heads = torch.arange(q.shape[1], device=DEVICE), q.shape[2]
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (window or len(at) + 1))
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    sink = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    return torch.einsum("bhqk,bkhd->bqhd", shares, v)


def softmax_of_rows(lengths, window, q, k, v, sinks):
    """The same of packed rows (N, H, D)."""
    rows = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat(
        [softmax(window, *(x[None] for x in row), sinks)[0] for row in rows if len(row[0])]
    )


def gradients(attend, *tensors):
    """The output and the gradients of q, k, v and sinks, all in fp32."""
    *given, d_out = tensors
    out = attend(*given)
    return [x.float() for x in (out.detach(), *torch.autograd.grad(out, given, d_out))]


def assert_as_near_as_softmax(ours, theirs, tensors):
    """Output and gradients, each no further from fp32 than softmax in 16 bits, nearly."""
    exact = gradients(theirs, *(x.detach().float().requires_grad_() for x in tensors))
    far, rounding = (errors(gradients(f, *tensors), exact) for f in (ours, theirs))
    print(far, rounding)
    assert all(x < 1.5 * y + 2e-3 for x, y in zip(far, rounding, strict=True)), (far, rounding)
    assert max(rounding) < 0.05


def borders_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fa4", KERNELS)
def test_rows_alone_have_the_output_and_gradients_of_softmax(fa4, shape, window):
    def ours(q, k, v, sinks):
        return attention_with_sinks(q, k, v, sinks, [], [600, 600], None, window, fa4)[0]

    tensors = states(2, 600, shape=shape)
    assert_as_near_as_softmax(ours, lambda *given: softmax(window, *given), tensors)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("fa4", KERNELS)
def test_packed_rows_have_the_output_and_gradients_of_softmax(fa4, shape, window):
    rows = [borders_of(LENGTHS)] * 2, [max(LENGTHS)] * 2

    def ours(q, k, v, sinks):
        return attention_with_sinks(q, k, v, sinks, *rows, None, window, fa4)[0]

    tensors = states(sum(LENGTHS), shape=shape)
    assert_as_near_as_softmax(ours, lambda *x: softmax_of_rows(LENGTHS, window, *x), tensors)


@pytest.mark.parametrize("fa4", KERNELS)
def test_states_as_models_give_them_compile_to_the_same(fa4):
    """Heads before tokens, turned: outputs and gradients keep strides that torch.compile is told."""

    def ours(q, k, v, sinks):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = attention_with_sinks(q, k, v, sinks, [], [300, 300], 0.2, 64, fa4)
        return out.reshape(2, 300, -1) * 2

    q, k, v, sinks, d_out = states(2, 300, shape=(8, 2, 64))
    given = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    given += [sinks, d_out.detach().flatten(2)]
    plain = gradients(ours, *given)
    compiled = gradients(torch.compile(ours, fullgraph=True), *given)
    assert max(errors(compiled, plain)) < 0.01


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fa4", KERNELS)
def test_a_captured_graph_replays_forward_and_backward_on_new_data(fa4, packed):
    borders = borders_of([700, 300, 0])
    rows = ([borders, borders], [1000, 1000]) if packed else ([], [500, 500])
    tensors = states(1000, shape=(8, 2, 64)) if packed else states(2, 500, shape=(8, 2, 64))

    def ours(q, k, v, sinks):
        return attention_with_sinks(q, k, v, sinks, *rows, None, 128, fa4)[0]

    gradients(ours, *tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(ours, *tensors)
    with torch.no_grad():
        for x in tensors:
            x.mul_(-0.5).add_(0.1)
        if packed:
            borders.copy_(torch.tensor([0, 10, 900, 1000]))
    graph.replay()
    assert max(errors(captured, gradients(ours, *tensors))) < 0.01


@pytest.mark.parametrize("fa4", KERNELS)
def test_memory_grows_with_the_tokens_not_with_their_square(fa4):
    tokens, shape = 32768, (8, 1, 64)
    tensors = states(1, tokens, shape=shape)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()

    def ours(q, k, v, sinks):
        return attention_with_sinks(q, k, v, sinks, [], [tokens] * 2, None, None, fa4)[0]

    gradients(ours, *tensors)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 2 * tokens**2  # the scores of one head, in 16 bits


# ---- in models ---------------------------------------------------------------------------------


def model_results(folder: str) -> dict:
    """Loss and gradients of the same rows: eager in fp32 and bf16; flash kernels in every way."""
    from fsdp_qlora import build
    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import collate, collate_packed
    from tests.test_attention import loss_and_gradients

    rows, found = long_rows(), {}
    batches = {
        False: [collate([row], 0) for row in rows],
        True: [collate_packed([rows[:2], rows[2:]], 0)],
    }
    original = attention.flash_attention_4.why_not

    def run(name, packing, fa4=False, **settings):
        attention.flash_attention_4.why_not = original if fa4 else lambda *_: "is left out"
        common = dict(lora_rank=4, lora_dropout=0.0, train_type="lora", compile=False)
        common |= dict(packing=packing, attn_implementation=name, model_name=folder)
        model = build.build_model(RunConfig(**common | settings), DEVICE)
        generator = torch.Generator().manual_seed(1)
        for n, p in trainable_parameters(model).items():
            if ".lora_B." in n:
                p.data.copy_(torch.randn(p.shape, generator=generator) * 0.1)
        kernels = ("fa4" if fa4 else "torch_fa") + "_packed" * packing
        assert model.config._attn_implementation == ("eager" if name == "eager" else kernels)
        return loss_and_gradients(model, batches[packing])

    found["fp32"] = run("eager", False, precision="fp32")
    found["bf16"] = run("eager", False)
    for packing in (False, True):
        for fa4 in KERNELS:
            found["not compiled", packing, fa4] = run("auto", packing, fa4)
            for policy in ("keep_all", "keep_attention"):
                settings = dict(compile=True, activation_policy=policy)
                found[policy, packing, fa4] = run("auto", packing, fa4, **settings)
    return found


def calm_scores(folder: str):
    """Smaller queries and keys: random ones have scores that 16 bits round by a sixth of the gradient."""
    for path in Path(folder).glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                tensors[name] = tensors[name] / 4
        save_file(tensors, path, metadata=dict(format="pt"))


def test_gpt_oss_agrees_with_its_eager_code_compiled_and_under_policies(tmp_path):
    """In bf16 no further from fp32 than eager is, nearly. One expert, so that none is chosen by rounding."""
    sizes = dict(hidden_size=256, head_dim=64, num_local_experts=1, num_experts_per_tok=1)
    folder = save_family(tmp_path / "model", "gpt-oss", **sizes, sliding_window=128)
    calm_scores(folder)
    (results,) = run_ranks(model_results, 1, folder, device="cuda")
    reference, rounding = results.pop("fp32"), results.pop("bf16")
    rounding = error(rounding, reference)
    assert rounding < 0.05 and len(results) == 6 * len(KERNELS)
    for case, result in results.items():
        print(case, error(result, reference), rounding)
        torch.testing.assert_close(result[0], reference[0], rtol=2**-7, atol=0)
        assert error(result, reference) < 1.5 * rounding + 1e-3, case


def windowed_results(folder: str) -> dict:
    """Loss and gradients of rows alone under windows: masked in fp32 and bf16, and without a mask."""
    from fsdp_qlora import build
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import collate
    from tests.test_attention import loss_and_gradients

    rows = [collate([row], 0) for row in long_rows()]
    attention.flash_attention_4.why_not = lambda *_: "is left out"

    def run(kernels, name, **settings):
        common = dict(model_name=folder, train_type="full", compile=False, precision="bf16")
        config = RunConfig(**common | dict(attn_implementation=name) | settings)
        model = build.build_model(config, DEVICE)
        assert model.config._attn_implementation == kernels
        return loss_and_gradients(model, rows)

    return {
        "fp32": run("sdpa", "sdpa", precision="fp32"),
        "bf16": run("sdpa", "sdpa"),
        "not compiled": run("torch_fa", "auto"),
        "compiled": run("torch_fa", "auto", compile=True),
    }


def test_sliding_windows_need_no_mask_where_flash_attention_4_is_not(tmp_path):
    sizes = dict(hidden_size=256, intermediate_size=512, max_position_embeddings=1024)
    folder = save_tiny(tmp_path, "mistral", **sizes, sliding_window=100)
    (results,) = run_ranks(windowed_results, 1, folder, device="cuda")
    reference, rounding = results.pop("fp32"), results.pop("bf16")
    rounding = error(rounding, reference)
    for case, result in results.items():
        print(case, error(result, reference), rounding)
        assert error(result, reference) < 1.5 * rounding + 1e-3, case
