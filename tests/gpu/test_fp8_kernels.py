"""The fp8 kernels compute what the same lines of torch compute on the CPU. Needs Hopper or newer."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.quantization import fp8
from fsdp_qlora.quantization.formats import FrozenWeight, dequantize_rows, quantize_rows
from fsdp_qlora.quantization.fp8_weight_cache import Fp8WeightCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU with fp8",
    ),
]


def relative(ours, reference) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


def one_step_at_most(ours, reference):
    """Each value is the reference's, or its neighbour in fp8; and few are neighbours.

    Both round x f to e4m3, with products and quotients in fp32 that may end some 8 ulps apart, 2^-20 of
    a value. Only what lies so near to the middle between two neighbours can go the other way. Middles
    are 2^-4 of a value apart at the least, so that is 2^-15 of the values: two in 65,536, by one step
    of 2^-3 at the most (2^-9 below 2^-6), make 1e-3 of the norm. One in 2^-10 leaves room.
    """
    step = (reference.abs() / 8).clamp(min=2.0**-9) * 1.0001
    differs = ours != reference
    assert ((ours - reference).abs() <= step).all()
    assert differs.sum() <= max(4, differs.numel() / 2**10), differs.sum()


def on_host(value):
    """Tensors, in lists of any depth, on the CPU."""
    if isinstance(value, FrozenWeight):
        return FrozenWeight(*map(on_host, value))
    if isinstance(value, list | tuple):
        return [on_host(each) for each in value]
    return value.cpu() if isinstance(value, torch.Tensor) else value


def together(*args) -> torch.Tensor:
    """Products of one input, side by side."""
    return torch.cat(fp8.forward_products(*args), 1)


@pytest.fixture(params=[(300, 512, 1024, 64), (1000, 4096, 1024, 8), (64, 128, 272, 16)])
def layer(request):
    n, inputs, outputs, rank = request.param
    normal = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    weight = normal(outputs, inputs) * torch.logspace(-3, 0, outputs, device="cuda")[:, None]
    packed, absmax = quantize_rows(weight.bfloat16())
    return (
        normal(n, inputs),
        normal(n, outputs),
        packed,
        absmax,
        normal(n, rank),
        normal(outputs, rank).float() / 100,
        normal(n, rank) / 100,
        normal(rank, inputs).float() / 16,
    )


def test_kernels_equal_the_reference(layer):
    x, dy, packed, absmax, xa, b, dxa, a = layer
    inputs = x.shape[1]
    dense = dequantize_rows(packed, absmax, inputs, "nf4", torch.float32)
    w = FrozenWeight(packed, absmax, inputs, "nf4")
    in_16_bits = FrozenWeight(dense.bfloat16(), None, inputs, "")
    scale = fp8.row_scale(w)
    for transposed in (False, True):
        w8 = fp8.weight_to_fp8(w, scale, transposed)
        plain = (dense / scale[:, None]).to(fp8.FP8)
        expected = plain.t() if transposed else plain
        same = (w8.float() == expected.float()).float().mean()
        assert same > 0.97, same  # codes are decoded to fp16, which tips what is between two values
        assert relative(w8.float(), expected.float()) < 0.01
        whole = fp8.weight_to_fp8(in_16_bits, scale, transposed)
        plain = (dense.bfloat16().float() / scale[:, None]).to(fp8.FP8)
        assert torch.equal(whole.float(), (plain.t() if transposed else plain).float())
    dense_scale = fp8.row_scale(in_16_bits)
    torch.testing.assert_close(dense_scale, dense.bfloat16().abs().amax(1).float() / fp8.FP8_MAX)
    x8, x_scale = fp8.quantize_tokens([xa, x], [0.5, 1.0], wide=80)
    filled = torch.nn.functional.pad(xa / 2, (0, 80 - xa.shape[1]))
    torch.testing.assert_close(
        x8.float() * x_scale[:, None], torch.cat([filled, x], 1).float(), rtol=2**-4, atol=1e-2
    )
    for values, rows, first in (
        (b, scale, 0),
        (b, scale, 24),
        (a.t(), None, 0),
        (a.bfloat16().t(), None, 0),
    ):
        wide, rank = fp8.rank_columns(first + values.shape[1]), values.shape[1]
        on_gpu, on_cpu = (
            torch.ones(len(values), wide + 32, dtype=torch.bfloat16, device=device).to(fp8.FP8)[
                :, :wide
            ]
            for device in ("cuda", "cpu")
        )
        inverse = fp8.columns_to_fp8(values, rows, 8.0, fp8.FP8_MAX, on_gpu, first, 0.5)
        expected = fp8.columns_to_fp8(
            values.cpu(), None if rows is None else rows.cpu(), 8.0, fp8.FP8_MAX, on_cpu, first, 0.5
        )
        torch.testing.assert_close(inverse.cpu(), expected, rtol=1e-5, atol=0)
        one_step_at_most(on_gpu.cpu().float(), on_cpu.float())
        assert not on_gpu.float()[:, first + rank :].any() and not on_gpu.float()[:, :first].any()
    # Against the same arithmetic on the CPU: only the order of sums and bf16 rounding differ.
    pairs = (
        (fp8.forward_product, (x, w, xa, b, 0.25)),
        (fp8.backward_product, ([dy], [w], dxa, a)),
        (fp8.backward_product, ([dy, dy, dy], [w] * 3)),
        (fp8.forward_product, (x, in_16_bits, xa, b, 0.25)),
        (together, (x, [w] * 2, [xa, -xa], [b, 9 * b], [0.25, 1.0])),
        (together, (x, [w] * 2, [], [], [])),
        (fp8.backward_product, ([dy], [in_16_bits], dxa, a)),
    )
    for product, args in pairs:
        on_cpu = on_host(args)
        assert relative(product(*args).cpu(), product(*on_cpu).float()) < 0.01
    y = fp8.forward_product(x, w, xa, b, 0.25)
    dx = fp8.backward_product([dy], [w], dxa, a)
    assert relative(y, x.float() @ dense.t() + 0.25 * xa.float() @ b.t()) < 0.06
    assert relative(dx, dy.float() @ dense + dxa.float() @ a) < 0.06


def test_products_are_the_same_every_time(layer):
    """No kernel adds in an order that changes from run to run; what is kept is as if made anew."""
    x, dy, packed, absmax, xa, b, dxa, a = layer
    w = FrozenWeight(packed, absmax, x.shape[1], "nf4")

    def products():
        return (
            fp8.forward_product(x, w, xa, b, 0.25),
            fp8.backward_product([dy], [w], dxa, a),
        )

    first, *others = (products() for _ in range(20))
    for forms in (True, False):
        keeper = Fp8WeightCache([packed], forms)
        for _ in range(5):
            fp8.forward_product(x, w, xa, torch.randn_like(b), 0.25)
            fp8.backward_product([dy], [w], dxa, 3 * a)
            others.append(products())
        uses = {"rows", "adapted rows"} | ({"forward", "backward"} if forms else set())
        assert {use for use, _ in keeper.kept} == uses
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@pytest.mark.parametrize("forms", [True, False])
@pytest.mark.parametrize("quantized", [True, False])
def test_graphs_read_what_is_kept_and_keep_nothing_of_their_own(
    layer, quantized, forms, monkeypatch
):
    x, dy, packed, absmax, xa, b, dxa, a = layer
    w = FrozenWeight(packed, absmax, x.shape[1], "nf4")
    if not quantized:
        w = FrozenWeight(dequantize_rows(*w, torch.bfloat16), None, x.shape[1], "")
    made, whole = [], fp8.row_scales_on_gpu
    monkeypatch.setattr(fp8, "row_scales_on_gpu", lambda w: made.append(w) or whole(w))

    def products():
        return (
            fp8.forward_product(x, w, xa, b, 0.25),
            fp8.backward_product([dy], [w], dxa, a),
        )

    expected = products()
    keeper = Fp8WeightCache([w.weight], forms)
    for launched in (False, True):
        if launched:
            products()
        made.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = products()
        assert bool(keeper.kept) == launched and len(made) == (0 if launched else 2)
        for y in found:
            y.zero_()
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
