"""DoRA on a GPU: norms from the kernel that unpacks W + scaling B A, and blocks that are compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_qlora.adapters import apply_adapters, lora_config, trainable_parameters
from fsdp_qlora.adapters.dora import adapted_norms, turned_linear
from fsdp_qlora.build import compile_blocks
from fsdp_qlora.lora_init import init_adapters
from fsdp_qlora.quantization.quantize import quantize_linears
from tests.gpu.test_adapted_products import SCALING, SHAPES, error, layer
from tests.test_shared_inputs import gradients
from tests.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("rows, inputs", SHAPES)
def test_norms_of_bf16_products_are_those_of_the_fp32_weight(rows, inputs):
    """A norm averages the rounding of many weights, each below 2^-9."""
    _, packed, absmax, a, b, _, whole = layer(rows, inputs)
    norms = adapted_norms(packed, absmax, a, b, SCALING, inputs, "nf4", torch.bfloat16)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms, whole.norm(dim=1), rtol=2**-9, atol=0)


@pytest.mark.parametrize("rows, inputs", SHAPES)
def test_a_product_gives_the_norms_of_the_weight_that_it_unpacks(rows, inputs):
    x, packed, absmax, a, b, _, whole = layer(rows, inputs)
    token, xa = x.new_zeros(1).expand(len(x), rows), x @ a.bfloat16().t()
    y, norms = turned_linear(token, x, xa, packed, absmax, a, b, SCALING, inputs, "nf4")
    assert error(y, x.float() @ whole.t()) < 2**-7
    torch.testing.assert_close(norms, whole.norm(dim=1), rtol=2**-9, atol=0)
    dense = whole - SCALING * b @ a
    plain = dense.bfloat16()
    y, norms = turned_linear(token, x, xa, plain, None, a, b, SCALING, inputs, "")
    assert error(y, x.float() @ whole.t()) < 2**-7
    torch.testing.assert_close(norms, whole.norm(dim=1), rtol=2**-8, atol=0)


def test_norms_of_16_bit_weights_have_no_copy_of_them_in_fp32():
    """torch's kernel reads them as they are; the estimate counts a part of 64 MiB."""
    weight, x = torch.randn(4096, 4096, device="cuda").bfloat16(), torch.zeros(8, 4096).cuda()
    a, b = torch.randn(16, 4096, device="cuda"), torch.randn(4096, 16, device="cuda")
    x, xa = x.bfloat16(), torch.zeros(8, 16, device="cuda").bfloat16()
    args = x.new_zeros(1).expand(8, 4096), x, xa, weight, None, a, b, SCALING, 4096, ""
    turned_linear(*args)  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    turned_linear(*args)
    assert torch.cuda.max_memory_allocated() - before < weight.nbytes / 4


@pytest.mark.parametrize("quantized", [False, True])
def test_compiled_blocks_have_the_gradients_of_eager_ones(tmp_path, quantized):
    base = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path), dtype=torch.bfloat16).cuda()
    model = apply_adapters(
        quantize_linears(base) if quantized else base, lora_config(rank=16, use_dora=True)
    ).train()
    init_adapters(model, 0)
    for name, p in trainable_parameters(model).items():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    eager = gradients(copy.deepcopy(model))
    compile_blocks(model)
    for name, found in gradients(model).items():
        error = (found.float() - eager[name].float()).norm() / eager[name].float().norm()
        assert error < 0.05, (name, error)  # bf16 rounds at other places
