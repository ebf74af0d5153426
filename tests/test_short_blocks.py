"""Inputs of no whole blocks of 64: each row is rounded by blocks of its own, and a run says so.

As of latent attention of a small rank. bitsandbytes' blocks run on into the next row there.
"""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from transformers import AutoModelForCausalLM

from fsdp_qlora.build import build_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.quantization.quantize import short_blocks

from .distributed.test_parity import relative
from .families import save_family

CPU = torch.device("cpu")
IDS = torch.arange(3, 20)[None]


def rounded_by_rows(weight: torch.Tensor) -> torch.Tensor:
    """What bitsandbytes' 4 bits stand for where a row (I,) is filled up with zeros to whole blocks."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 64)).contiguous()
    return dequantize_4bit(*quantize_4bit(padded, quant_type="nf4"))[:, : weight.shape[1]]


@pytest.mark.parametrize("family", ["DeepSeek V3", "GLM-4.7-Flash", "MiniCPM 3"])
def test_latent_attention_of_rank_16_is_rounded_by_rows_exactly_and_said(family, tmp_path):
    folder = save_family(tmp_path, family, q_lora_rank=16, kv_lora_rank=16)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with process_group(CPU, timeout_minutes=1), torch.no_grad():
        for name, m in plain.named_modules():
            if isinstance(m, torch.nn.Linear) and name != "lm_head":
                m.weight.copy_(rounded_by_rows(m.weight))
            for p in m.parameters(recurse=False):
                if p.dim() == 3:  # experts
                    p.copy_(torch.stack([rounded_by_rows(each) for each in p]))
        config = RunConfig(model_name=folder, train_type="qlora", precision="fp32", lora_rank=4)
        ours = build_model(config, CPU).eval()
        assert relative(ours(IDS).logits, plain(IDS).logits) < 1e-5
    assert short_blocks(ours) == {"q_b_proj": 16, "kv_b_proj": 16}


def test_published_ranks_are_whole_blocks(tmp_path):
    with process_group(CPU, timeout_minutes=1):
        config = RunConfig(
            model_name=save_family(tmp_path, "DeepSeek V3"), train_type="qlora", lora_rank=4
        )
        assert not short_blocks(build_model(config, CPU))
