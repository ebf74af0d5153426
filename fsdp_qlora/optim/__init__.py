"""Optimizers and learning-rate schedules by the names of the command line.

Modules, each importing only from those before it: rounding, base, adamw, adafactor, schedules.
"""

from __future__ import annotations

from pkgutil import resolve_name

from torch import nn
from torch.optim import Optimizer

from ..choices import OPTIMIZERS, OptimizerName
from ..sharding import free_gathered
from .adafactor import Adafactor
from .adamw import CompactAdamW
from .base import make_states
from .schedules import SCHEDULES, build_scheduler, lr_share

__all__ = [
    "SCHEDULES",
    "Adafactor",
    "CompactAdamW",
    "build_optimizer",
    "build_scheduler",
    "lr_share",
]


def build_optimizer(
    model: nn.Module,
    name: OptimizerName = "adamw",
    lr: float = 1e-5,
    weight_decay: float = 0.1,
    loraplus_lr_ratio: float = 1.0,
) -> Optimizer:
    """An optimizer over the trained parameters, its states made; weight decay is for the AdamW kinds.

    Sharded parameters make sharded states. `loraplus_lr_ratio` is the learning rate of B over that of
    A. Raises ValueError for an unknown name.
    """
    free_gathered(model)  # a forward without a backward leaves copies in the place of shards
    optimizer = _new_optimizer(
        _trained_groups(model, lr, loraplus_lr_ratio), name, lr, weight_decay
    )
    make_states(optimizer)
    return optimizer


def _new_optimizer(parameters: list, name: str, lr: float, weight_decay: float) -> Optimizer:
    """An optimizer by name, as `build_optimizer` has it but without states."""
    if name not in OPTIMIZERS:
        raise ValueError(f"--optimizer {name}: choose {', '.join(OPTIMIZERS)}")
    row = OPTIMIZERS[name]
    settings = dict(row.settings, weight_decay=weight_decay) if row.decays else row.settings
    return resolve_name(row.factory)(parameters, lr=lr, **settings)


def _trained_groups(model: nn.Module, lr: float, loraplus_lr_ratio: float) -> list:
    """The trained parameters; in two groups where B learns faster: LoRA+, arXiv:2402.12354.

    As PEFT's `create_loraplus_optimizer` has them, vectors such as DoRA's magnitudes go with B.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if loraplus_lr_ratio == 1:
        return [p for _, p in trained]
    fast = [p for name, p in trained if "lora_B" in name or p.dim() == 1]
    slow = [p for name, p in trained if "lora_B" not in name and p.dim() != 1]
    return [dict(params=slow, lr=lr), dict(params=fast, lr=lr * loraplus_lr_ratio)]
