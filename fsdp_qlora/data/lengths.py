"""Lengths of rows, and what a run's loader makes of them: for estimates and plans.

The loader itself cuts the lengths into steps, so that its rules hold here too. A large data set is
represented by a sample of its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..config import BatchPlan
from ..estimate.lengths import Batches
from .collate import few_widths, padded_length
from .loader import Layout, StepLoader, run_widths
from .report import DataReport
from .sampler import step_sampler

SAMPLE = 2000  # rows that stand for a data set
STEPS = 200  # that are looked at


@dataclass(frozen=True)
class RowLengths:
    """Tokens of each row, or of a sample of the rows."""

    lengths: tuple[int, ...]
    context_length: int
    num_rows: int | None  # of the whole data set; None where the end of a stream is not known
    longest: int  # places of the longest row of the whole, where rows are padded
    seed: int = 42
    can_pack: bool = True  # whether the model keeps packed rows apart

    @property
    def mean_length(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    @property
    def is_whole(self) -> bool:
        return self.num_rows == len(self.lengths)

    def batches(
        self, plan: BatchPlan, world_size: int, *, packing: bool, compiled: bool
    ) -> Batches:
        """Means over the first `STEPS` steps of an epoch; of a sample, over full steps."""
        return _batches(self, plan, world_size, packing, compiled)


def row_lengths(
    lengths: np.ndarray,
    context_length: int,
    num_rows: int | None,
    seed: int,
    can_pack: bool = True,
    others: Sequence[np.ndarray] = (),
) -> RowLengths:
    """The lengths, or a sample of `SAMPLE` of them that is drawn from `seed`.

    others: lengths of rows that are not trained on, or not in the sample, and may be the longest.
    """
    longest = (
        context_length if num_rows is None else longest_row([lengths, *others], context_length)
    )
    if len(lengths) > SAMPLE:
        lengths = np.random.default_rng(seed).choice(lengths, SAMPLE, replace=False)
    sample = tuple(int(n) for n in lengths)
    return RowLengths(sample, context_length, num_rows, longest, seed, can_pack)


def longest_row(lengths: Iterable[np.ndarray], context_length: int) -> int:
    """Places that the longest of padded rows takes, which memory is planned for."""
    longest = max(int(of_rows.max(initial=1)) for of_rows in lengths)
    return padded_length(longest, pad_to=few_widths(context_length))


@dataclass(frozen=True)
class _Dataset:
    """As much of a data set as a loader needs to cut it into micro-batches."""

    lengths: np.ndarray
    report: DataReport

    def __len__(self) -> int:
        return len(self.lengths)


@lru_cache(maxsize=512)
def _batches(
    rows: RowLengths, plan: BatchPlan, world_size: int, packing: bool, compiled: bool
) -> Batches:
    dataset = _Dataset(_enough(rows, plan), DataReport(rows.context_length))
    sampler = step_sampler(dataset, plan.per_step, plan.unit, seed=rows.seed)
    width = run_widths(rows.context_length, compiled, one=plan.unit == "bin")
    loaders = [
        StepLoader(
            dataset,
            sampler,
            rank,
            world_size,
            plan.micro_batch_size,
            pad_token_id=0,
            packing=packing,
            pad_to=width,
        )
        for rank in range(world_size)
    ]
    full = sampler.total_steps - (
        not rows.is_whole and sampler.total_steps > 1
    )  # the last may be short
    steps = [[loader.layouts(index) for loader in loaders] for index in range(min(STEPS, full))]
    return _means(steps, _steps_of(rows, plan, sampler.total_steps, len(dataset)))


def _enough(rows: RowLengths, plan: BatchPlan) -> np.ndarray:
    """The lengths; those of a sample again and again until they fill a step."""
    lengths = np.array(rows.lengths, dtype=np.int64)
    if rows.is_whole:
        return lengths
    rows_of_unit = 1 if plan.unit == "row" else rows.context_length / lengths.mean()
    return np.tile(lengths, -(-2 * int(plan.per_step * rows_of_unit + 1) // len(lengths)))


def _steps_of(rows: RowLengths, plan: BatchPlan, total: int, sampled: int) -> int | None:
    """Steps of an epoch over all rows."""
    if rows.num_rows is None:
        return None
    if rows.is_whole:
        return total
    if plan.unit == "row":
        return -(-rows.num_rows // plan.per_step)
    return max(1, round(total * rows.num_rows / sampled))


def _means(steps: list[list[list[Layout]]], total: int | None) -> Batches:
    """steps: of each step, of each rank, its micro-batches."""
    beside = [
        micro for ranks in steps for micro in zip(*ranks, strict=True)
    ]  # run at the same time
    slowest = [max(micro, key=lambda layout: (layout.places, layout.squares)) for micro in beside]
    every = [layout for micro in beside for layout in micro]
    tokens, places = (
        sum(layout.tokens for layout in every),
        sum(layout.places for layout in slowest),
    )
    return Batches(
        steps=total,
        accumulation=len(beside) / len(steps),
        tokens=tokens / len(steps),
        places=places / len(slowest),
        row=sum(layout.squares for layout in slowest) / places,
        share=tokens / sum(layout.places for layout in every),
    )
