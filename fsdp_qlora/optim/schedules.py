"""Learning-rate schedules by the names of the command line."""

from __future__ import annotations

import math
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Schedule = Literal["constant", "linear", "cosine"]
SCHEDULES = get_args(Schedule)
_COSINE_FLOOR = 0.1  # the cosine ends at a tenth of the peak, as in the original script


def lr_share(
    step: int,
    name: Schedule,
    total_steps: int,
    warmup_share: float = 0.1,
    warmup_steps: int | None = None,
) -> float:
    """The learning rate of optimizer step `step` (from 0) as a share of the peak.

    constant: 1. linear: up over the warm-up, then down to 0. cosine: the same with half a cosine
    down to COSINE_FLOOR. The warm-up is `warmup_steps`, of constant too, or else a share of all
    steps, of linear and cosine alone.
    """
    if name not in SCHEDULES:
        raise ValueError(f"--lr_scheduler {name}: choose constant, linear or cosine")
    warmup = int(total_steps * warmup_share) if warmup_steps is None else warmup_steps
    if name == "constant" and warmup_steps is None:
        return 1.0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if name == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if name == "linear":
        return 1 - done
    return _COSINE_FLOOR + (1 - _COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


def build_scheduler(
    optimizer: Optimizer,
    name: Schedule,
    total_steps: int,
    warmup_share: float = 0.1,
    warmup_steps: int | None = None,
) -> LambdaLR:
    """The schedule as torch's LambdaLR over optimizer steps; the optimizer's rate is the peak.

    name: constant, linear or cosine. total_steps and warmup_steps: optimizer steps. warmup_share: of
    total_steps, where warmup_steps is None (`lr_share`). Raises ValueError for an unknown name.
    """
    return LambdaLR(
        optimizer, lambda step: lr_share(step, name, total_steps, warmup_share, warmup_steps)
    )
