"""What a mixture's experts add to an estimate: adapters, what a block keeps of them, their weights.

Follows experts/stacked.py and experts/grouped_matmul.py: a token is a row for each of its experts, and all
experts' weights are unpacked for one product, some outputs at a time. Rows as wide as the hidden states
exist only inside a product.

Letters: N tokens, K experts of each, S = N K rows, E experts, D hidden, F intermediate, R rank.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..choices import POLICIES
from ..plan import Plan
from .kinds import mean_of_blocks

PART_VALUES = 2**29  # weights that are unpacked at a time (experts/grouped_matmul.py)


def adapted_experts(shape: ModelShape, plan: Plan) -> dict[str, tuple[int, int]]:
    """(out, in) of one expert's adapted weights, by name."""
    if not plan.adapter.has_lora or not plan.adapter.expert_targets:
        return {}
    names = shape.expert_targets(plan.adapter.expert_targets)
    return {name: size for name, size in shape.expert_linears().items() if name in names}


def trained_inputs(shape: ModelShape, plan: Plan) -> tuple[str, ...]:
    """Experts' weights whose input is saved: adapted ones, or those that are trained themselves."""
    return tuple(
        adapted_experts(shape, plan) if not plan.adapter.is_full else shape.expert_linears()
    )


def row_bytes(shape: ModelShape, plan: Plan) -> float:
    """(S, 1) in the compute dtype: a value of each token for each of its experts."""
    return plan.batch.tokens * shape.experts_per_token * plan.model.product_bytes


def saved_by_experts(shape: ModelShape, plan: Plan) -> float:
    """Bytes that a forward saves beside gate, up and their product: weights of rows, and indices.

    Eager also has that product before the router's weights, which multiply it. Tokens of rows, rows of
    tokens and the order of both are kept as numbers of 8 bytes.
    """
    if not shape.experts:
        return 0.0
    eager, rows = not plan.loop.compile, plan.batch.tokens * shape.experts_per_token
    weights = rows * (3 * 8 + (1 + eager) * plan.model.product_bytes)
    router = plan.batch.tokens * (4 * shape.experts + 12 * shape.experts_per_token)
    gated = row_bytes(shape, plan) * _width(shape) * eager
    return gated + weights + router


def outputs(shape: ModelShape, plan: Plan) -> float:
    """What the experts' products give, which keep_linears keeps: (S, 2F), and eager (N, D).

    Of a compiled block nothing asks for the last one.
    """
    if not shape.experts:
        return 0.0
    last = plan.batch.tokens * plan.model.product_bytes * shape.hidden * (not plan.loop.compile)
    first, _ = shape.expert_linears().values()
    return row_bytes(shape, plan) * first[0] + last


def backward_moments(shape: ModelShape, plan: Plan, policy: str) -> list[tuple[float, float]]:
    """Bytes that are gone of what was saved, and in use, in the backward of the experts' two products.

    Of down_proj, the gradients of the block's output as rows (S, D), and of its input (S, F); then gate
    and up are gone, there are their gradients (S, 2F), and of the input one for each row (S, D), twice
    where a second part of the weight is added to it. In fp8 gradients are there once more, in a byte each;
    of the block's output only so, unless an adapter takes them.

    A compiled block that recomputes runs gate and up again between the two, where nothing asks for
    down_proj's input: then their input as rows (S, D) is beside the gradient (S, F).
    """
    if not shape.experts:
        return []
    rows, adapted = row_bytes(shape, plan), adapted_experts(shape, plan)
    byte = rows / plan.model.product_bytes * (plan.quantization.compute_dtype == "fp8")
    tokens = plan.batch.tokens * plan.model.product_bytes * shape.hidden
    (first, (made, _)), (last, (_, width)) = shape.expert_linears().items()
    twice = _parts(shape, plan, first) > 1
    gone = rows * (made + width * (2 * (not plan.loop.compile) + (last in adapted)))
    as_rows = rows * (not byte or last in adapted) + byte
    again = first in rerun_linears(shape, plan, policy) and plan.loop.compile
    between = tokens + rows * width + unpacked(shape, plan, first)
    between += (rows * (not byte or first in adapted) + byte) * shape.hidden
    return [
        (0.0, tokens + as_rows * shape.hidden + rows * width + unpacked(shape, plan, last)),
        (0.0, between * (again and last not in trained_inputs(shape, plan))),
        (
            gone,
            tokens
            + rows * (made + shape.hidden * (1 + twice))
            + byte * made
            + unpacked(shape, plan, first),
        ),
    ]


@mean_of_blocks
def routings(shape: ModelShape, plan: Plan) -> float:
    """How often a block's forward sends tokens to experts."""
    return float(shape.experts > 0)


def row_traffic(shape: ModelShape, plan: Plan) -> tuple[float, float]:
    """Bytes that pass between tokens and rows, and through the gate: a block's forward, and its backward.

    Tokens are read as rows (S, D), rows are added up to tokens; so are gradients. An adapted product has
    its input as rows again for A's gradient. In fp8 what no adapter needs is quantized where it lies.
    """
    if not shape.experts:
        return 0.0, 0.0
    rows, adapted = row_bytes(shape, plan), adapted_experts(shape, plan)
    first, last = (name in adapted for name in shape.expert_linears())
    in_fp8, eager = plan.quantization.compute_dtype == "fp8", not plan.loop.compile
    gathered, summed, gate = 2 * rows * shape.hidden, rows * shape.hidden, rows * _width(shape)
    return (
        gathered * (first or not in_fp8) + summed + (3 + 2 * eager) * gate,
        gathered * ((last or not in_fp8) + first) + summed + (6 + 2 * eager) * gate,
    )


def _width(shape: ModelShape) -> int:
    """Values between an expert's two products, F."""
    *_, (_, width) = shape.expert_linears().values()
    return width


def _parts(shape: ModelShape, plan: Plan, name: str) -> int:
    """In how many parts a weight of all experts is unpacked; 0 if it is there."""
    out, wide = shape.expert_linears()[name]
    in_fp8 = plan.quantization.compute_dtype == "fp8"
    is_there = plan.quantization.quant == "none" and not in_fp8
    return 0 if is_there else -(-shape.experts * out * wide // (PART_VALUES * (1 + in_fp8)))


def unpacked(shape: ModelShape, plan: Plan, name: str) -> float:
    """Bytes of experts' weights made for a product and freed after it, at the most."""
    parts = _parts(shape, plan, name)
    out, wide = shape.expert_linears()[name]
    value = 1 if plan.quantization.compute_dtype == "fp8" else plan.model.product_bytes
    return shape.experts * out * wide / parts * value if parts else 0.0


@mean_of_blocks
def hole_of_block(shape: ModelShape, plan: Plan) -> float:
    """Bytes of the weight whose place is taken once a forward has freed it: the first product's if adapted.

    What it keeps beside that is the input of the adapter.
    """
    if not shape.experts:
        return 0.0
    first, last = shape.expert_linears()
    return unpacked(shape, plan, first if adapted_experts(shape, plan) else last)


def adapter_weights_used(shape: ModelShape, plan: Plan) -> int:
    """Weights of experts' adapters in a block that a token is multiplied with."""
    return shape.experts_per_token * sum(
        plan.adapter.rank(name) * (out + wide)
        for name, (out, wide) in adapted_experts(shape, plan).items()
    )


def rerun_linears(shape: ModelShape, plan: Plan, policy: str) -> dict[str, tuple[int, int]]:
    """(out, in) of one expert's weights whose product a block's backward runs again.

    A compiled one leaves out the last, whose output no backward needs but that of a norm after it: the
    router's weights multiply its input. Eager code runs all of them.
    """
    if POLICIES[policy].keeps_linears or not shape.experts:
        return {}
    (first, size), last = shape.expert_linears().items()
    needs_last = not plan.loop.compile or shape.traits.output_norm
    return {first: size} | (dict([last]) if needs_last else {})


def rerun_weights(shape: ModelShape, plan: Plan, policy: str) -> int:
    """Weights of experts that a token is multiplied with again in a block's backward."""
    again = rerun_linears(shape, plan, policy).values()
    return shape.experts_per_token * sum(out * wide for out, wide in again)


def not_summed_again(shape: ModelShape, plan: Plan, policy: str) -> float:
    """Bytes between tokens and rows that a forward moves and a block's backward does not again: their sum."""
    if not shape.experts or len(rerun_linears(shape, plan, policy)) > 1:
        return 0.0
    return row_bytes(shape, plan) * shape.hidden
