"""What a rank's first model costs beyond its second, done once in the server that ranks are forked from.

It has no backward: autograd's threads would not outlive the fork.
"""

from __future__ import annotations

import torch

from fsdp_qlora import apply_adapters, lora_config, meta_model, quantize_linears
from fsdp_qlora.adapters.targets import left_out
from tests.tiny import CONFIGS

SIZES = dict(
    vocab_size=8,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


def read_code_of(family: str):
    """Have the code of a family's layers looked through, whose findings are kept for each class."""
    model = quantize_linears(meta_model(CONFIGS[family](**SIZES), torch.float32), "nf4")
    left_out(apply_adapters(model, lora_config(rank=1)))


for name in ("llama", "qwen2", "mistral"):
    read_code_of(name)
