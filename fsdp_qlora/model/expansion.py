"""The new blocks of a Llama-Pro model: copies that begin as doing nothing, and alone are trained.

LLaMA Pro: https://arxiv.org/abs/2401.02415. Where they are is `catalog.block_expansion`'s to say, and
how they get their values `loading.expanded`'s.
"""

from __future__ import annotations

import torch
from torch import nn

from .blocks import attention_and_mlp, decoder_blocks, is_linear
from .stored import train_in

# What families call the last linear layer of an attention or an MLP, whose output the block adds.
OUTPUTS = ("o_proj", "down_proj", "c_proj", "out_proj", "fc_out", "dense", "dense_4h_to_h", "fc2")


def output_projections(model: nn.Module) -> set[str]:
    """Names in a block of the two layers whose outputs it adds to its input.

    Raises ValueError for a model whose block is not built so.
    """
    block = decoder_blocks(model)[0]
    both = set(attention_and_mlp(block))
    parts = {name: part for name, part in block.named_children() if part in both}
    found = {
        f"{part}.{name}"
        for part, module in parts.items()
        for name, layer in module.named_modules()
        if is_linear(layer) and name.rsplit(".", 1)[-1] in OUTPUTS
    }
    if len(parts) != 2 or {name.split(".")[0] for name in found} != set(parts):
        raise ValueError(
            f"--adapter llama_pro: the blocks of {type(model).__name__} are no attention "
            f"and an MLP that end in one of {', '.join(OUTPUTS)}; use --adapter lora"
        )
    return found


def train_new_blocks(model: nn.Module, new: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
    """Freeze all but the blocks at the places `new`, which are stored in `dtype`, in place."""
    model.requires_grad_(False)
    for place in new:
        train_in(decoder_blocks(model)[place], dtype)
    return model
