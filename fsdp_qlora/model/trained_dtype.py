"""Weights that are trained in another dtype than their model computes in, cast as they are multiplied.

In fp32 an update is not lost that is below half a step of the weight's bf16; products stay in bf16.
`autocast.py` is for a whole model; here the layers around stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..own_forward import compute_by


def train_in(modules: nn.Module | list[nn.Module], dtype: torch.dtype):
    """Let modules be trained in `dtype` and compute in the dtype that they had, in place.

    dtype: that which they had, or fp32. Modules that share a weight must come together.
    """
    modules = nn.ModuleList([modules] if isinstance(modules, nn.Module) else modules)
    for part in modules.modules():
        own = list(part.parameters(recurse=False))
        if not own or hasattr(part, "compute_dtype"):
            continue
        part.compute_dtype = own[0].dtype
        if own[0].dtype != dtype:
            compute_by(part, _computed)
    for p in modules.parameters():
        p.requires_grad_()
        p.data = p.data.to(dtype)


def _computed(layer: nn.Module, own, x: Tensor):
    """The output of a layer whose weights are in another dtype than its compute dtype, in the latter."""
    if isinstance(layer, nn.Linear):
        weight, bias = (t if t is None else t.to(x.dtype) for t in (layer.weight, layer.bias))
        return nn.functional.linear(x, weight, bias)
    with torch.autocast(x.device.type, layer.compute_dtype):
        out = own(layer, x)  # the router of a mixture
    return out.to(layer.compute_dtype) if isinstance(out, Tensor) else out
