"""Mixtures of experts: the weights of all experts below each other, as two linear layers.

transformers holds them as parameters of three dimensions (E, O, I), which nothing that works on linear
layers would see. As rows (E O, I) of a linear layer they are quantized, streamed and sharded by rows
like any other, and one grouped product takes all experts at once (experts/grouped_matmul.py). All experts
of a block are gathered with it, so a rank whose tokens go to few of them waits for nobody.

Shapes: N tokens, K experts of a token, S = N K rows, E experts, D hidden, F intermediate, O outputs,
I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate as silent_gate

from ..quantization.formats import FrozenWeight
from ..quantization.quantize import compute_input
from .grouped_matmul import grouped_linear

STACKS = ("gate_up_proj", "down_proj")  # as transformers names them, in its order


class StackedExperts(nn.Module):
    """Experts of gate, up and down: for each token the weighted sum of what its K experts make of it."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.num_experts, self.act_fn = experts.num_experts, experts.act_fn
        self.gate_up_proj, self.down_proj = (stacked(getattr(experts, name)) for name in STACKS)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (N, D), top_k_index and top_k_weights (N, K) -> (N, D)."""
        k = top_k_index.shape[-1]
        chosen, order = top_k_index.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts, device=chosen.device)
        ends = torch.searchsorted(chosen, experts, right=True, out_int32=True)
        back = order.argsort()
        given = _Reordered.apply(compute_input(hidden), order, back, k)
        gate, up = product(self.gate_up_proj, given, ends).chunk(2, dim=-1)
        made = product(self.down_proj, self.act_fn(gate) * up, ends)
        made = _Reordered.apply(made, back, order, 1).unflatten(0, (-1, k))
        return (made * top_k_weights[..., None]).sum(1).to(hidden.dtype)


class _Reordered(torch.autograd.Function):
    """Rows in another order, each K times; backward knows the way back, and has nothing to add up."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, back: Tensor, k: int) -> Tensor:
        """rows (N, D), order and back (N K,) -> (N K, D)."""
        ctx.save_for_backward(back)
        ctx.k = k
        return rows[order // k]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (back,) = ctx.saved_tensors
        return grad[back].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


def product(layer: nn.Module, x: Tensor, ends: Tensor) -> Tensor:
    """x (S, I) W^T, each group with the rows of its expert: (S, O). Adapted layers know themselves."""
    if hasattr(layer, "base_layer"):
        return layer(x, ends)
    return grouped_linear(compute_input(x), ends, *FrozenWeight.of(layer))


def stacked(weight: nn.Parameter) -> nn.Linear:
    """(E, O, I) as a linear layer of E O outputs, on its device."""
    layer = nn.utils.skip_init(
        nn.Linear,
        weight.shape[2],
        weight.shape[0] * weight.shape[1],
        bias=False,
        device=torch.device("meta"),
    )
    layer.weight = nn.Parameter(weight.data.flatten(0, 1), weight.requires_grad)
    return layer


def is_stackable(module: nn.Module) -> bool:
    """Whether a module holds experts as most are written: gate and up in one tensor, no bias."""
    if getattr(type(module), "_apply_gate", None) is not silent_gate:
        return False
    return (
        module.has_gate
        and not module.has_bias
        and not module.is_transposed
        and module.is_concatenated
    )


def apply_stacked_experts(model: nn.Module) -> nn.Module:
    """Replace every module of experts by one of linear layers, in place, also on meta.

    The names of their weights, with how the model's files call them and the number of experts, are
    kept in `model.stacked_weights`.
    """
    found = {name: m for name, m in model.named_modules() if is_stackable(m)}
    names = {}
    for name, module in found.items():
        model.set_submodule(name, StackedExperts(module))
        for stack in STACKS:
            names[f"{name}.{stack}.weight"] = f"{name}.{stack}", module.num_experts
    if names:
        model.stacked_weights = names
    return model


def stacked_weights(model: nn.Module) -> dict[str, tuple[str, int]]:
    """For each weight of stacked experts, without what PEFT puts before it: its name in files, and E."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "stacked_weights", {})


def check_quantizable(model: nn.Module, quant: str):
    """Refuse to leave experts of another kind in 16 bits where the model is to be quantized.

    Raises ValueError naming --quant and the module.
    """
    for name, module in model.named_modules():
        large = [p for p in module.parameters(recurse=False) if p.dim() == 3 and p.shape[0] > 1]
        if large:
            raise ValueError(
                f"--quant {quant}: {name} ({type(module).__name__}) keeps the weights of "
                "its experts in a way that can't be quantized here; use --quant none"
            )
