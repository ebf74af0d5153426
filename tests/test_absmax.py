"""8-bit scales: slices of rows stand alone, and less is lost than by bitsandbytes' double quantization.

Shapes: O out rows, K blocks of a row.
"""

import bitsandbytes.functional as bnb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_qlora.quantization import fp8
from fsdp_qlora.quantization.absmax import absmax_columns, decode_absmax, encode_absmax
from fsdp_qlora.quantization.formats import FrozenWeight, dequantize_rows, quantize_rows
from fsdp_qlora.quantization.quantize import QuantLinear, frozen_linear

torch.set_num_threads(1)

ROWS, COLUMNS = 128, 1024


def normal(seed=0):
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) * 0.02


def with_columns(factor, columns=slice(7, 8)):
    weight = normal()
    weight[:, columns] *= factor
    return weight


WEIGHTS = {
    "normal": normal(),
    "rows of other sizes": normal() * torch.logspace(-3, 0, ROWS)[:, None],
    "columns of other sizes": normal() * torch.logspace(-1.5, 0, COLUMNS),
    "heavy tails": normal() / normal(1).abs().clamp(min=2e-4) * 0.02,
    "an outlier column": with_columns(50),
    "a huge outlier column": with_columns(1000),
    "half zero": with_columns(0, slice(0, 512)),
    "a part near zero": with_columns(1e-3, slice(0, 256)),
    "a part as good as zero": with_columns(1e-20, slice(0, 64)),
}


def error(weight, restored) -> float:
    return ((restored - weight).norm() / weight.norm()).item()


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_weights_lose_no_more_than_by_double_quantization(kind, quant_type):
    weight = WEIGHTS[kind]
    packed, stored = quantize_rows(weight, quant_type, "int8")
    ours = error(weight, dequantize_rows(packed, stored, COLUMNS, quant_type, torch.float32))
    theirs = bnb.dequantize_4bit(
        *bnb.quantize_4bit(weight, blocksize=64, quant_type=quant_type, compress_statistics=True)
    )
    assert ours <= error(weight, theirs)
    exact = dequantize_rows(*quantize_rows(weight, quant_type), COLUMNS, quant_type, torch.float32)
    assert ours < error(weight, exact) * 1.002


def test_a_scale_takes_a_byte_and_a_row_four_more():
    packed, stored = quantize_rows(normal(), "nf4", "int8")
    assert stored.nbytes == ROWS * (COLUMNS // 64 + 4) == 2 * ROWS * absmax_columns(16, "int8")
    assert stored.dtype == torch.bfloat16 and packed.nbytes == ROWS * COLUMNS // 2


@given(
    st.lists(
        st.lists(st.floats(0, 2.0**127, width=32), min_size=5, max_size=5), min_size=1, max_size=6
    ),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_any_rows_encode_alone_as_among_others_and_keep_their_size(rows, data):
    absmax = torch.tensor(rows, dtype=torch.float32)
    stored = encode_absmax(absmax)
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert torch.equal(
        encode_absmax(absmax[start:stop]).view(torch.uint8), stored[start:stop].view(torch.uint8)
    )
    decoded = decode_absmax(stored, 5)
    assert ((decoded == 0) | (absmax > 0)).all() and decoded.isfinite().all()
    # A row's largest error is a half step of the widest range at its largest scale, at most.
    largest = absmax.amax(1, keepdim=True)
    assert ((decoded - absmax).abs() <= largest * 0.024).all()


def test_scales_of_one_size_are_within_a_thousandth():
    absmax = torch.linspace(1, 2, 300)[None].contiguous()
    assert ((decode_absmax(encode_absmax(absmax), 300) / absmax - 1).abs() < 0.004).all()
    assert torch.equal(decode_absmax(absmax, 300), absmax)  # plain scales are passed on


def quantized(out_features, in_features, absmax_dtype="int8"):
    linear = nn.Linear(in_features, out_features)
    linear.weight.data = torch.randn(
        out_features, in_features, generator=torch.Generator().manual_seed(2)
    )
    return QuantLinear.from_linear(linear, absmax_dtype=absmax_dtype)


@pytest.mark.parametrize(
    "move",
    [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: nn.Sequential(m).bfloat16()[0]],
)
def test_the_bytes_stay_as_they_are_through_a_change_of_dtype(move):
    layer = quantized(33, 200)
    before = [p.detach().clone() for p in (layer.weight, layer.absmax)]
    moved = move(layer)
    for was, now in zip(before, (moved.weight, moved.absmax), strict=True):
        assert torch.equal(was.view(torch.uint8), now.view(torch.uint8))


@pytest.mark.parametrize("shape", [(16, 64), (33, 200)])
def test_a_layer_multiplies_by_what_it_dequantizes_to(shape):
    layer, x = quantized(*shape), torch.randn(4, shape[1], requires_grad=True)
    y = layer(x)
    y.sum().backward()
    weight = layer.dequantize(torch.float32)
    torch.testing.assert_close(y, x @ weight.t() + layer.bias)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, -1))
    args = (x, layer.weight, layer.absmax, layer.bias, shape[1], "nf4", "")
    torch.library.opcheck(frozen_linear, args)


def test_fp8_products_take_8_bit_scales_as_the_scales_they_stand_for():
    layer, x = quantized(32, 320), torch.randn(8, 320)
    plain, dy = decode_absmax(layer.absmax, 5), torch.randn(8, 32)
    weights = [FrozenWeight(layer.weight, scales, 320, "nf4") for scales in (layer.absmax, plain)]
    y, same_y = (fp8.forward_product(x, weight) for weight in weights)
    dx, same_dx = (fp8.backward_product([dy], [weight]) for weight in weights)
    assert torch.equal(y, same_y) and torch.equal(dx, same_dx)


def test_unknown_scales_are_refused_with_the_choices():
    with pytest.raises(ValueError, match="absmax_dtype 'fp16': choose fp32 or int8"):
        QuantLinear(8, 8, absmax_dtype="fp16")
