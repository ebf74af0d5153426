"""What of embeddings and head travels or exists whole: frozen ones are kept by rows.

Follows memory/vocab_parallel.py and the loss.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..choices.strategies import PIECE_BYTES
from ..plan import BYTES, Plan
from .weights import EMBEDDING, HEAD, trains_end


def head_bytes(shape: ModelShape, plan: Plan) -> float:
    """The head whole, as the loss gathers or fetches it; 0 where every GPU holds it, or FSDP gathers."""
    if not (plan.by_rows or plan.vocabulary_on_host) or trains_head(shape, plan):
        return 0.0
    return shape.vocab * shape.hidden * BYTES[plan.model.stored_dtype]


def embeddings_by_rows(shape: ModelShape, plan: Plan) -> list[tuple[int, int]]:
    """Rows and width of the frozen embeddings that no rank holds whole."""
    tables = [(EMBEDDING, (shape.vocab, shape.hidden)), *shape.outer_tables()]
    return [
        size
        for name, size in tables
        if plan.by_rows and name.startswith(EMBEDDING) and not plan.adapter.trains(name)
    ]


def travelling_rows(rows: int, plan: Plan) -> float:
    """Rows of a frozen embedding that travel in a forward: all ranks' tokens', at most all it has."""
    return min(plan.sharding.shard_ranks * plan.batch.tokens, rows)


def rows_in_flight(shape: ModelShape, plan: Plan) -> float:
    """Bytes of an embedding's rows that are found, and of their sum; they travel a piece at a time."""
    sizes = (
        travelling_rows(rows, plan) * width
        for rows, width in embeddings_by_rows(shape, plan)
        if travelling_rows(rows, plan) < rows
    )
    return 2 * min(PIECE_BYTES, max(sizes, default=0) * BYTES[plan.model.stored_dtype])


def whole_embedding_bytes(shape: ModelShape, plan: Plan) -> float:
    """The largest embedding that is gathered whole to look rows up; 0 where single rows travel."""
    if plan.sharding.shard_ranks == 1:
        return 0.0
    sizes = (
        rows * width
        for rows, width in embeddings_by_rows(shape, plan)
        if travelling_rows(rows, plan) == rows
    )
    return max(sizes, default=0) * BYTES[plan.model.stored_dtype]


def trains_head(shape: ModelShape, plan: Plan) -> bool:
    """Whether the head's weights are trained themselves; those of a tied one are the embedding's."""
    return trains_end(shape, plan, HEAD) or shape.tied and trains_end(shape, plan, EMBEDDING)


def trains_embedding(shape: ModelShape, plan: Plan) -> bool:
    """Whether the embedding's weights are trained, which a tied head's are."""
    return trains_end(shape, plan, EMBEDDING) or shape.tied and trains_head(shape, plan)


def cast_head_bytes(shape: ModelShape, plan: Plan) -> float:
    """A trained head as the loss multiplies with it, if it is stored in another dtype."""
    cast = not plan.adapter.is_full and plan.adapter.adapter_dtype != plan.model.stored_dtype
    return (
        shape.vocab
        * shape.hidden
        * BYTES[plan.model.stored_dtype]
        * (cast and trains_head(shape, plan))
    )
