"""DoRA: each output has a trained magnitude, and the low-rank change only turns its weights.

    y = m / |W + scaling B A| (x (W + scaling B A)^T) + bias

arXiv:2402.09353, as PEFT computes it: the norm of each row of weights counts as a constant in
backward. A norm needs whole rows, and a rank has whole rows whenever it has a weight: in a forward
FSDP has gathered them, and a shard is some of them.

W is made once for product and norms (`turned_linear`). Where the kernel that unpacks it adds B A, norms
are those of its rows. Else B A is not made, for of each row

    |W + scaling B A|^2 = |W|^2 + B' . (2 W A^T + B' A A^T), with its B' = scaling B

Shapes: N tokens, I inputs, O outputs, R rank.  x (N, I), A (R, I), B (O, R), m (O,), y (N, O)
"""

from __future__ import annotations

import torch
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import Tensor, nn

from ..quantization.formats import FrozenWeight
from ..quantization.kernels import can_unpack_adapted, unpack_adapted
from .lora_ops import product

PART_VALUES = 2**24  # of W that norms may need a copy of in fp32 at once: 64 MiB


# Opaque as the products of LoRA are, so that torch.compile can't keep a dequantized W; and like them
# in two ops, of which `adapted_inputs` saves what backward needs.
@torch.library.custom_op("fsdp_qlora::turned_linear", mutates_args=())
def turned_linear(
    token: Tensor,
    x: Tensor,
    xa: Tensor,
    weight: Tensor,
    absmax: Tensor | None,
    a: Tensor,
    b: Tensor,
    scaling: float,
    in_features: int,
    quant_type: str,
) -> tuple[Tensor, Tensor]:
    """x (W + scaling B A)^T (N, O) given xa = x A^T, and |W + scaling B A| (O,) in fp32 or wider."""
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    if can_unpack_adapted(w, b.shape[1], x.dtype):
        dense = unpack_adapted(w, a, b, scaling)
        return x @ dense.t(), _norms(dense)
    y, dense = xa @ (b * scaling).to(x.dtype).t(), w.dense(x.dtype)
    return y.addmm_(x, dense.t()), _norms(dense, a, b, scaling)


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
    """|W + scaling B A| of each row, or |W|: (O,) in fp32 or wider, for a product in `dtype`.

    Where no product has W dense, as in fp8; W is unpacked a part at a time.
    """
    w = FrozenWeight(weight, absmax, in_features, quant_type)
    norms = []
    for rows in _parts(weight.shape[0], in_features):
        part, its_b = w.rows(rows), None if b is None else b[rows]
        if a is not None and can_unpack_adapted(w, b.shape[1], dtype):
            norms.append(_norms(unpack_adapted(part, a, its_b, scaling)))
        else:
            norms.append(_norms(part.dense(_wide(dtype)), a, its_b, scaling))
    return torch.cat(norms)


def _norms(
    dense: Tensor, a: Tensor | None = None, b: Tensor | None = None, scaling: float = 1.0
) -> Tensor:
    """|W + scaling B A| of each row of a dense W (O, I), or |W|: (O,) in fp32 or wider."""
    wide = _wide(dense.dtype)
    norms = torch.empty(len(dense), dtype=wide, device=dense.device)
    for rows in _parts(*dense.shape):
        torch.linalg.vector_norm(dense[rows], dim=1, dtype=wide, out=norms[rows])
    if a is None:
        return norms
    with torch.autocast(dense.device.type, enabled=False):  # it would round the products
        b, a = b.to(wide) * scaling, a.to(wide)
        across = 2 * product(dense, a.to(dense.dtype).t(), wide) + b @ (a @ a.t())
    return norms.square_().add_((b * across).sum(1)).clamp_(min=0).sqrt_()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _parts(rows: int, in_features: int) -> list[slice]:
    """Rows in parts of at most PART_VALUES values, or one row; of no rows one part."""
    step = max(1, PART_VALUES // in_features)
    return [slice(start, start + step) for start in range(0, max(1, rows), step)]


@turned_linear.register_fake
def _(token, x, xa, weight, absmax, a, b, scaling, in_features, quant_type):
    norms = x.new_empty(b.shape[0], dtype=_wide(x.dtype))
    return x.new_empty(x.shape[0], b.shape[0]), norms


@adapted_norms.register_fake
def _(weight, absmax, a, b, scaling, in_features, quant_type, dtype):
    return weight.new_empty(weight.shape[0], dtype=_wide(dtype))


def _token_backward(ctx, dy, _):
    return dy, *[None] * 9


turned_linear.register_autograd(_token_backward)


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
