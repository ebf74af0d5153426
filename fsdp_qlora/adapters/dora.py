"""DoRA: each output has a trained magnitude, and the low-rank change only turns its weights.

    y = m / |W + scaling B A| (x (W + scaling B A)^T) + bias

arXiv:2402.09353, as PEFT computes it: the norm of each row of weights counts as a constant in
backward. A norm needs whole rows, and a rank has whole rows whenever it has a weight: in a forward
FSDP has gathered them, and a shard is some of them. W is made again for the norm, a part at a time.

Shapes: N tokens, I inputs, O outputs, R rank.  x (N, I), A (R, I), B (O, R), m (O,), y (N, O)
"""

from __future__ import annotations

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

from ..quantization.formats import FrozenWeight
from ..quantization.kernels import can_unpack_adapted, unpack_adapted

PART_VALUES = 2**26  # of W that exist at once for a norm: 256 MiB


# Opaque as the products are, so that torch.compile can't keep a dequantized W.
@torch.library.custom_op("fsdp_qlora::adapted_norms", mutates_args=())
def adapted_norms(
    weight: Tensor,
    absmax: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    scaling: float,
    in_features: int,
    quant_type: str,
    dtype: torch.dtype,
) -> Tensor:
    """|W + scaling B A| of each row, or |W|: (O,) in fp32 or wider, for a product in `dtype`."""
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    wide = torch.promote_types(dtype, torch.float32)
    norms = torch.empty(weight.shape[0], dtype=wide, device=weight.device)
    step = max(1, PART_VALUES // in_features)
    with torch.autocast(weight.device.type, enabled=False):  # it would round the product
        for start in range(0, len(norms), step):
            rows = slice(start, start + step)
            part = _adapted_rows(w.rows(rows), a, None if b is None else b[rows], scaling, dtype)
            norms[rows] = torch.linalg.vector_norm(part, dim=1)
    return norms


def _adapted_rows(
    w: FrozenWeight, a: Tensor | None, b: Tensor | None, scaling: float, dtype: torch.dtype
) -> Tensor:
    """W + scaling B A of some rows, or W, in fp32 or wider."""
    if a is not None and can_unpack_adapted(w, b.shape[1], dtype):
        return unpack_adapted(w, a, b, scaling).float()
    wide = torch.promote_types(dtype, torch.float32)
    dense = w.dense(wide)
    return dense if a is None else torch.addmm(dense, b.to(wide), a.to(wide), alpha=scaling)


@adapted_norms.register_fake
def _(weight, absmax, a, b, scaling, in_features, quant_type, dtype):
    return weight.new_empty(weight.shape[0], dtype=torch.promote_types(dtype, torch.float32))


class Magnitude(DoraLinearVariant):
    """PEFT's DoRA in name and file; the layer that has it computes (lora.py)."""

    @staticmethod
    def init(module: nn.Module, adapter_name: str, **kwargs):
        """Add m to a layer: |W + scaling B A| if W is there, so that the layer starts as it was."""
        base, magnitude = module.get_base_layer(), DoraLinearLayer(fan_in_fan_out=False)
        norms = torch.empty(base.out_features, device=base.weight.device)
        a, b = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
        if not base.weight.is_meta:
            norms = norms_of(base, a, b, module.scaling[adapter_name])
        magnitude.weight = nn.Parameter(norms.to(a.dtype))
        module.lora_magnitude_vector[adapter_name] = magnitude

    @staticmethod
    def forward(module: nn.Module, active_adapter: str, x: Tensor, result: Tensor, **_) -> Tensor:
        """What the layer gives with this adapter after others, which gave `result`."""
        base, scaling = module.get_base_layer(), module.scaling[active_adapter]
        a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        bias = 0 if base.bias is None else base.bias
        straight, drop = result - bias, module.lora_dropout[active_adapter]
        if module.training and isinstance(drop, nn.Dropout):
            x = drop(x)
            straight = base(x) - bias
        norms = norms_of(base, a.weight, b.weight, scaling, x.dtype)
        factor = module.lora_magnitude_vector[active_adapter].weight / norms
        return result + (factor - 1) * straight + factor * scaling * b(a(x))


def norms_of(base: nn.Module, a: Tensor, b: Tensor, scaling: float, dtype=torch.float32) -> Tensor:
    """`adapted_norms` of a frozen linear layer with an adapter; no gradient flows."""
    w = FrozenWeight.of(base)
    return adapted_norms(w.weight, w.absmax, a.detach(), b.detach(), scaling, *w.form, dtype)
