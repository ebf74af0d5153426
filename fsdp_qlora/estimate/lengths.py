"""What a loader makes of rows of several lengths: padded or packed, how full, and how many steps.

The estimates ask for it here; the data layer answers with its own loader (data/lengths.py), so that no
rule of padding or packing is written twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ..config import BatchPlan, RunConfig, plan_batches
from ..config.run import row_shares, with_bins_of
from ..plan import Plan

_WASTED = 1 / 3  # of the places that padding may take before packing is proposed


@dataclass(frozen=True)
class Batches:
    """Optimizer steps over a data set, as means over the steps of an epoch."""

    steps: int | None  # of an epoch; None where the end of a stream is not known
    accumulation: float  # micro-batches of a rank in a step
    tokens: float  # of the rows, in a step of all ranks
    places: float  # of a micro-batch, on the rank that has most: tokens and padding
    row: float  # tokens that a place's attention row has, squares of rows over places
    share: float  # of all ranks' places that hold a token

    def seen(self, plan: Plan) -> Plan:
        """The settings with rows of one length that take as much: as many places, as much attention."""
        return plan.change(
            context_length=self.row,
            micro_batch_size=self.places / self.row,
            accumulation=self.accumulation,
        )


class Rows(Protocol):
    """A data set, or a sample of it."""

    num_rows: int | None  # of the whole; None where the end of a stream is not known
    mean_length: float
    longest: int  # places of the longest row, where rows are padded
    can_pack: bool  # whether the model keeps packed rows apart

    def batches(
        self, plan: BatchPlan, world_size: int, *, packing: bool, compiled: bool
    ) -> Batches: ...


def with_longest_row(config: RunConfig, rows: Rows | None) -> RunConfig:
    """The settings with the rows that memory must hold: full bins, or the longest padded row."""
    if rows is None or config.packing:
        return config
    return replace(config, context_length=min(config.context_length, rows.longest))


def batches_of(rows: Rows, config: RunConfig, world_size: int) -> Batches:
    """What the loader of a run makes of its rows."""
    return rows.batches(
        plan_batches(with_bins_of(config, rows.mean_length, world_size), world_size),
        row_shares(config, world_size),
        packing=config.packing,
        compiled=config.compile is not False,
    )


def padding_line(rows: Rows, config: RunConfig, world_size: int) -> str:
    """What packing would give, where padding wastes more than a third of the places; else empty."""
    if config.packing or not rows.can_pack:
        return ""
    share = batches_of(rows, config, world_size).share
    if 1 - share <= _WASTED:
        return ""
    packed = batches_of(rows, replace(config, packing=True), world_size).share
    if packed <= share:
        return ""
    return (
        f"{1 - share:.0%} of the places are padding; --packing true would be about "
        f"{packed / share:.1f} times as fast"
    )
