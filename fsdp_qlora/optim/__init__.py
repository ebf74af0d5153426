"""Optimizers and learning-rate schedules by the names of the command line."""
from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from ..config import OPTIMIZER_NAMES
from .adafactor import Adafactor
from .adamw import CompactAdamW
from .schedules import SCHEDULES, build_scheduler, lr_share

__all__ = ["SCHEDULES", "Adafactor", "CompactAdamW", "build_optimizer", "build_scheduler", "lr_share"]


def build_optimizer(model: nn.Module, name: str = "adamw", lr: float = 1e-5,
                    weight_decay: float = 0.1) -> Optimizer:
    """An optimizer over the trained parameters; weight decay is that of the AdamW kinds.

    Sharded parameters make sharded states. Raises ValueError for an unknown name.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
    if name == "adamw": return adam(parameters, lr, weight_decay=weight_decay, fused=True)
    if name == "adam": return adam(parameters, lr, fused=True)
    if name in ("adamw_bf16", "adamw_8bit"):
        return CompactAdamW(parameters, lr, name.removeprefix("adamw_"), weight_decay=weight_decay)
    if name == "adafactor": return Adafactor(parameters, lr)
    if name == "sgd": return torch.optim.SGD(parameters, lr)
    if name == "adadelta": return torch.optim.Adadelta(parameters, lr)
    raise ValueError(f"--optimizer {name}: choose {', '.join(OPTIMIZER_NAMES)}")
