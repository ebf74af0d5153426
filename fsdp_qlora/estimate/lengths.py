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
# Tokens of a micro-batch below which it is proposed, too, where it would multiply them by so much: a 7B model
# took 49 ms of an H200 for 255 tokens, which are 14 ms of a bin of 8,192 (of an 8B model; docs/LOG.md).
_FEW_TOKENS, _WORTHWHILE = 1024, 2


@dataclass(frozen=True)
class Batches:
    """Optimizer steps over a data set, as means over the steps of an epoch."""

    steps: int | None  # of an epoch; None where the end of a stream is not known
    accumulation: float  # micro-batches of a rank in a step
    tokens: float  # of the rows, in a step of all ranks
    places: float  # of a micro-batch, on the rank that has most: tokens and padding
    row: float  # tokens that a place's attention row has, squares of rows over places
    share: float  # of all ranks' places that hold a token

    def micro_batch_tokens(self, config: RunConfig, world_size: int) -> float:
        """Tokens of a rank's micro-batch, padding not counted."""
        return self.tokens / self.accumulation / row_shares(config, world_size)

    def seen(self, plan: Plan) -> Plan:
        """The settings with rows of one length that take as much: as many places, as much attention."""
        return plan.change(
            context_length=self.row,
            micro_batch_size=self.places / self.row,
            accumulation=self.accumulation,
        )


@dataclass(frozen=True)
class PackingGain:
    """Why rows should be packed, in words: what is lost without, and what --packing true does."""

    lost: str
    gained: str


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


def packing_gain(
    rows: Rows, config: RunConfig, world_size: int, on_gpu: bool
) -> PackingGain | None:
    """What packing would give where over a third of the places is lost without, or a GPU's time; else None.

    With few tokens in a micro-batch a GPU does little but unpack weights. On a CPU, masks that keep rows
    apart cost what padding does.
    """
    if config.packing or not rows.can_pack or not on_gpu:
        return None
    padded, packed = (
        batches_of(rows, replace(config, packing=is_packed), world_size)
        for is_packed in (False, True)
    )
    if 1 - padded.share > _WASTED and packed.share > padded.share:
        return PackingGain(
            f"{1 - padded.share:.0%} of the places are padding",
            f"would be about {packed.share / padded.share:.1f} times as fast",
        )
    held, full = (b.micro_batch_tokens(config, world_size) for b in (padded, packed))
    if held < _FEW_TOKENS and full > _WORTHWHILE * held:
        return PackingGain(
            f"a micro-batch holds about {held:,.0f} tokens",
            f"would fill it with {full:,.0f}, which is faster",
        )
    return None


def packing_line(rows: Rows, config: RunConfig, world_size: int, on_gpu: bool) -> str:
    """What packing would give, where much is lost without it; else empty."""
    found = packing_gain(rows, config, world_size, on_gpu)
    return f"{found.lost}; --packing true {found.gained}" if found else ""
