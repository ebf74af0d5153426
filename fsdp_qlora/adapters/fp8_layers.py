"""Which layers of a model multiply in fp8, and what is kept of their weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..experts import StackedExperts, fits_grouped_fp8, grouped_fp8_problem
from ..model.blocks import decoder_blocks
from ..quantization import fp8
from ..quantization.fp8_weight_cache import Fp8WeightCache
from ..quantization.quantize import FrozenLinear, QuantLinear
from .lora_layer import LoraLinear


def apply_fp8(model: nn.Module, device: torch.device) -> int:
    """Let frozen weights be multiplied in fp8, in place; returns the number of such layers.

    Trained weights, the head and layers of a shape that does not suit stay in 16 bits. Raises
    ValueError, naming the flag, where the device has no fp8 arithmetic.
    """
    problem = fp8.fp8_problem(device)
    experts = _experts_rows(model)
    if not problem and experts:
        problem = grouped_fp8_problem(device)
    if problem:
        raise ValueError(f"--compute_dtype fp8: {problem}; use --compute_dtype bf16")
    layers = [
        m
        for block in decoder_blocks(model)
        for m in block.modules()
        if isinstance(m, (LoraLinear, QuantLinear, FrozenLinear)) or type(m) is nn.Linear
    ]
    layers = [
        m
        for m in layers
        if (
            fits_grouped_fp8(m.in_features, experts[m])
            if m in experts
            else fp8.fits_fp8(m.in_features, m.out_features)
        )
        and not getattr(m, "base_layer", m).weight.requires_grad
    ]
    for layer in layers:
        if type(layer) is nn.Linear:
            layer.__class__ = FrozenLinear
        layer.product_dtype = "fp8"
    return len(layers)


def _experts_rows(model: nn.Module) -> dict[nn.Module, int]:
    """The layers that hold the rows of all experts of a block, each with those of one."""
    layers = {}
    for mixture in model.modules():
        if isinstance(mixture, StackedExperts):
            for name in mixture.stacks:
                layer = getattr(mixture, name)
                layer = getattr(layer, "base_layer", layer)
                layers[layer] = layer.out_features // mixture.num_experts
    return layers


def keep_fp8_weights(model: nn.Module, forms: bool = True) -> Fp8WeightCache:
    """Keep what fp8 products make of the weights that `apply_fp8` chose, from their first ones on.

    forms: the weights in fp8; without, only their rows' scales. For a loaded model, and as long as it
    is; weights that FSDP gathers are left out, as they are elsewhere each time.
    """
    layers = [m for m in model.modules() if getattr(m, "product_dtype", "") == "fp8"]
    weights = [getattr(m, "base_layer", m).weight for m in layers]
    stay = [w for w in weights if not isinstance(w, DTensor)]
    model.fp8_weight_cache = Fp8WeightCache(stay, forms)
    return model.fp8_weight_cache


def cached_fp8_tensors(model: nn.Module) -> list[Tensor]:
    """What a model keeps beside its weights by now."""
    return model.fp8_weight_cache.tensors() if hasattr(model, "fp8_weight_cache") else []
