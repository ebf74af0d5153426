"""8-bit scales on a GPU: the same bytes and values as on the CPU, in plain and in fp8 products."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.quantization import fp8
from fsdp_qlora.quantization.absmax import decode_absmax, encode_absmax
from fsdp_qlora.quantization.formats import FrozenWeight, dequantize_rows, quantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("blocks", [1, 5, 64, 128, 448])
def test_codes_and_scales_are_those_of_the_cpu(blocks):
    absmax = torch.rand(300, blocks) * torch.logspace(-4, 0, 300)[:, None]
    absmax[7] = 0
    stored, plain = encode_absmax(absmax.cuda()), encode_absmax(absmax)
    assert torch.equal(stored.cpu().view(torch.uint8), plain.view(torch.uint8))
    assert torch.equal(decode_absmax(stored, blocks).cpu(), decode_absmax(plain, blocks))


def test_weights_and_fp8_products_are_those_of_the_decoded_scales():
    weight = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    packed, stored = quantize_rows(weight, "nf4", "int8")
    absmax = decode_absmax(stored, 16)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(
            dequantize_rows(packed, stored, 1024, "nf4", dtype),
            dequantize_rows(packed, absmax, 1024, "nf4", dtype),
        )
    if torch.cuda.get_device_capability() < (8, 9):
        return
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    products = [
        fp8.forward_product(x, FrozenWeight(packed, scales, 1024, "nf4"))
        for scales in (stored, absmax)
    ]
    assert torch.equal(*products)
