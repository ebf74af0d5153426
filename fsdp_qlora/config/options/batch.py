"""How many rows or tokens a step has, and how many steps there are."""

from __future__ import annotations

from dataclasses import dataclass

from .. import without_effect as rules
from ..settings import AUTO, MAY_CHANGE, MUST_MATCH, RUN_LENGTH, opt


@dataclass(kw_only=True)
class BatchOptions:
    """Batch and steps"""

    batch_size: int = opt(
        1,
        "rows per GPU and micro-batch, or bins with --packing; auto = planned",
        unit="rows",
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    gradient_accumulation_steps: int = opt(
        AUTO,
        "micro-batches per optimizer step; -1 = as many as make 8 rows a step over all GPUs, or with "
        "--packing as many bins as hold about 32 rows, 8 at most",
        example=4,
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
        no_effect=rules.of_gradient_accumulation,
    )
    global_batch_size: int = opt(
        AUTO,
        "rows per optimizer step over all GPUs; results are then the same on any number of "
        "GPUs, and accumulation is derived; -1 = batch_size x accumulation x GPUs",
        unit="rows",
        example=32,
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    bins_per_step: int = opt(
        AUTO,
        "with --packing: full bins per optimizer step over all GPUs; results are then the same on any "
        "number of GPUs, and accumulation is derived; -1 = batch_size x accumulation x GPUs",
        unit="bins",
        example=32,
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    packing: bool = opt(
        False,
        "pack rows into bins of --context_length instead of padding them; --batch_size then "
        "counts full bins, while --global_batch_size still counts rows, which may leave "
        "bins nearly empty",
        on_resume=MUST_MATCH,
    )
    num_epochs: float = opt(
        1.0, "passes over the data; 0.5 is half of one", example=2.5, on_resume=RUN_LENGTH
    )
    max_steps: int = opt(
        AUTO,
        "stop after this many optimizer steps; -1 = never",
        on_resume=RUN_LENGTH,
        least=1,
        or_auto=True,
    )
    seed: int = opt(
        42, "seed of data order, adapter initialization and dropout", on_resume=MUST_MATCH
    )
