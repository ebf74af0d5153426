"""The adapted layer on a GPU: the adapter inside of the unpacked weight, layers of one input joined."""
from __future__ import annotations

import copy

import pytest
import torch

from fsdp_qlora.adapters.lora_ops import adapted_linear, adapted_linear_backward, shared_inputs_backward
from fsdp_qlora.build import compile_blocks
from fsdp_qlora.quantization.fourbit import dequantize_rows, quantize_rows
from fsdp_qlora.quantization.kernels import unpack_adapted
from tests.test_fusion import adapted_model, gradients
from tests.tiny import save_tiny

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
N, R, SCALING = 1000, 64, 0.25
SHAPES = [(512, 256), (200, 1024), (1024, 320)]  # (O, I)


def layer(rows: int, inputs: int, seed: int = 0):
    """x, packed W, absmax, A, B, dY and the fp32 W + scaling B A."""
    torch.manual_seed(seed)
    x, dy = torch.randn(N, inputs, device="cuda"), torch.randn(N, rows, device="cuda")
    packed, absmax = quantize_rows(torch.randn(rows, inputs, device="cuda") / inputs**0.5)
    a = torch.randn(R, inputs, device="cuda") / inputs**0.5
    b = torch.randn(rows, R, device="cuda") / 16
    whole = dequantize_rows(packed, absmax, inputs, "nf4", torch.float32) + SCALING * b @ a
    return x.bfloat16(), packed, absmax, a, b, dy.bfloat16(), whole


def error(found, expected) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("rank", [8, 24, 64])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("rows, inputs", SHAPES)
def test_the_weight_with_its_adapter_is_rounded_once(rows, inputs, quant_type, rank):
    _, _, _, a, b, _, _ = layer(rows, inputs)
    a, b = a[:rank], b[:, :rank]
    packed, absmax = quantize_rows(torch.randn(rows, inputs, device="cuda") / inputs**0.5, quant_type)
    whole = dequantize_rows(packed, absmax, inputs, quant_type, torch.float32) + SCALING * b @ a
    found = unpack_adapted(packed, absmax, inputs, quant_type, a, b, SCALING)
    once = error(whole.bfloat16(), whole)
    assert found.shape == whole.shape and error(found, whole) < 1.1 * once + 2**-11


@pytest.mark.parametrize("rows, inputs", SHAPES)
def test_outputs_and_gradients_are_as_near_to_fp32_as_with_separate_products(rows, inputs):
    x, packed, absmax, a, b, dy, whole = layer(rows, inputs)
    xa, form = x @ a.bfloat16().t(), (SCALING, inputs, "nf4", "")
    args = (x, x, xa, packed, absmax, None)
    y = x.float() @ whole.t()
    together, apart = (adapted_linear(*args, each, b, *form) for each in (a, None))
    assert error(together, y) < 1.2 * error(apart, y)
    dx, da, db = adapted_linear_backward(dy, x, xa, packed, absmax, a, b, None, SCALING, 1.0,
                                         *form[1:])
    assert error(dx, dy.float() @ whole) < 2**-7
    assert error(da, (SCALING * dy.float() @ b).t() @ x.float()) < 2**-7
    assert error(db, SCALING * dy.float().t() @ (x.float() @ a.t())) < 2**-7


@pytest.mark.parametrize("product_dtype, bound", [("", 2**-7), ("fp8", 0.06)])
@pytest.mark.parametrize("count", [2, 3])
def test_joined_backward_is_the_sum_of_each(product_dtype, bound, count):
    layers = [layer(rows, 512, seed) for seed, rows in enumerate((256, 128, 1024)[:count])]
    x = layers[0][0]
    _, packed, absmax, a, b, dy, whole = (list(column) for column in zip(*layers, strict=True))
    xa = [x @ each.bfloat16().t() for each in a]
    found = shared_inputs_backward(dy, x, xa, packed, absmax, a, b, [SCALING] * count, 512, "nf4",
                                   product_dtype)
    expected = sum(d.float() @ w for d, w in zip(dy, whole, strict=True))
    assert error(found[0], expected) < bound
    for i in range(count):
        alone = adapted_linear_backward(dy[i], x, xa[i], packed[i], absmax[i], a[i], b[i], None,
                                        SCALING, 1.0, 512, "nf4", product_dtype)
        assert error(found[1 + i], alone[1]) < 1e-3
        assert error(found[1 + count + i], alone[2]) < 1e-3


@pytest.mark.parametrize("policy", ["keep_linears", "recompute_all"])
def test_a_compiled_model_gives_the_gradients_of_the_plain_one(policy, tmp_path):
    model = adapted_model(save_tiny(tmp_path), policy, "all-linear", dropout=0.0).cuda()
    plain = gradients(copy.deepcopy(model))
    compile_blocks(model)
    torch.testing.assert_close(gradients(model), plain, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("product_dtype", ["", "fp8"])
def test_what_a_young_adapter_gives_is_not_lost_in_rounding(product_dtype):
    """Its part is far below half a step of the output's bf16; on the average it must be there."""
    torch.manual_seed(0)
    x = torch.randn(4096, 512, device="cuda").bfloat16()
    packed, absmax = quantize_rows(torch.randn(2048, 512, device="cuda") / 512**0.5)
    a, b = torch.randn(R, 512, device="cuda") / 512**0.5, 1e-4 * torch.randn(2048, R, device="cuda")
    args = (x, x, x @ a.bfloat16().t(), packed, absmax, None, a)
    found, without = (adapted_linear(*args, each, 1.0, 512, "nf4", product_dtype).double()
                      for each in (b, torch.zeros_like(b)))
    part = (x.double() @ a.double().t()) @ b.double().t()
    assert part.std() < 2**-10 * without.std()
    share = ((found - without) * part).sum() / part.square().sum()
    assert share.item() == pytest.approx(1, abs=0.1)
