"""What a mixture's experts add to an estimate: adapters, what a block keeps of them, their weights.

Follows experts/stacked.py and experts/grouped_matmul.py: a token is a row for each of its experts, and all
experts' weights are unpacked for one product, some outputs at a time.

Letters: N tokens, K experts of each, S = N K rows, E experts, D hidden, F intermediate, R rank.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..choices import POLICIES
from ..plan import Plan

PART_VALUES = 2**28  # weights that are unpacked at a time (experts/grouped_matmul.py)


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
    """Bytes that a forward saves beside gate and up: rows as they came and as they left, and x A^T.

    What an expert made is needed for the gradient of the router's weight of it; two orders of rows are
    kept as numbers of 8 bytes.
    """
    if not shape.experts:
        return 0.0
    inputs = "experts.gate_up_proj" in trained_inputs(shape, plan)
    orders = 16 * plan.batch.tokens * shape.experts_per_token
    router = plan.batch.tokens * (4 * shape.experts + 12 * shape.experts_per_token)
    rows = row_bytes(shape, plan) * shape.hidden * (1 + inputs)
    return rows + rank_products(shape, plan) + orders + router


def rank_products(shape: ModelShape, plan: Plan) -> float:
    """x A^T (S, R) of each adapted weight of experts; R is filled up to a multiple of 8."""
    return row_bytes(shape, plan) * sum(
        -(-plan.adapter.rank(name) // 8) * 8 for name in adapted_experts(shape, plan)
    )


def outputs(shape: ModelShape, plan: Plan) -> float:
    """What the experts' products give, (S, 2F) and (S, D), which keep_linears keeps with x A^T."""
    out = sum(out for out, _ in shape.expert_linears().values())
    return row_bytes(shape, plan) * out + rank_products(shape, plan)


def unpacked(shape: ModelShape, plan: Plan) -> float:
    """Bytes of experts' weights made for a product and freed after it, at the most."""
    if plan.quantization.quant == "none" or not shape.experts:
        return 0.0
    values = max(shape.experts * out * wide for out, wide in shape.expert_linears().values())
    return min(values, PART_VALUES) * plan.model.product_bytes


def adapter_weights_used(shape: ModelShape, plan: Plan) -> int:
    """Weights of experts' adapters in a block that a token is multiplied with."""
    return shape.experts_per_token * sum(
        plan.adapter.rank(name) * (out + wide)
        for name, (out, wide) in adapted_experts(shape, plan).items()
    )


def rerun_weights(shape: ModelShape, policy: str) -> int:
    """Weights of experts that a token is multiplied with again in a block's backward."""
    if POLICIES[policy].keeps_linears:
        return 0
    return shape.experts_per_token * sum(
        out * wide for out, wide in shape.expert_linears().values()
    )
