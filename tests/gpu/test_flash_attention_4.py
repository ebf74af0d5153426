"""FlashAttention 4's kernels against fp32 softmax, alone, in compiled models and CUDA graphs; one GPU.

Each case is compared with sdpa in the same 16 bits: rounding may not take it much further from fp32.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fsdp_qlora.config.run import has_flash_attention_4
from fsdp_qlora.model import flash_attention_4 as fa4
from tests.gpu.test_packing import error, long_rows
from tests.ranks import run_ranks
from tests.tiny import save_tiny

DEVICE = torch.device("cuda", 0)


def runs_here() -> bool:
    return torch.cuda.is_available() and has_flash_attention_4() and fa4.has_kernels_for(DEVICE)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not runs_here(), reason="needs flash-attn-4 and a GPU that it has kernels for"
    ),
]
LENGTHS = [700, 1, 64, 255, 130, 0, 1200, 0, 0]  # rows of no tokens, as graphs fill borders up
SHAPES = [(32, 8, 128), (8, 8, 64), (6, 2, 96), (14, 2, 64), (4, 1, 256), (8, 4, 192)]  # H, K, D


def states(*tokens, shape, dtype=torch.bfloat16):
    """q, k, v (*tokens, heads, D) and a gradient of the output."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    heads, kv_heads, size = shape
    return [
        torch.randn(
            *tokens, n, size, dtype=dtype, device=DEVICE, generator=generator
        ).requires_grad_()
        for n in (heads, kv_heads, kv_heads, heads)
    ]


def gradients(attend, q, k, v, d_out):
    """The output and the gradients of q, k and v, all in fp32."""
    out = attend(q, k, v)
    return [x.float() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), d_out))]


def softmax(window, q, k, v):
    """One row at a time by sdpa with a mask, (B, T, H, D)."""
    at = torch.arange(q.shape[1], device=DEVICE)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (window or len(at) + 1))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    return scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen
    ).transpose(1, 2)


def softmax_of_rows(borders, window, q, k, v):
    """The same of packed rows (N, H, D)."""
    return torch.cat(
        [
            softmax(window, *(x[None, a:b] for x in (q, k, v)))[0]
            for a, b in pairwise(borders.tolist())
            if a < b
        ]
    )


def in_fp32(attend, tensors):
    return gradients(attend, *(x.detach().float().requires_grad_() for x in tensors))


def errors(found, exact) -> list[float]:
    return [((x - y).norm() / y.norm()).item() for x, y in zip(found, exact, strict=True)]


def assert_as_near_as_sdpa(ours, theirs, tensors):
    """Output and gradients, each no further from fp32 than sdpa's in 16 bits, nearly."""
    exact = in_fp32(theirs, tensors)
    far, rounding = (
        errors(gradients(ours, *tensors), exact),
        errors(gradients(theirs, *tensors), exact),
    )
    print(far, rounding)
    assert all(x < 1.5 * y + 1e-3 for x, y in zip(far, rounding, strict=True)), (far, rounding)
    assert max(rounding) < 0.02


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_output_and_gradients_are_those_of_softmax(packed, shape, window):
    dtype = torch.float16 if shape[2] == 96 else torch.bfloat16
    reason = fa4.why_not(DEVICE, dtype, shape[2], shape[0] // shape[1], (window,), packed)
    if reason.startswith("has no kernel"):
        pytest.skip(reason)
    assert not reason
    if packed:
        borders = torch.tensor([0, *LENGTHS]).cumsum(0).to(DEVICE, torch.int32)
        tensors = states(sum(LENGTHS), shape=shape, dtype=dtype)

        def theirs(q, k, v):
            return softmax_of_rows(borders, window, q, k, v)
    else:
        borders, tensors = None, states(2, 600, shape=shape, dtype=dtype)

        def theirs(q, k, v):
            return softmax(window, q, k, v)

    def ours(q, k, v):
        return fa4.flash_attention_4(q, k, v, borders, None, window)[0]

    assert_as_near_as_sdpa(ours, theirs, tensors)


def test_strided_states_and_another_scale_are_taken():
    """q, k and v as slices of one product, as phi3 makes them."""
    joined = torch.randn(2, 300, 3, 8, 64, dtype=torch.bfloat16, device=DEVICE)
    tensors = [x.detach().requires_grad_() for x in joined.unbind(2)]
    tensors.append(torch.randn(2, 300, 8, 64, dtype=torch.bfloat16, device=DEVICE))
    assert not tensors[0].is_contiguous()

    def ours(q, k, v):
        return fa4.flash_attention_4(q, k, v, None, 0.3, None)[0]

    def theirs(q, k, v):
        return softmax(None, q * (0.3 * 8), k, v)  # sdpa's is 1 / 8

    assert_as_near_as_sdpa(ours, theirs, tensors)


@pytest.mark.parametrize("rows", [1, 300])
def test_any_number_of_rows_is_taken(rows):
    """From 257 on the kernels look rows up in another way."""
    lengths = [2000] if rows == 1 else [3 + i % 20 for i in range(rows)]
    borders = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    tensors = states(sum(lengths), shape=(8, 2, 128))

    def ours(q, k, v):
        return fa4.flash_attention_4(q, k, v, borders, None, None)[0]

    assert_as_near_as_sdpa(ours, lambda q, k, v: softmax_of_rows(borders, None, q, k, v), tensors)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "shape, window", [((32, 8, 128), None), ((8, 8, 64), 300), ((4, 1, 256), None)]
)
def test_deterministic_repeats_are_bit_equal(shape, window, packed):
    borders = (
        torch.tensor([0, 3000, 3000, 4096], dtype=torch.int32, device=DEVICE) if packed else None
    )
    tensors = states(4096, shape=shape) if packed else states(2, 2048, shape=shape)

    def ours(q, k, v):
        return fa4.flash_attention_4(q, k, v, borders, None, window)[0]

    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [gradients(ours, *tensors) for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(map(torch.equal, first, other))
    assert max(errors(first, gradients(ours, *tensors))) < 0.01


def compilations() -> int:
    """How many kernels are compiled, of all kinds."""
    module = fa4.kernels()
    caches = [getattr(value, "compile_cache", None) for value in vars(module).values()]
    return sum(len(cache.cache) for cache in caches if hasattr(cache, "cache"))


def test_lengths_and_numbers_of_rows_compile_nothing_new():
    def step(*lengths):
        borders = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
        for tensors, cut in (
            (states(sum(lengths), shape=(8, 2, 128)), borders),
            (states(len(lengths), max(lengths), shape=(8, 2, 128)), None),
        ):
            gradients(
                lambda q, k, v, cut=cut: fa4.flash_attention_4(q, k, v, cut, None, None)[0],
                *tensors,
            )

    step(500, 300)
    before = compilations()
    for lengths in ([8192], [200] * 40, [1000, 2, 3, 700], [256] * 256):
        step(*lengths)
    assert compilations() == before > 0


@pytest.mark.parametrize("packed", [False, True])
def test_a_captured_graph_replays_forward_and_backward_on_new_data(packed):
    borders = (
        torch.tensor([0, 700, 1000, 1000], dtype=torch.int32, device=DEVICE) if packed else None
    )
    tensors = states(1000, shape=(8, 2, 128)) if packed else states(2, 500, shape=(8, 2, 128))

    def ours(q, k, v):
        return fa4.flash_attention_4(q, k, v, borders, None, None)[0]

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


# ---- in models ---------------------------------------------------------------------------------

SHAPE = dict(hidden_size=256, intermediate_size=512, max_position_embeddings=1024)
FAMILIES = {"llama": {}, "mistral": dict(sliding_window=100), "qwen3": dict(head_dim=128)}


def model_results(folder: str) -> dict:
    """Loss and gradients of the same rows: sdpa in fp32 and bf16; FlashAttention 4 in every way."""
    from fsdp_qlora import build
    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import collate, collate_packed
    from tests.test_attention import loss_and_gradients

    rows, found = long_rows(), {}
    alone, packed = [collate(rows, 0)], [collate_packed([rows[:2], rows[2:]], 0)]

    def run(name, packing, **settings):
        config = RunConfig(
            **dict(
                model_name=folder,
                lora_rank=4,
                lora_dropout=0.0,
                train_type="lora",
                compile=False,
                packing=packing,
                attn_implementation=name,
            )
            | settings
        )
        model = build.build_model(config, DEVICE)
        generator = torch.Generator().manual_seed(1)
        for n, p in trainable_parameters(model).items():
            if ".lora_B." in n:
                p.data.copy_(torch.randn(p.shape, generator=generator) * 0.1)
        assert (
            model.config._attn_implementation
            == {"sdpa": "sdpa", "auto": "fa4_packed" if packing else "fa4"}[name]
        )
        return loss_and_gradients(model, packed if packing else alone)

    found["fp32"] = run("sdpa", False, precision="fp32")
    found["bf16"] = run("sdpa", False)
    for packing in (False, True):
        found["eager", packing] = run("auto", packing)
        for policy in ("keep_all", "recompute_all", "keep_attention", "keep_linears"):
            found[policy, packing] = run("auto", packing, compile=True, activation_policy=policy)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_models_agree_with_sdpa_compiled_and_under_every_policy(family, tmp_path):
    """In bf16 no further from fp32 than sdpa is, nearly."""
    folder = save_tiny(tmp_path, family, **SHAPE, **FAMILIES[family])
    (results,) = run_ranks(model_results, 1, folder, device="cuda")
    reference, rounding = results.pop("fp32"), results.pop("bf16")
    rounding = error(rounding, reference)
    assert rounding < 0.05 and len(results) == 10
    for case, result in results.items():
        print(family, case, error(result, reference), rounding)
        torch.testing.assert_close(result[0], reference[0], rtol=2**-8, atol=0)
        assert error(result, reference) < 1.5 * rounding, case


def replayed_and_launched(folder: str) -> dict:
    """Losses and weights of six steps, launched one by one and replayed, and the number of graphs."""
    from tests.gpu.test_graphs import train_both_ways

    cases = {
        packing: dict(packing=packing, attn_implementation="flash_attention_4")
        for packing in (False, True)
    }
    return train_both_ways(folder, cases)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_micro_batches_are_replayed_as_they_are_launched_windows_or_not(family, tmp_path):
    from tests.gpu.test_graphs import compare

    window = dict(sliding_window=10) if family == "mistral" else {}
    folder = save_tiny(tmp_path, family, **SHAPE, **window)
    (results,) = run_ranks(replayed_and_launched, 1, folder, device="cuda")
    for packing in (False, True):
        compare(results, packing)


def answers(folder: str) -> list:
    """Tokens that a model built with FlashAttention 4 generates, beside sdpa's, for uneven prompts."""
    from fsdp_qlora import build
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.observe.samples import _greedy_answers

    found = []
    for name in ("flash_attention_4", "sdpa"):
        for packing in (False, True):
            config = RunConfig(
                model_name=folder, train_type="lora", attn_implementation=name, packing=packing
            )
            model = build.build_model(config, DEVICE)
            found.append(
                _greedy_answers(
                    model,
                    [[1, 2, 3], [5] * 20],
                    DEVICE,
                    max_new_tokens=12,
                    stops=[],
                    packing=packing,
                )
            )
    return found


def test_answers_are_those_of_sdpa(tmp_path):
    (found,) = run_ranks(answers, 1, save_tiny(tmp_path, **SHAPE), device="cuda")
    ours = [token for way in found[:2] for row in way for token in row]
    theirs = [token for way in found[2:] for row in way for token in row]
    assert len(ours) == len(theirs) == 48
    assert (
        sum(a == b for a, b in zip(ours, theirs, strict=True)) > 40
    )  # bf16: a tie may fall otherwise


def test_a_trial_finds_nothing_wrong_here():
    for packed in (False, True):
        assert fa4.why_not(DEVICE, torch.bfloat16, 128, 4, (None, 64), packed) == ""
