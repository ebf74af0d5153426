"""Weights stored in one dtype and multiplied in another: torch's autocast around a model's forward.

https://docs.pytorch.org/docs/stable/amp.html. It belongs to the model and not to the training loop, so
training, evaluation and probes run the same forward, and a block that is recomputed does too.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from .blocks import base_model


def apply_autocast(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Let the model's forward run under autocast to `dtype`, in place; None changes nothing."""
    causal = base_model(model)
    if dtype is not None:
        causal.forward = partial(_under_autocast, dtype, causal.forward)
    return model


def _under_autocast(dtype: torch.dtype, forward, input_ids=None, **kwargs):
    """A causal model's forward; as with torch's own loop, its backward is outside."""
    device = next(t for t in (input_ids, *kwargs.values()) if isinstance(t, torch.Tensor)).device
    with torch.autocast(device.type, dtype):
        return forward(input_ids=input_ids, **kwargs)
