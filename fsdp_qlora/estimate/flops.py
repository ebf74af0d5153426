"""Floating-point operations of a step, what the task itself needs of them, and what runs again."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..catalog.arch import ModelShape
from ..choices import POLICIES
from ..plan import Plan
from . import experts
from .activations import KEPT_ATTENTION, last_linear
from .kinds import mean_of_blocks
from .magnitudes import needs_last_output, second_products
from .vocabulary import trains_head
from .weights import as_given, trained_share


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token of one step, by what does them."""

    linears: float  # blocks and head, forward and backward
    head: float  # the head's part of them
    adapters: float
    attention: float
    recompute_linears: float  # linears and adapters run again
    recompute_attention: float

    @property
    def total(self) -> float:
        return (
            self.linears
            + self.adapters
            + self.attention
            + self.recompute_linears
            + self.recompute_attention
        )


def flops_per_token(shape: ModelShape, plan: Plan) -> Flops:
    """What the hardware does per token, a product of (m, k) and (k, n) being 2 m k n.

    A weight costs 2 in the forward and 2 for dX; trained ones 2 more for dW; 2 again where its
    product is recomputed. Causal attention does half of Q K^T and P V, 2 T q per layer; a flash
    backward recomputes Q K^T, which makes it 2.5 times the forward (arXiv:2307.08691). The
    embedding is a lookup, and the chunked loss makes the head's dX in the forward.
    """
    linears = used_linears(shape)
    head = shape.vocab * shape.hidden
    adapters = _adapter_params(shape, plan)
    attention = 2 * plan.batch.context_length * _attention_width(shape)
    each = 4 + 2 * trained_share(shape, plan) if plan.adapter.is_full else 4
    counts = Counter(plan.memory.policies(shape))
    again = sum(count * rerun_weights(shape, plan, policy) for policy, count in counts.items())
    blocks = sum(count for policy, count in counts.items() if _reruns_attention(plan, policy))
    of_head = (6 if trains_head(shape, plan) else 4) * head
    trained = 2 * linears * shape.new_blocks / shape.layers  # dW of Llama-Pro's blocks
    second = 4 * shape.layers * _second_weights(shape, plan)
    return Flops(
        linears=each * linears + trained + second + of_head,
        head=of_head,
        adapters=6 * adapters,
        attention=3.5 * attention,
        recompute_linears=2 * again,
        recompute_attention=attention * blocks / shape.layers,
    )


def rerun_linears(shape: ModelShape, plan: Plan, policy: str) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers whose product a block's backward runs again.

    Not down_proj, the last one, whose output no backward needs but that of a norm after it, or of a
    DoRA magnitude.
    """
    if POLICIES[policy].keeps_linears:
        return {}
    last_too = needs_last_output(shape, plan)
    return {
        name: size
        for name, size in shape.linears().items()
        if name != last_linear(shape) or last_too
    }


@mean_of_blocks
def _second_weights(shape: ModelShape, plan: Plan) -> int:
    """Weights of a block that DoRA multiplies twice, under dropout."""
    return sum(out * wide for out, wide in second_products(shape, plan).values())


@mean_of_blocks
def rerun_weights(shape: ModelShape, plan: Plan, policy: str) -> int:
    """Weights of one block whose products run again; of adapters all A, unless products are kept."""
    again = rerun_linears(shape, plan, policy)
    if not POLICIES[policy].recomputes:
        return 0
    weights = sum(out * wide for out, wide in again.values())
    weights += sum(
        out * wide
        for name, (out, wide) in second_products(shape, plan).items()
        if name in again and (name != last_linear(shape) or shape.traits.output_norm)
    )
    weights += experts.rerun_weights(shape, plan, policy)
    if not again:
        return weights
    weights += experts.adapter_weights_used(shape, plan)
    adapted = adapted_linears(shape, plan)
    return weights + sum(
        plan.adapter.rank(name) * (wide + out * (name in again))
        for name, (out, wide) in adapted.items()
    )


def _reruns_attention(plan: Plan, policy: str) -> bool:
    """Whether attention runs again in a block's backward."""
    row = POLICIES[policy]
    return row.recomputes and not (row.keeps_attention and plan.model.attention in KEPT_ATTENTION)


def adapted_linears(shape: ModelShape, plan: Plan) -> dict[str, tuple[int, int]]:
    """(out, in) of the adapted linear layers of a block."""
    if not plan.adapter.has_lora:
        return {}
    targets = shape.targets(as_given(plan.adapter.targets))
    return {name: size for name, size in shape.linears().items() if name in targets}


def _adapter_params(shape: ModelShape, plan: Plan) -> int:
    """Weights of the adapters that a token is multiplied with, 0 without any."""
    if not plan.adapter.has_lora:
        return 0
    in_head = "lm_head" in shape.targets(as_given(plan.adapter.targets))
    head = plan.adapter.rank("lm_head") * (shape.vocab + shape.hidden) if in_head else 0
    return round(shape.layers * adapter_weights_used(shape, plan)) + head


@mean_of_blocks
def adapter_weights_used(shape: ModelShape, plan: Plan) -> float:
    """Weights of a block's adapters that a token is multiplied with."""
    return experts.adapter_weights_used(shape, plan) + sum(
        plan.adapter.rank(name) * (out + wide)
        for name, (out, wide) in adapted_linears(shape, plan).items()
    )


def used_linears(shape: ModelShape) -> int:
    """Weights of all blocks' linear layers that a token is multiplied with."""
    return sum(count * kind.used_linears() for kind, count in shape.block_kinds())


def _attention_width(shape: ModelShape) -> int:
    """Width of the queries of all layers with attention."""
    return sum(count * kind.heads * kind.head_dim for kind, count in shape.block_kinds())


def model_flops_per_token(shape: ModelShape, plan: Plan) -> float:
    """FLOPs per token that the task itself needs, as benchmark rows count them.

    4 per frozen weight and 6 per trained one, linears and head, plus 6 T q per layer for causal
    attention (half of the square, backward twice the forward). Recomputation does not count.
    """
    linears = used_linears(shape) + shape.vocab * shape.hidden
    each = 4 + 2 * trained_share(shape, plan) if plan.adapter.is_full else 4
    attention = 6 * plan.batch.context_length * _attention_width(shape)
    new = 2 * shape.params()["linears"] * shape.new_blocks / shape.layers
    return each * linears + new + 6 * _adapter_params(shape, plan) + attention


def model_tflops(shape: ModelShape, plan: Plan, tokens_per_second: float) -> float:
    """Model TFLOP/s at a measured rate of tokens; per GPU if the rate is."""
    return model_flops_per_token(shape, plan) * tokens_per_second / 1e12
