"""4-bit linears against bitsandbytes: same bytes, values and gradients, and nothing moves them.

Shapes: O out rows, I inputs.
"""

import copy
import io

import bitsandbytes.functional as bnb
import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn

from fsdp_qlora.quantization.absmax import padded
from fsdp_qlora.quantization.formats import dequantize_rows, quantize_rows
from fsdp_qlora.quantization.quantize import QuantLinear, frozen_linear, quantize_linears

from .tiny import save_tiny

torch.set_num_threads(1)  # threads that share a tiny product only wait for each other

WHOLE = [(96, 64), (48, 192), (1, 128)]  # sizes that are whole blocks of 64
RAGGED = [(33, 31), (100, 72), (72, 100), (96, 65)]  # sizes that are not
# The widest gap between neighbouring levels, halved: the error of a value in a block of absmax 1.
HALF_GAP = {"nf4": (1 - 0.6961928) / 2, "fp4": (1 - 2 / 3) / 2}


def values(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The stored bytes; NaN patterns compare equal to themselves."""
    return tensor.detach().contiguous().view(torch.uint8)


def quant_linear(out_features, in_features, bias=True, quant_type="nf4", dtype=torch.float32):
    linear = nn.Linear(in_features, out_features, bias)
    linear.weight.data = values((out_features, in_features))
    if bias:
        linear.bias.data = values((out_features,), seed=1)
    return QuantLinear.from_linear(linear.to(dtype), quant_type)


def bnb_linear(weight, bias, quant_type, compute_dtype):
    """bitsandbytes' own layer with this weight and bias."""
    linear = Linear4bit(
        weight.shape[1], weight.shape[0], bias is not None, compute_dtype, quant_type=quant_type
    )
    linear.weight = Params4bit(
        weight.clone(), requires_grad=False, quant_type=quant_type, compress_statistics=False
    )
    if bias is not None:
        linear.bias = nn.Parameter(bias.clone(), requires_grad=False)
    return linear.to("cpu")


# ---- bytes and values --------------------------------------------------------------------------


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", WHOLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_scales_and_values_are_those_of_bitsandbytes(shape, quant_type, dtype):
    weight = values(shape, dtype)
    packed, absmax = quantize_rows(weight, quant_type)
    theirs, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=quant_type)
    assert packed.shape == (shape[0], shape[1] // 4) and packed.dtype == torch.bfloat16
    assert absmax.shape == (shape[0], shape[1] // 64) and absmax.dtype == torch.float32
    assert torch.equal(as_bytes(packed).flatten(), theirs.flatten())
    assert torch.equal(absmax.flatten(), state.absmax)
    ours = dequantize_rows(packed, absmax, shape[1], quant_type, dtype)
    assert ours.dtype == dtype and torch.equal(ours, bnb.dequantize_4bit(theirs, state))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", RAGGED)
def test_ragged_rows_are_those_of_bitsandbytes_padded_with_zeros(shape, quant_type):
    rows, columns = shape
    weight = values(shape)
    packed, absmax = quantize_rows(weight, quant_type)
    wide = torch.zeros(rows, padded(columns))
    wide[:, :columns] = weight
    theirs, state = bnb.quantize_4bit(wide, blocksize=64, quant_type=quant_type)
    assert torch.equal(as_bytes(packed).flatten(), theirs.flatten())
    ours = dequantize_rows(packed, absmax, columns, quant_type, torch.float32)
    assert torch.equal(ours, bnb.dequantize_4bit(theirs, state)[:, :columns])


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", WHOLE + RAGGED)
def test_no_value_is_further_off_than_half_the_widest_gap_of_its_block(shape, quant_type):
    weight = values(shape)
    packed, absmax = quantize_rows(weight, quant_type)
    error = (dequantize_rows(packed, absmax, shape[1], quant_type, torch.float32) - weight).abs()
    bound = absmax.repeat_interleave(64, dim=1)[:, : shape[1]] * HALF_GAP[quant_type]
    assert (error <= bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("shape", [(256, 256), *RAGGED])
def test_nf4_loses_a_tenth_of_normal_weights_at_any_size(shape):
    """16 quantiles of a normal distribution: about 9% root-mean-square error at whole sizes."""
    weight = values(shape)
    packed, absmax = quantize_rows(weight)
    error = dequantize_rows(packed, absmax, shape[1], "nf4", torch.float32) - weight
    assert error.norm() / weight.norm() < 0.11


@pytest.mark.parametrize("shape", WHOLE + RAGGED)
def test_a_row_slice_quantizes_to_the_slice_of_the_whole(shape):
    weight = values(shape)
    packed, absmax = quantize_rows(weight)
    for start, stop in [(0, 0), (0, shape[0] // 2), (shape[0] // 3, shape[0]), (shape[0],) * 2]:
        part, scales = quantize_rows(weight[start:stop])
        assert torch.equal(as_bytes(part), as_bytes(packed[start:stop]))
        assert torch.equal(scales, absmax[start:stop])


def test_a_weight_that_is_a_strided_view_quantizes_as_its_copy():
    weight = values((64, 96)).t()
    assert torch.equal(
        as_bytes(quantize_rows(weight)[0]), as_bytes(quantize_rows(weight.contiguous())[0])
    )


# ---- nothing moves the bytes (rows 16 and 29 of docs/cases.md) --------------------------------


def all_patterns() -> QuantLinear:
    """A layer whose storage holds each of the 65,536 bf16 patterns, all NaNs among them."""
    layer = quant_linear(256, 1024)
    layer.weight.data = torch.arange(65536).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    assert layer.weight.isnan().sum() == 254  # signalling and quiet ones
    return layer


def through_state_dict(layer):
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    made = QuantLinear(
        layer.in_features, layer.out_features, layer.bias is not None, layer.quant_type
    )
    made.load_state_dict(torch.load(buffer))
    return made


def through_meta(layer):
    """Materialised from meta, then filled, as a sharded load does."""
    with torch.device("meta"):
        made = QuantLinear(
            layer.in_features, layer.out_features, layer.bias is not None, layer.quant_type
        )
    made.to_empty(device="cpu")
    made.load_state_dict(layer.state_dict())
    return made


def through_apply(layer):
    """The way `loading.materialize` goes."""
    made = copy.deepcopy(layer).to("meta")
    made._apply(lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t)
    made.load_state_dict(layer.state_dict())
    return made


MOVES = {
    "cpu": lambda m: m.to("cpu"),
    "deepcopy": copy.deepcopy,
    "state_dict": through_state_dict,
    "to_empty": through_meta,
    "_apply": through_apply,
    "assign": lambda m: (copy.deepcopy(m).load_state_dict(m.state_dict(), assign=True), m)[1],
    "half": lambda m: m.half(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "to cpu, half": lambda m: m.to("cpu", torch.half),
    "half in a parent": lambda m: nn.Sequential(m).half()[0],
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize(
    "make",
    [all_patterns, lambda: quant_linear(33, 31, quant_type="fp4")],
    ids=["all patterns", "ragged"],
)
def test_bytes_scales_and_outputs_are_the_same_after_a_move(make, move):
    layer = make()
    before, x = copy.deepcopy(layer), values((3, layer.in_features))
    expected = layer(x)
    moved = MOVES[move](layer)
    assert torch.equal(as_bytes(moved.weight), as_bytes(before.weight))
    assert moved.absmax.dtype == torch.float32 and torch.equal(moved.absmax, before.absmax)
    assert not any(p.requires_grad for p in moved.parameters())
    moved.bias.data = before.bias.data  # a bias is an ordinary number and follows the dtype
    assert torch.equal(moved(x), expected)


def test_a_bias_follows_a_change_of_dtype_and_half_outputs_are_those_of_the_same_bytes():
    layer = quant_linear(64, 128)
    expected = layer.dequantize(torch.float16)
    layer.half()
    assert layer.bias.dtype == torch.float16
    x = values((3, 128), torch.float16)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, expected, layer.bias))


def test_every_nan_pattern_in_storage_is_still_a_pair_of_weights():
    layer = all_patterns()
    state = bnb.QuantState(
        absmax=layer.absmax.flatten(),
        shape=torch.Size((256, 1024)),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.float32,
        code=bnb.get_4bit_type("nf4", device="cpu"),
    )
    theirs = bnb.dequantize_4bit(as_bytes(layer.weight).reshape(-1, 1), state)
    assert torch.equal(layer.dequantize(torch.float32), theirs)
    assert layer(values((2, 1024))).isfinite().all()


# ---- the layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(5,), (2, 3), ()])
def test_forward_and_input_gradient_equal_linear4bit(quant_type, bias, leading):
    weight, offset = values((96, 128)), values((96,), seed=1) if bias else None
    reference = bnb_linear(weight, offset, quant_type, torch.float32)
    layer = quant_linear(96, 128, bias, quant_type)

    def run(module):
        x = values((*leading, 128), seed=2).requires_grad_()
        y = module(x)
        y.backward(values(y.shape, seed=3))
        return y.detach(), x.grad

    torch.testing.assert_close(run(layer), run(reference), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", RAGGED)
def test_ragged_layers_multiply_by_what_they_dequantize_to(shape):
    layer, x = quant_linear(*shape), values((4, shape[1])).requires_grad_()
    y = layer(x)
    y.sum().backward()
    weight = layer.dequantize(torch.float32)
    torch.testing.assert_close(y, x @ weight.t() + layer.bias)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, -1))


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int8", "hqq4"])
@pytest.mark.parametrize("shape", [(96, 64), (72, 100)])
def test_in_float64_it_is_the_same_layer(shape, quant_type):
    """bitsandbytes' ops give memory as it was for it, so that outputs are any numbers."""
    layer, double = quant_linear(*shape, quant_type=quant_type), values(shape).double()
    x = values((4, shape[1])).double().requires_grad_()
    y = layer(x)
    y.sum().backward()
    weight = layer.dequantize(torch.float32).double()
    torch.testing.assert_close(layer.dequantize(torch.float64), weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(y, x @ weight.t() + layer.bias.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, weight.sum(0).expand(4, -1), rtol=1e-6, atol=1e-6)
    packed = [as_bytes(quantize_rows(w, quant_type)[0]) for w in (double, double.float())]
    assert torch.equal(*packed)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(16, 64), (33, 31)])
def test_frozen_linear_passes_opcheck(shape, bias, strided):
    layer = quant_linear(*shape, bias)
    x = values((shape[1], 4)).t() if strided else values((2, 2, shape[1]))
    args = (x.requires_grad_(), layer.weight, layer.absmax, layer.bias, shape[1], "nf4", "")
    torch.library.opcheck(frozen_linear, args)


def test_frozen_linear_passes_opcheck_with_a_weight_that_is_not_quantized():
    args = (values((2, 3, 8)).requires_grad_(), values((5, 8)), None, values((5,)), 8, "", "")
    torch.library.opcheck(frozen_linear, args)


def test_only_packed_bytes_and_scales_are_saved_for_backward():
    layer, saved = quant_linear(256, 512), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(values((8, 512)).requires_grad_())
    assert sum(t.nbytes for t in saved) == layer.weight.nbytes + layer.absmax.nbytes
    assert layer.weight.nbytes == 256 * 512 // 2 and layer.absmax.nbytes == 256 * 512 // 64 * 4


def test_an_unknown_quant_type_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="quant_type 'int4': choose nf4, fp4, int8"):
        QuantLinear(8, 8, quant_type="int4")


# ---- a whole model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes", [{}, dict(hidden_size=72, intermediate_size=100)], ids=["whole", "ragged"]
)
def test_a_quantized_model_keeps_its_head_and_differs_by_what_its_weights_lost(tmp_path, sizes):
    from transformers import AutoModelForCausalLM

    folder = save_tiny(tmp_path, **sizes)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = quantize_linears(copy.deepcopy(plain))
    rounded = copy.deepcopy(plain)
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            rounded.get_submodule(name).weight.data = module.dequantize(torch.float32)
    assert sum(isinstance(m, QuantLinear) for m in model.modules()) == 14
    assert type(model.lm_head) is nn.Linear
    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, rounded(ids).logits)
        exact = plain(ids).logits
        assert (model(ids).logits - exact).norm() / exact.norm() < 0.3
