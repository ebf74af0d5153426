"""Quantized layers that move between host and GPU: bytes, scales and outputs stay."""

from __future__ import annotations

import copy

import pytest
import torch

from fsdp_qlora.quantization.quantize import QuantLinear
from tests.test_quantize import all_patterns, as_bytes, quant_linear, values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
JOURNEYS = {
    "to the GPU": lambda m: m.cuda(),
    "there and back": lambda m: m.cuda().cpu(),
    "back again": lambda m: m.cuda().cpu().cuda(),
    "half on the way": lambda m: m.cuda().half().cpu(),
    "a copy on the GPU": lambda m: copy.deepcopy(m.cuda()).cpu(),
}


@pytest.mark.parametrize("journey", JOURNEYS)
@pytest.mark.parametrize(
    "make",
    [all_patterns, lambda: quant_linear(33, 31, quant_type="fp4")],
    ids=["all patterns", "ragged"],
)
def test_bytes_scales_and_outputs_are_the_same_after_a_journey(make, journey):
    layer = make()
    before, x = copy.deepcopy(layer), values((3, layer.in_features))
    expected, on_gpu = layer(x), copy.deepcopy(layer).cuda()(x.cuda())
    moved: QuantLinear = JOURNEYS[journey](layer)
    assert torch.equal(as_bytes(moved.weight.cpu()), as_bytes(before.weight))
    assert moved.absmax.dtype == torch.float32 and torch.equal(moved.absmax.cpu(), before.absmax)
    moved.bias.data = before.bias.data.to(moved.bias.device)
    there = moved.weight.is_cuda
    assert torch.equal(moved(x.to(moved.weight.device)), on_gpu if there else expected)
