"""Merging adapters where PEFT can't: into packed weights, and into a rank's own rows of a sharded one.

W + scaling B A is computed in fp32 from W as it was before any merge, and stored in W's own format. PEFT
undoes a merge by subtracting, which packed weights would not survive: what was there is kept until then.

Shapes: I inputs, O outputs, R rank.  W (O, I), A (R, I), B (O, R)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..dist import full_tensor, gather_over_ranks, local_rows
from ..quantization.formats import FrozenWeight, quantize_rows
from ..quantization.quantize import QuantLinear
from .dora import Magnitude


def merges_rows(layer: LoraLayer) -> bool:
    """Whether the base layer's weight is packed, or sharded. Raises ValueError if it is gathered."""
    base = layer.get_base_layer()
    if layer.in_shards and not isinstance(base.weight, DTensor):
        raise ValueError(
            "the weights of this sharded model are gathered, and a change to them would be lost; "
            "merge and unmerge after the backward, outside of a forward"
        )
    return isinstance(base, QuantLinear) or isinstance(base.weight, DTensor)


@torch.no_grad()
def merge_rows(layer: LoraLayer, names: list[str], check: bool = False):
    """Add adapters to this rank's rows of W and of the bias, in place; every rank must call it.

    check: raise ValueError, on every rank and before anything changes, if the result is not finite.
    """
    base = layer.get_base_layer()
    before = layer.before_merge or _copies(base)
    weight, bias = _merged(layer, before, [*layer.merged_adapters, *names])
    if check:
        _check_finite([t for t in (weight, bias) if t is not None], base.weight, names)
    layer.before_merge = before
    _store(base, weight, bias)
    layer.merged_adapters.extend(names)


@torch.no_grad()
def unmerge_rows(layer: LoraLayer):
    """Give the base layer back what it had before the first merge, to the bit."""
    for name, parameter in layer.get_base_layer().named_parameters():
        local_rows(parameter)[0].copy_(layer.before_merge[name])
    layer.before_merge = None
    layer.merged_adapters.clear()


def _copies(base: nn.Module) -> dict[str, Tensor]:
    return {name: local_rows(p)[0].clone() for name, p in base.named_parameters()}


def _merged(
    layer: LoraLayer, before: dict[str, Tensor], names: list[str]
) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of W and of the bias, in fp32 or wider, with adapters one after the other.

    As in PEFT, a magnitude is over the norm of W before all merges, and turns what was merged before it.
    """
    stored = FrozenWeight.of(layer.get_base_layer())
    stored = stored._replace(weight=before["weight"], absmax=before.get("absmax"))
    wide = torch.promote_types(layer.lora_A[names[0]].weight.dtype, torch.float32)
    weight = first = stored.dense(wide)
    bias = before["bias"].to(wide) if "bias" in before else None
    for name in names:
        a, b = layer.lora_A[name], layer.lora_B[name]
        rows, scaling = local_rows(b.weight)[0].to(weight), layer.scaling[name]
        delta = scaling * (rows @ full_tensor(a.weight).to(weight))
        weight = weight + delta
        if name in layer.lora_magnitude_vector:
            m = local_rows(layer.lora_magnitude_vector[name].weight)[0].to(weight)
            weight = weight * (m / torch.linalg.vector_norm(first + delta, dim=1))[:, None]
        if b.bias is not None:
            bias = bias + scaling * local_rows(b.bias)[0].to(bias)
    return weight, bias


def check_can_merge(layer: LoraLayer, names: list[str]):
    """Refuse adapters that are more than a change of W and of a bias that is there."""
    for name in names:
        kind = layer.lora_variant.get(name)
        if kind is not None and not isinstance(kind, Magnitude):
            raise ValueError(
                f"adapter {name}: {type(kind).__name__} can't be merged into a quantized or "
                "sharded weight; keep the adapter beside it"
            )
        if layer.lora_bias[name] and layer.get_base_layer().bias is None:
            raise ValueError(
                f"adapter {name} has lora_bias=True, and can't be merged into a layer without a "
                "bias; keep the adapter beside it"
            )


def _check_finite(merged: list[Tensor], weight: nn.Parameter, names: list[str]):
    finite = all(bool(t.isfinite().all()) for t in merged)
    if isinstance(weight, DTensor) and dist.get_world_size() > 1:
        finite = all(gather_over_ranks(finite))
    if not finite:
        raise ValueError(
            f"NaNs detected in the merged weights of {', '.join(names)}; leave out the adapter that "
            "is broken"
        )


def _store(base: nn.Module, weight: Tensor, bias: Tensor | None):
    """Write this rank's rows into a layer, in its own format."""
    if isinstance(base, QuantLinear):
        packed, absmax = quantize_rows(weight, base.quant_type, base.absmax_dtype)
        local_rows(base.weight)[0].copy_(packed)
        local_rows(base.absmax)[0].copy_(absmax)
    else:
        local_rows(base.weight)[0].copy_(weight)
    if bias is not None:
        local_rows(base.bias)[0].copy_(bias)
