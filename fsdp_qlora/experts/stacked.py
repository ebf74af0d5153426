"""Mixtures of experts: the weights of all experts below each other, as two linear layers.

transformers holds them as parameters of three dimensions (E, O, I), or (E, I, O), which nothing that
works on linear layers would see. As rows (E O, I) of a linear layer they are quantized, streamed and
sharded by rows like any other, and one grouped product takes all experts at once
(experts/grouped_matmul.py). All experts of a block are gathered with it, so a rank whose tokens go to few
of them waits for nobody. What lies between the two products, and biases, are the model's own.

Shapes: N tokens, K experts of a token, S = N K rows, E experts, D hidden, F intermediate, O outputs,
I inputs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..quantization.formats import FrozenWeight
from ..quantization.quantize import compute_input, is_plain_linear
from .grouped_matmul import Routing, grouped_linear, is_aligned_size
from .routing import route

# As transformers names them, in its order; experts without a gate have up_proj for the first.
STACKS = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Stack:
    """How files hold the rows of all experts of a layer."""

    stored_name: str
    experts: int
    transposed: bool = False  # (E, I, O)

    def as_stored(self, rows: Tensor) -> Tensor:
        """Rows (E O, I) as a file has them."""
        each = rows.unflatten(0, (self.experts, -1))
        return each.transpose(1, 2).contiguous() if self.transposed else each


class StackedExperts(nn.Module):
    """For each token the weighted sum of what its K experts make of it."""

    row_counts: Tensor | None = None  # of each expert, if they are counted (routing.py)

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.num_experts, self.transposed = experts.num_experts, _is_transposed(experts)
        self.stacks = _stacks_of(experts)
        if isinstance(act_fn := getattr(experts, "act_fn", None), nn.Module):
            self.act_fn = act_fn
        for name in self.stacks:
            weight = getattr(experts, name)
            setattr(self, name, stacked(weight.transpose(1, 2) if self.transposed else weight))
            self.register_parameter(f"{name}_bias", getattr(experts, f"{name}_bias", None))
        self.between = _between(experts)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden (N, D), top_k_index and top_k_weights (N, K) -> (N, D).

        A weight of the router's multiplies what goes into an expert's last product, not what comes out:
        its gradient then asks for nothing that this product made, which is wider.
        """
        counts = self.row_counts if self.training else None
        routing, order = route(top_k_index, self.num_experts, counts)
        weights = top_k_weights.flatten().gather(0, order)[:, None]
        experts = top_k_index.flatten().gather(0, order)
        made = self.inner(hidden, routing._replace(tokens_at="input"), experts)
        made = (made * weights).to(made.dtype)
        last = self.stacks[1]
        y = product(getattr(self, last), made, routing._replace(tokens_at="output"))
        if (bias := getattr(self, f"{last}_bias")) is not None:
            shares = top_k_weights.new_zeros(len(hidden), self.num_experts)
            y = y + shares.scatter_add(1, top_k_index, top_k_weights).to(bias.dtype) @ bias
        return y.to(hidden.dtype)

    def inner(self, x: Tensor, routing: Routing, experts: Tensor) -> Tensor:
        """What goes into the last product: (S, F), of rows of these experts (S,)."""
        first = self.stacks[0]
        made, bias = product(getattr(self, first), x, routing), getattr(self, f"{first}_bias")
        return self.between(made if bias is None else made + bias[experts].to(made.dtype))


class AllExperts(StackedExperts):
    """Llama 4's: every expert is given all tokens, which its router has weighted, most of them by 0."""

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (E N, D), expert by expert -> (E N, D)."""
        each = torch.arange(self.num_experts, device=hidden.device)
        count, last = hidden.shape[0] // self.num_experts, self.stacks[1]
        experts = each.repeat_interleave(count)
        routing = Routing(((each + 1) * count).to(torch.int32))
        y = product(getattr(self, last), self.inner(hidden, routing, experts), routing)
        bias = getattr(self, f"{last}_bias")
        return (y if bias is None else y + bias[experts].to(y.dtype)).to(hidden.dtype)


def product(layer: nn.Module, x: Tensor, routing: Routing) -> Tensor:
    """x W^T, each row with the weight of its expert. Adapted layers know themselves."""
    if hasattr(layer, "base_layer"):
        return layer(x, routing)
    dtype = getattr(layer, "product_dtype", "")
    return grouped_linear(compute_input(x), *routing, *FrozenWeight.of(layer), dtype)


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
    """Whether a module holds experts as transformers writes them: two stacks, and biases of both."""
    if type(module).__name__ in _ALL_EXPERTS:
        return True
    if not hasattr(type(module), "_apply_gate") or not hasattr(module, "is_concatenated"):
        return False
    names = {name for name, _ in module.named_parameters(recurse=False)}
    first, last = _stacks_of(module)
    return names in ({first, last}, {first, last, f"{first}_bias", f"{last}_bias"})


def each_of_stacks(experts: nn.Module) -> list[Tensor]:
    """The weights of a module that is stackable, as views (E, O, I)."""
    weights = [getattr(experts, name).data for name in _stacks_of(experts)]
    return [w.transpose(1, 2) for w in weights] if _is_transposed(experts) else weights


_ALL_EXPERTS = ("Llama4TextExperts",)


def _stacks_of(experts: nn.Module) -> tuple[str, str]:
    """The names of a module's two stacks."""
    gated = getattr(experts, "has_gate", True)
    return (STACKS[0] if gated else STACKS[1]), STACKS[2]


def _is_transposed(experts: nn.Module) -> bool:
    return getattr(experts, "is_transposed", type(experts).__name__ in _ALL_EXPERTS)


def _between(experts: nn.Module):
    """What a module makes of the first products before the second: its activation, and its gate.

    The model's own function, bound to a copy of the module without its weights.
    """
    if not getattr(experts, "has_gate", True):
        return experts.act_fn
    if not hasattr(experts, "_apply_gate"):
        return partial(_gated, experts.act_fn)
    settings = copy.copy(experts)
    settings.__dict__ = {**experts.__dict__, "_parameters": {}}
    return partial(type(experts)._apply_gate, settings)


def _gated(act_fn, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * act_fn(gate)


def apply_stacked_experts(model: nn.Module) -> nn.Module:
    """Replace every module of experts by one of linear layers, in place, also on meta.

    The names of their weights, with how the model's files hold them, are kept in
    `model.stacked_weights`.
    """
    found = {name: m for name, m in model.named_modules() if is_stackable(m)}
    names = {}
    for name, module in found.items():
        kind = AllExperts if type(module).__name__ in _ALL_EXPERTS else StackedExperts
        made = kind(module)
        model.set_submodule(name, made)
        for stack in made.stacks:
            names[f"{name}.{stack}.weight"] = Stack(
                f"{name}.{stack}", made.num_experts, made.transposed
            )
    if names:
        model.stacked_weights = names
    return model


def fits_grouped_kernel(experts: StackedExperts) -> bool:
    """Whether sizes suit the kernel; with others the host waits for how many rows each expert got."""
    layers = (getattr(experts, name) for name in experts.stacks)
    bases = (getattr(layer, "base_layer", layer) for layer in layers)
    sizes = [n for b in bases for n in (b.in_features, b.out_features // experts.num_experts)]
    return all(is_aligned_size(n) for n in sizes)


def mixtures_of(model: nn.Module) -> list[StackedExperts]:
    """The experts of each block whose router chooses some of them for each token."""
    return [m for m in model.modules() if type(m) is StackedExperts]


def stacked_weights(model: nn.Module) -> dict[str, Stack]:
    """For each weight of stacked experts, without what PEFT puts before it, how files hold it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "stacked_weights", {})


def check_quantizable(model: nn.Module, quant: str):
    """Refuse to leave much of a model in 16 bits: weights that are in no linear layer and no stack.

    Convolutions and what is small beside the rest (routers, tables) stay as they are. Raises ValueError
    naming --quant and the module that holds most.
    """
    linear, elsewhere = 0, {}
    for name, module in model.named_modules():
        own = sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)
        if is_plain_linear(module):
            linear += own
        elif not isinstance(module, (nn.Embedding, _ConvNd)):
            elsewhere[name] = own
    if sum(elsewhere.values()) <= _SMALL_PART * linear:
        return
    name = max(elsewhere, key=elsewhere.__getitem__)
    raise ValueError(
        f"--quant {quant}: {name} ({type(model.get_submodule(name)).__name__}) keeps weights outside of "
        "linear layers, in a way that can't be quantized here; use --quant none"
    )


_SMALL_PART = 0.2  # of the weights in linear layers
