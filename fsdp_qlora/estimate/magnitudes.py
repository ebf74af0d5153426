"""What DoRA's magnitudes take beside the adapters: scaled outputs, their norms, dropout's second product.

A layer's y0 = x (W + scaling B A)^T stays for the gradient of m, and m / |W + scaling B A| times it is what
the block goes on with (../adapters/dora.py).

Letters: N tokens, O outputs.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..choices import POLICIES
from ..plan import Plan
from .weights import as_given

NORM_VALUES = 2**24  # of W of which norms have a copy in fp32 (../adapters/dora.py)


def turned_linears(shape: ModelShape, plan: Plan) -> dict[str, tuple[int, int]]:
    """(out, in) of the layers of a block that have a magnitude."""
    if plan.adapter.adapter != "dora":
        return {}
    targets = shape.targets(as_given(plan.adapter.targets))
    return {name: size for name, size in shape.linears().items() if name in targets}


def needs_last_output(shape: ModelShape, plan: Plan) -> bool:
    """Whether a backward needs what down_proj gives: for a norm after it, or for its magnitude."""
    last = next(reversed(shape.mlp_linears()), None)
    return shape.traits.output_norm or last in turned_linears(shape, plan)


def saved_outputs(shape: ModelShape, plan: Plan) -> float:
    """Bytes that a keep_all block saves more than with LoRA.

    y0 (N, O) of each layer, of which a compiled block makes v, gate and up again, that it would else
    save; eager also norms and factors (O,) in fp32. And what dropout leaves of each input.
    """
    sizes, compiled = turned_linears(shape, plan), plan.loop.compile
    values = sum(out for name, (out, _) in sizes.items() if not compiled or name not in _SAVED_TOO)
    if plan.adapter.lora_dropout:
        values += sum(wide for _, wide in sizes.values())
    of_rows = 0 if compiled else 2 * 4 * sum(out for out, _ in sizes.values())
    return plan.batch.tokens * plan.model.product_bytes * values + of_rows


def scaled_beside(shape: ModelShape, plan: Plan, policy: str) -> float:
    """Bytes of v, gate and up that a compiled block which runs them again holds beside their y0."""
    row = POLICIES[policy]
    if not plan.loop.compile or not row.recomputes or row.keeps_linears:
        return 0.0
    sizes, mlp = turned_linears(shape, plan), shape.mlp_linears()
    values = sum(
        out / (plan.memory.tiles(policy) if name in mlp else 1)
        for name, (out, _) in sizes.items()
        if name in _SAVED_TOO
    )
    return plan.batch.tokens * plan.model.product_bytes * values


_SAVED_TOO = ("v_proj", "gate_proj", "up_proj")  # whose outputs are saved without a magnitude too


def kept_norms(shape: ModelShape, plan: Plan) -> float:
    """Bytes of norms that stay beside the outputs of products; fp8 makes them again."""
    if plan.quantization.compute_dtype == "fp8":
        return 0.0
    return 4.0 * sum(out for out, _ in turned_linears(shape, plan).values())


def norm_copies(shape: ModelShape, plan: Plan) -> float:
    """Bytes of W in fp32 that a norm has at once, where products are in 16 bits."""
    if plan.model.product_bytes == 4:
        return 0.0
    sizes = (out * wide for out, wide in turned_linears(shape, plan).values())
    return 4.0 * min(NORM_VALUES, max(sizes, default=0))


def second_products(shape: ModelShape, plan: Plan) -> dict[str, tuple[int, int]]:
    """(out, in) of the layers that send what dropout takes away through W alone."""
    return turned_linears(shape, plan) if plan.adapter.lora_dropout else {}
