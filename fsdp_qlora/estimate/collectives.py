"""Calls and bytes of every collective of a step, on one rank.

Follows sharding/fsdp.py, memory/vocab_parallel.py and training/step.py. Bytes are those of the larger
side: what an all-gather gives, what a reduce-scatter takes. A ring moves (n - 1)/n of them through each
rank's link, and twice as much for an all-reduce (Thakur et al., Optimization of Collective Communication
Operations in MPICH, 2005).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..catalog.arch import ModelShape
from ..catalog.llama_pro import expansion
from ..choices.strategies import BUCKET_BYTES, PIECE_BYTES
from ..plan import BYTES, Plan
from .stored_weight import Weight
from .vocabulary import embeddings_by_rows, trains_head, travelling_rows
from .weights import (
    all_trained,
    block_weights,
    embedding_weights,
    gathered,
    linear_weights,
    plan_of_new_blocks,
    root_weights,
    trained_bytes,
    trained_tensors,
)


@dataclass(frozen=True)
class Moved:
    """Of one kind of collective."""

    calls: int
    bytes: int


def step_collectives(shape: ModelShape, plan: Plan) -> dict[str, Moved]:
    """By collective, what one rank takes part in during one optimizer step; empty on one rank.

    Of equal blocks, all of them adapted, or Llama-Pro's. What ranks that share rows exchange is not in it.
    """
    if plan.sharding.world_size == 1:
        return {}
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])

    def add(name: str, calls: float, size: float):
        if calls and size:
            found[name][0] += calls
            found[name][1] += calls * size

    add("all_reduce", 1, 2 * 8)  # trained tokens and all tokens of the step
    add("all_reduce", 1, 2 * 8)  # the loss, and tokens that the model had right
    if not plan.sharded:
        _add_ddp(add, shape, plan)
    else:
        _add_units(add, shape, plan)
        _add_vocabulary(add, shape, plan)
        add("all_reduce", 1, _norm_bytes(shape, plan))
    return {name: Moved(round(calls), round(size)) for name, (calls, size) in found.items()}


def _norm_bytes(shape: ModelShape, plan: Plan) -> float:
    """The squared norms of all gradients, one number a tensor, which ranks add up before the root."""
    return trained_tensors(shape, plan) * BYTES[plan.trained_dtype]


def _add_ddp(add, shape: ModelShape, plan: Plan):
    """Whole gradients in buckets, with a number for each tensor (sharding/ddp.py)."""
    size = all_trained(shape, plan, 1)
    calls = max(1, -(-size // BUCKET_BYTES))
    add("all_reduce", calls, (size + _norm_bytes(shape, plan)) / calls)


def _units(shape: ModelShape, plan: Plan) -> list[tuple[list[Weight], int, int]]:
    """Weights of each FSDP unit of the blocks, how many such units there are, and of how many in backward."""
    new, base = shape.new_blocks, shape.layers - shape.new_blocks
    before = expansion(base, new).new[0] if new else 0  # whose input asks for no gradient
    kinds = [(kind, plan, count, count) for kind, count in shape.block_kinds()]
    if new:
        kinds = [(shape, plan, base, base - before), (shape, plan_of_new_blocks(plan), new, new)]
    found: list[tuple[list[Weight], int, int]] = []
    for kind, stored, count, in_backward in kinds:
        whole = list(block_weights(kind, stored))
        if plan.sharding.wrap_policy == "attention_mlp":
            for part in ("attention", "mlp"):
                found.append((list(linear_weights(kind, stored, part)), count, in_backward))
            whole = whole[len(linear_weights(kind, stored)) :]
        found.append((whole, count, in_backward))
    return found


def _add_units(add, shape: ModelShape, plan: Plan):
    """FSDP's own: all-gathers of weights, reduce-scatters of gradients, all-reduces over replicas."""
    m, n = plan.batch.accumulation, plan.sharding.shard_ranks
    once = 1 if plan.sharding.gather_once else m
    reduces = 1 if plan.loop.no_sync else m
    units = [*_units(shape, plan), (embedding_weights(shape, plan), 1, 1)]
    units.append((root_weights(shape, plan), 1, 0))
    for weights, count, in_backward in units:
        size = gathered(weights, plan)
        gathers = once * (count + in_backward * plan.sharding.resharded)
        if n > 1:
            add("all_gather", gathers * bool(size), size)
        gradients = _reduced(weights, plan)
        if n > 1:
            add("reduce_scatter", count * reduces, n * gradients)
        if plan.sharding.facts.is_hybrid:
            add("all_reduce", count * reduces, gradients)


def _reduced(weights: Iterable[Weight], plan: Plan) -> float:
    """One rank's part of a unit's gradients in fp32, in which they are reduced."""
    return trained_bytes(weights, plan.sharding.shard_ranks, plan, "fp32")


def _add_vocabulary(add, shape: ModelShape, plan: Plan):
    """A frozen embedding's rows, and the frozen head for the loss (memory/vocab_parallel.py)."""
    m, n = plan.batch.accumulation, plan.sharding.shard_ranks
    if not plan.by_rows or n == 1:
        return
    value, tokens = BYTES[plan.model.stored_dtype], int(plan.batch.tokens)
    for rows, width in embeddings_by_rows(shape, plan):
        pieces = -(-tokens // max(1, PIECE_BYTES // (n * width * value)))
        add("all_reduce", m, 8)  # the longest of all ranks' batches
        if travelling_rows(rows, plan) == rows:
            add("all_gather", m, -(-rows // n) * n * width * value)
        else:
            add("all_gather", m, n * tokens * 8)
            add("reduce_scatter", m * pieces, n * tokens * width * value / pieces)
    if not trains_head(shape, plan):
        add("all_gather", m, -(-shape.vocab // n) * n * shape.hidden * value)
