"""Grouped products on a GPU: near to fp32, zero where an expert has no token, and without the host."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.experts import fp8_products, grouped_matmul
from fsdp_qlora.experts.grouped_matmul import Routing, grouped_linear
from fsdp_qlora.experts.lora_ops import adapted_experts
from fsdp_qlora.experts.row_sums import sum_rows
from fsdp_qlora.quantization.formats import dequantize_rows, quantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
COUNTS = [0, 37, 0, 1, 250, 96, 0, 0]  # rows of each expert
E, O, I, SCALING = len(COUNTS), 192, 256, 0.5  # noqa: E741


def layer(rank: int, dtype: torch.dtype):
    """x, ends, packed W, absmax, A and B of PEFT's layout, dY, and W + scaling B A of each in fp32."""
    torch.manual_seed(0)
    x, dy = (torch.randn(sum(COUNTS), n, device="cuda", dtype=dtype) for n in (I, O))
    packed, absmax = quantize_rows(torch.randn(E * O, I, device="cuda") / I**0.5)
    a, b = (
        torch.randn(E * rank, I, device="cuda") / I**0.5,
        torch.randn(O, rank * E, device="cuda") / 16,
    )
    whole = dequantize_rows(packed, absmax, I, "nf4", torch.float32).view(
        E, O, I
    ) + SCALING * torch.bmm(b.view(O, rank, E).permute(2, 0, 1), a.view(E, rank, I))
    ends = torch.tensor(COUNTS, device="cuda").cumsum(0).int()
    return x, ends, packed, absmax, a.requires_grad_(), b.requires_grad_(), dy, whole


def error(found, expected) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("part_values", [2**28, 2**17], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    "rank, dtype", [(16, torch.bfloat16), (6, torch.bfloat16), (4, torch.float32)]
)
def test_experts_and_their_adapters_are_near_to_fp32(monkeypatch, rank, dtype, part_values):
    monkeypatch.setattr(grouped_matmul, "PART_VALUES", part_values)
    x, ends, packed, absmax, a, b, dy, whole = layer(rank, dtype)
    junk = torch.full((64, 2**20), torch.nan, device="cuda")  # what memory may hold
    del junk
    with torch.inference_mode(False):
        y = adapted_experts(
            x.requires_grad_(), *Routing(ends), packed, absmax, a, b, SCALING, I, "nf4", ""
        )
        y.backward(dy)
    tolerance = 2**-6 if dtype == torch.bfloat16 else 5e-3  # tf32 is fine
    spans = [slice(stop - n, stop) for n, stop in zip(COUNTS, ends.tolist(), strict=True)]
    each = list(zip(spans, whole, strict=True))
    assert error(y, torch.cat([x[s].float() @ w.t() for s, w in each])) < tolerance
    assert error(x.grad, torch.cat([dy[s].float() @ w for s, w in each])) < tolerance
    a3, b3 = a.view(E, rank, I), b.view(O, rank, E).permute(2, 0, 1)
    da, db = a.grad.view(E, rank, I), b.grad.view(O, rank, E).permute(2, 0, 1)
    for e, s in enumerate(spans):
        expected = (
            SCALING * b3[e].t() @ dy[s].float().t() @ x[s].float(),
            SCALING * dy[s].float().t() @ x[s].float() @ a3[e].t(),
        )
        for found, wanted in zip((da[e], db[e]), expected, strict=True):
            if COUNTS[e]:
                assert error(found, wanted) < tolerance, e
            else:
                assert not found.any(), e


on_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="torch has the fp8 kernel for Hopper",
)


@on_hopper
@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("part_values", [2**28, 2**17], ids=["whole", "in parts"])
@pytest.mark.parametrize("tokens_at", ["", "input", "output"])
def test_experts_in_fp8_are_near_to_fp32(monkeypatch, tokens_at, part_values, quantized):
    monkeypatch.setattr(grouped_matmul, "PART_VALUES", part_values)
    x, ends, packed, absmax, a, b, dy, whole = layer(16, torch.bfloat16)
    rows = torch.randperm(len(x), device="cuda").view(-1, 2)  # two rows of each token
    tokens = rows.flatten().argsort() // 2
    routing = Routing(ends, tokens, rows, tokens_at)
    if tokens_at == "input":
        x = x[: len(rows)]
    if tokens_at == "output":
        dy = dy[: len(rows)]
    dense = dequantize_rows(packed, absmax, I, "nf4", torch.float32)
    form = (packed, absmax) if quantized else (dense.bfloat16(), None)
    x_rows, dy_rows = routing.inputs(x).float(), routing.output_gradients(dy).float()
    spans = grouped_matmul.spans(ends)
    for adapted in (False, True):
        w = whole if adapted else dense.view(E, O, I)
        mine = x.detach().requires_grad_()
        if adapted:
            y = adapted_experts(mine, *routing, *form, a, b, SCALING, I, "nf4", "fp8")
        else:
            y = grouped_linear(mine, *routing, *form, I, "nf4", "fp8")
        y.backward(dy)
        expected = torch.cat([x_rows[s] @ each.t() for s, each in zip(spans, w, strict=True)])
        dx = torch.cat([dy_rows[s] @ each for s, each in zip(spans, w, strict=True)])
        assert error(y, routing.outputs(expected)) < 0.06
        assert error(mine.grad, routing.input_gradients(dx)) < 0.06


@pytest.mark.parametrize("by_expert, adapted, from_tokens", [(0, 0, 1), (1, 0, 0), (1, 1, 1)])
def test_rows_in_fp8_are_those_of_the_definition(by_expert, adapted, from_tokens):
    torch.manual_seed(0)
    rows, ends = sum(COUNTS), torch.tensor(COUNTS, device="cuda").cumsum(0).int()
    x = torch.randn(100 if from_tokens else rows, I, device="cuda").bfloat16()
    tokens = torch.randint(100, (rows,), device="cuda") if from_tokens else None
    scales = torch.rand(E, I, device="cuda") + 0.1 if by_expert else None
    beside = torch.randn(rows, 6, device="cuda").bfloat16() if adapted else None
    inverse = torch.rand(6, device="cuda") if adapted else None
    given = (x, ends, tokens, scales, beside, inverse)
    x8, scale = fp8_products.quantize_rows_on_gpu(*given, 16 * adapted)
    on_cpu = (None if t is None else t.cpu() for t in given)
    expected, expected_scale = fp8_products.quantized_rows(*on_cpu, 16 * adapted)
    torch.testing.assert_close(scale.cpu(), expected_scale)
    # A value between two of fp8's may be rounded to either, by the last bit of a division.
    same = (x8.cpu().float() == expected.float()).float().mean()
    assert x8.shape == expected.shape and same > 0.99


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] not in (9, 10),
    reason="torch has the kernel for Hopper and Blackwell",
)
def test_the_host_waits_for_no_count_of_tokens():
    x, ends, packed, absmax, a, b, dy, _ = layer(16, torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = adapted_experts(
            x.requires_grad_(), *Routing(ends), packed, absmax, a, b, SCALING, I, "nf4", ""
        )
        y.backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens, each, width", [(700, 8, 2048), (33, 2, 4096), (5, 1, 100)])
def test_rows_of_a_token_are_summed_in_fp32_and_rounded_once(tokens, each, width, dtype):
    torch.manual_seed(0)
    values = torch.randn(tokens * each, width + 8, device="cuda").to(dtype)[:, :width]
    rows = torch.randperm(tokens * each, device="cuda").view(tokens, each)
    expected = values.float()[rows].sum(1)
    rounding = torch.finfo(dtype).eps  # and fp32 sums may be taken in another order
    torch.testing.assert_close(
        sum_rows(values, rows).float(), expected, rtol=2 * rounding, atol=32 * rounding
    )
