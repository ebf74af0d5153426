"""Optimizers and learning-rate schedules by the names of the command line."""
from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

SCHEDULES = ("constant", "linear", "cosine")
COSINE_FLOOR = 0.1  # the cosine ends at a tenth of the peak, as in the original script


def build_optimizer(model: nn.Module, name: str = "adamw", lr: float = 1e-5,
                    weight_decay: float = 0.1) -> Optimizer:
    """An optimizer over the trained parameters; weight decay is AdamW's alone.

    Sharded parameters make sharded states. Fused kernels are used where all parameters are on CUDA.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = dict(fused=True) if all(p.is_cuda for p in parameters) else {}
    if name == "adamw": return torch.optim.AdamW(parameters, lr, weight_decay=weight_decay, **fused)
    if name == "adam": return torch.optim.Adam(parameters, lr, **fused)
    if name == "sgd": return torch.optim.SGD(parameters, lr)
    if name == "adadelta": return torch.optim.Adadelta(parameters, lr)
    raise ValueError(f"--optimizer {name}: choose adamw, adam, sgd or adadelta")


def lr_share(step: int, name: str, total_steps: int, warmup_share: float = 0.1) -> float:
    """The learning rate of optimizer step `step` (from 0) as a share of the peak.

    constant: 1. linear: up over the warm-up, then down to 0. cosine: the same with half a cosine
    down to COSINE_FLOOR.
    """
    if name not in SCHEDULES:
        raise ValueError(f"--lr_scheduler {name}: choose constant, linear or cosine")
    if name == "constant": return 1.0
    warmup = int(total_steps * warmup_share)
    if step < warmup: return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, total_steps - warmup)
    if name == "linear": return max(0.0, 1 - done)
    return COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def build_scheduler(optimizer: Optimizer, name: str, total_steps: int,
                    warmup_share: float = 0.1) -> LambdaLR:
    """The schedule as torch's LambdaLR over optimizer steps."""
    return LambdaLR(optimizer, lambda step: lr_share(step, name, total_steps, warmup_share))
