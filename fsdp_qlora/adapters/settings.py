"""The adapters of a run as its settings describe them."""

from __future__ import annotations

from peft import LoraConfig
from torch import nn

from ..config import RunConfig
from ..model.blocks import decoder_blocks
from .lora import lora_config


def adapter_settings(config: RunConfig, model: nn.Module) -> LoraConfig:
    """The run's adapters as PEFT is told of them; raises ValueError for a block that is not there."""
    lora = lora_config(
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=config.target_modules,
        target_parameters=config.target_parameters,
        use_dora=config.adapter == "dora",
        use_rslora=config.use_rslora,
        rank_pattern=config.rank_pattern,
        alpha_pattern=config.alpha_pattern,
        bias=config.bias,
    )
    lora.revision, lora.layers_to_transform = config.revision, _adapted_blocks(config, model)
    return lora


def _adapted_blocks(config: RunConfig, model: nn.Module) -> list[int] | None:
    """The blocks of --layers_to_transform. Raises ValueError for one that the model does not have."""
    chosen, count = config.adapted_blocks, len(decoder_blocks(model))
    if chosen and chosen[-1] >= count:
        raise ValueError(
            f"--layers_to_transform {config.layers_to_transform}: the model has no such "
            f"block; choose from 0 to {count - 1}"
        )
    return chosen
