"""Adapters that changed their base, as they are saved: fit for the original base, as PEFT converts them.

    W - s B0 A0 + s B A = W + s [B, -B0] [A; A0]

Shapes: I inputs, O outputs, R rank.  W (O, I), A (R, I), B (O, R)
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn

from ..adapters import LoraLinear
from ..adapters.peft_names import config_in_whole


def taken_out(model: nn.Module) -> dict[str, Tensor]:
    """For each parameter of an adapter what its base lacks of it, this rank's rows on the host."""
    return {
        f"{name}.lora_{part}.default.weight": tensor
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLinear) and layer.taken is not None
        for part, tensor in (("A", layer.taken.a), ("B", layer.taken.b))
    }


def for_original_base(name: str, trained: Tensor, taken: Tensor | None) -> Tensor:
    """A trained A or B as it is saved: with what its base lacks, so that it fits the original base."""
    if taken is None:
        return trained
    if ".lora_A." in name:
        return torch.cat([trained, taken.to(trained)])
    return torch.cat([trained, -taken.to(trained)], dim=1)


def saved_config(model: nn.Module) -> LoraConfig:
    """The configuration of the adapter as it is saved: of twice the rank if its base lacks something.

    rsLoRA divides by the root of the rank, so there alpha grows by sqrt(2).
    """
    config = config_in_whole(model, copy.copy(model.peft_config[model.active_adapter]))
    base = config.base_model_name_or_path
    if base and Path(base).is_dir():  # so that it is found from any folder
        config.base_model_name_or_path = str(Path(base).absolute())
    if not taken_out(model):
        return config
    if model.active_adapter != "default":
        raise ValueError(
            f"the adapter {model.active_adapter!r} was trained on a base that lacks what "
            "'default' began from, and would fit no other; train it on the original base"
        )
    factor = math.sqrt(2) if config.use_rslora else 2
    config.r, config.lora_alpha = 2 * config.r, config.lora_alpha * factor
    config.rank_pattern = {name: 2 * r for name, r in config.rank_pattern.items()}
    config.alpha_pattern = {name: alpha * factor for name, alpha in config.alpha_pattern.items()}
    return config
