"""Every format of frozen weights: slices stand alone, errors are as large as the bits say, HQQ is hqq's.

Shapes: O out rows, I inputs, K groups of 64 in a row.
"""

import json

import pytest
import torch
from torch import nn

from fsdp_qlora.choices import FORMATS
from fsdp_qlora.export import RUN_FILE
from fsdp_qlora.export.quantized_base import trained_quant
from fsdp_qlora.quantization import hqq
from fsdp_qlora.quantization.absmax import decode_absmax
from fsdp_qlora.quantization.formats import dequantize_rows, quantize_rows
from fsdp_qlora.quantization.quantize import QuantLinear, frozen_linear

torch.set_num_threads(1)

SHAPES = [(40, 320), (33, 200), (7, 31), (1, 64)]
# Root-mean-square error of normal weights over their size: measured here, with a little room.
LOSS = {
    "nf4": 0.095,
    "fp4": 0.125,
    "int8": 0.0065,
    "hqq8": 0.0065,
    "hqq4": 0.10,
    "hqq3": 0.21,
    "hqq2": 0.46,
}
BITS = {"nf4": 4, "fp4": 4, "int8": 8, "hqq8": 8, "hqq4": 4, "hqq3": 3, "hqq2": 2}


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def as_bytes(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.fixture(params=FORMATS)
def quant_type(request):
    return request.param


@pytest.fixture(params=["fp32", "int8"])
def absmax_dtype(request):
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_slice_quantizes_to_the_slice_of_the_whole(quant_type, absmax_dtype, shape):
    weight = normal(shape)
    whole = quantize_rows(weight, quant_type, absmax_dtype)
    for start, stop in [(0, 0), (0, shape[0] // 2), (shape[0] // 3, shape[0]), (shape[0],) * 2]:
        part = quantize_rows(weight[start:stop], quant_type, absmax_dtype)
        for ours, all_rows in zip(part, whole, strict=True):
            assert ours.dtype == all_rows.dtype and ours.shape[1:] == all_rows.shape[1:]
            assert torch.equal(as_bytes(ours), as_bytes(all_rows[start:stop]))


def test_rows_that_lie_in_columns_are_quantized_as_others(quant_type, absmax_dtype):
    """As those of a W^T: Conv1D's, GPTQ's and AWQ's, some mixtures'."""
    for inputs in (64, 96, 128):
        weight = normal((inputs, 10)).t()
        assert not weight.is_contiguous()
        found = quantize_rows(weight, quant_type, absmax_dtype)
        expected = quantize_rows(weight.contiguous(), quant_type, absmax_dtype)
        assert all(map(torch.equal, map(as_bytes, found), map(as_bytes, expected)))


def test_normal_weights_lose_what_the_bits_cost_and_no_more(quant_type, absmax_dtype):
    weight = normal((256, 1024))
    packed, scales = quantize_rows(weight, quant_type, absmax_dtype)
    restored = dequantize_rows(packed, scales, 1024, quant_type, torch.float32)
    loss = ((restored - weight).norm() / weight.norm()).item()
    print(
        f"{quant_type:5} {absmax_dtype} {loss:.4f} {packed.nbytes / weight.numel():.4f} + "
        f"{scales.nbytes / weight.numel():.4f} bytes"
    )
    assert LOSS[quant_type] * 0.7 < loss < LOSS[quant_type] * 1.02
    assert packed.nbytes == weight.numel() * BITS[quant_type] // 8


def test_a_layer_multiplies_by_what_it_dequantizes_to(quant_type, absmax_dtype):
    linear = nn.Linear(200, 33)
    layer, x = QuantLinear.from_linear(linear, quant_type, absmax_dtype), torch.randn(4, 200)
    x.requires_grad_()
    y = layer(x)
    y.sum().backward()
    weight = layer.dequantize(torch.float32)
    assert (weight - linear.weight).norm() < 0.5 * linear.weight.norm()
    torch.testing.assert_close(y, x @ weight.t() + layer.bias)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, -1))
    torch.library.opcheck(
        frozen_linear, (x, layer.weight, layer.absmax, layer.bias, 200, quant_type, "")
    )
    before = [as_bytes(p).clone() for p in (layer.weight, layer.absmax)]
    layer.half()
    assert all(
        torch.equal(as_bytes(p), b)
        for p, b in zip((layer.weight, layer.absmax), before, strict=True)
    )


def test_dequantizing_to_bf16_rounds_once(quant_type):
    packed, scales = quantize_rows(normal((16, 192)), quant_type)
    exact = dequantize_rows(packed, scales, 192, quant_type, torch.float32)
    rounded = dequantize_rows(packed, scales, 192, quant_type, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, exact.bfloat16())


def test_zero_and_constant_weights_come_back(quant_type):
    for value in (0.0, 0.5):
        weight = torch.full((3, 128), value)
        packed, scales = quantize_rows(weight, quant_type)
        restored = dequantize_rows(packed, scales, 128, quant_type, torch.float32)
        torch.testing.assert_close(restored, weight, rtol=1e-5, atol=0)


# ---- int8 --------------------------------------------------------------------------------------


def test_int8_values_are_the_nearest_of_255_steps_of_a_block():
    weight = normal((8, 128))
    packed, absmax = quantize_rows(weight, "int8")
    blocks = weight.view(8, 2, 64)
    assert torch.equal(absmax, blocks.abs().amax(2))
    expected = (blocks / absmax[..., None] * 127).round()
    assert torch.equal(packed.view(torch.int8).view(8, 2, 64).float(), expected)
    restored = dequantize_rows(packed, absmax, 128, "int8", torch.float32).view(8, 2, 64)
    assert ((restored - blocks).abs() <= absmax[..., None] / 254 * 1.0001).all()


def test_int8_loses_less_with_an_outlier_than_one_scale_a_row_does():
    weight = normal((64, 512))
    weight[:, 5] *= 40
    ours = dequantize_rows(*quantize_rows(weight, "int8"), 512, "int8", torch.float32)
    scale = weight.abs().amax(1, keepdim=True) / 127
    by_row = (weight / scale).round() * scale
    rest = [i for i in range(512) if i // 64]
    assert (ours - weight)[:, rest].norm() < 0.1 * (by_row - weight)[:, rest].norm()


# ---- HQQ ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bits", hqq.PLANES)
def test_packing_is_undone_for_every_value(n_bits):
    values = torch.arange(2**n_bits, dtype=torch.uint8).repeat(64)[:192].view(1, 3, 64)
    values = torch.cat([values, values.flip(2)])
    packed = hqq.pack(values, n_bits)
    assert packed.shape == (2, 3 * 8 * n_bits) and packed.nbytes == hqq.row_bytes(3, n_bits) * 2
    assert torch.equal(hqq.unpack(packed, n_bits), values)


@pytest.mark.parametrize("n_bits", [8, 4, 3, 2])
def test_each_group_is_what_the_hqq_package_makes_of_it_alone(n_bits):
    from hqq.core.quantize import Quantizer

    heavy = torch.distributions.StudentT(4.0)
    torch.manual_seed(0)
    weight = torch.cat([normal((8, 64)), heavy.sample((8, 64)) * 0.02, normal((8, 64)) + 0.01])
    packed, scales = quantize_rows(weight, f"hqq{n_bits}")
    values = hqq.unpack(packed.view(torch.uint8), n_bits)[:, 0]
    (scale, zero), moved = scales.unbind(1), 0
    for i, row in enumerate(weight):
        q, meta = Quantizer.quantize(
            row[None], nbits=n_bits, group_size=64, axis=1, bitpack=False, device="cpu"
        )
        torch.testing.assert_close(scale[i], meta["scale"].squeeze())
        torch.testing.assert_close(zero[i], meta["zero"].squeeze(), rtol=1e-4, atol=1e-4)
        assert (values[i] != q[0]).sum() <= 1  # sums in another order: a value on the edge may move
        start = -row.min() / meta["scale"].squeeze()
        moved += int((zero[i] - start).abs() > 1e-3)
    assert moved > 12  # the optimizer does something


@pytest.mark.parametrize("n_bits", [4, 3, 2])
def test_the_optimized_zero_lowers_the_error_of_heavy_tails(n_bits):
    torch.manual_seed(1)
    weight = torch.distributions.StudentT(3.0).sample((64, 256)) * 0.02
    largest = 2**n_bits - 1
    groups = weight.view(64, 4, 64)
    inverse = largest / (groups.amax(2) - groups.amin(2))
    zero = -groups.amin(2) * inverse
    plain = (hqq.quantized(groups, inverse, zero, largest) - zero[..., None]) / inverse[..., None]
    ours = dequantize_rows(
        *quantize_rows(weight, f"hqq{n_bits}"), 256, f"hqq{n_bits}", torch.float32
    )

    def p_norm(error):
        return error.abs().pow(0.7).sum()

    assert p_norm(ours.view_as(groups) - groups) < p_norm(plain - groups)


def test_hqq_scales_in_8_bits_are_near_those_in_32():
    weight = normal((32, 1024))
    _, plain = quantize_rows(weight, "hqq4")
    _, small = quantize_rows(weight, "hqq4", "int8")
    scale, zero = hqq.decode(small, 16)
    torch.testing.assert_close(scale, plain[:, :16], rtol=0.01, atol=0)
    torch.testing.assert_close(zero, plain[:, 16:], rtol=0, atol=0.03)
    assert small.nbytes < plain.nbytes / 2.5
    assert torch.equal(decode_absmax(small[:, :10].contiguous(), 16), scale)


def test_what_an_adapter_was_trained_on_is_told_with_its_bits(tmp_path):
    settings = dict(quant="hqq", n_bits=3, absmax_dtype="int8")
    (tmp_path / RUN_FILE).write_text(json.dumps(settings))
    base, weight = trained_quant(tmp_path), normal((8, 200))
    assert base.is_known and str(base) == "hqq3 with int8 scales"
    assert torch.equal(
        base.round_rows(weight),
        dequantize_rows(*quantize_rows(weight, "hqq3", "int8"), 200, "hqq3", torch.float32),
    )
