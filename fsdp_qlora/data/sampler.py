"""Which rows each optimizer step trains on, and how a step's rows are shared among ranks.

The unit is the optimizer step, not the batch of one rank. A step's rows follow from (seed, epoch,
step) alone, so the same rows meet in the same step on 1 GPU or on 64, at any micro-batch size, and a
run resumes from one number on any number of ranks. A step is a number of rows, or of bins that are
filled with rows (`packing.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from threading import Lock

import numpy as np

from .packing import full_bins


class StepSampler:
    """The global list of row ids of each optimizer step.

    Every row is used exactly once per epoch; the last step of an epoch is short where
    `rows_per_step` does not divide the rows (nothing is dropped, nothing is repeated).

    rows_per_step: --global_batch_size.
    shuffle: another order in every epoch, derived from (seed, epoch).
    max_steps: stop after exactly so many steps, in as many epochs as that takes; -1 follows
        `epochs`.
    """

    def __init__(
        self,
        num_rows: int,
        rows_per_step: int,
        seed: int = 42,
        shuffle: bool = True,
        epochs: float = 1,
        max_steps: int = -1,
    ):
        if num_rows < 1:
            raise ValueError("--dataset: no row to train on")
        if rows_per_step < 1:
            raise ValueError(f"--global_batch_size {rows_per_step}: give at least 1 row per step")
        if max_steps < 1 and max_steps != -1:
            raise ValueError(f"--max_steps {max_steps}: give at least 1 step, or -1 for all epochs")
        if max_steps == -1 and not epochs > 0:
            raise ValueError(f"--num_epochs {epochs:g}: give more than 0 epochs")
        self.num_rows, self.rows_per_step = num_rows, rows_per_step
        self.seed, self.shuffle = seed, shuffle
        self.steps_per_epoch = -(-num_rows // rows_per_step)
        self.total_steps = total_steps(num_rows, rows_per_step, epochs, max_steps)
        self.position = 0  # the next step
        self.order = lru_cache(maxsize=2)(self._make_order)  # two, as a loader reads ahead

    def __len__(self) -> int:
        return self.total_steps

    def __iter__(self) -> Iterator[list[int]]:
        while self.position < self.total_steps:
            self.position += 1  # before the yield: a checkpoint in the step counts the step as done
            yield self.rows(self.position - 1)

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """Row ids of any step, from 0."""
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        start = in_epoch * self.rows_per_step
        return self.order(epoch)[start : start + self.rows_per_step].tolist()

    def _make_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)

    def state_dict(self) -> dict:
        """The position, and what must be equal for it to mean the same; no world size."""
        return {name: getattr(self, name) for name in ("position", *_SAME_ROWS)}

    def load_state_dict(self, state: dict) -> None:
        check_same(state, self, _SAME_ROWS)
        self.position = state["position"]


class BinSampler:
    """The global list of bins, each a list of row ids, of each optimizer step.

    Every row is in exactly one bin of an epoch. Bins follow from (seed, epoch) and the lengths alone, so
    they are the same, in the same steps, on any number of ranks that train on as many bins a step. The
    last step of an epoch may have fewer bins, and one epoch a step more than another.

    lengths: (N,) tokens of each row, at most `capacity`, the tokens of a bin.
    bins_per_step: over all ranks. shuffle, max_steps: as for `StepSampler`.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        capacity: int,
        bins_per_step: int,
        seed: int = 42,
        shuffle: bool = True,
        epochs: float = 1,
        max_steps: int = -1,
    ):
        self.lengths, self.capacity, self.bins_per_step = lengths, capacity, bins_per_step
        self.order = StepSampler(len(lengths), bins_per_step, seed, shuffle, epochs, max_steps)
        self.num_rows, self.seed, self.shuffle = len(lengths), seed, shuffle
        self.position = 0  # the next step
        self._bins = lru_cache(maxsize=2)(self._make_bins)  # two, as a loader reads ahead
        self._starts = [0]  # the first step of each epoch, as far as they are known
        self._counting = Lock()  # loaders ask from several threads
        self.total_steps = max_steps if max_steps > 0 else self._steps_of(epochs)

    def __len__(self) -> int:
        return self.total_steps

    def epoch(self, step: int) -> int:
        while self._starts[-1] <= step:
            self._start(len(self._starts))
        return bisect_right(self._starts, step) - 1

    def bins(self, step: int) -> list[list[int]]:
        """Lists of row ids of any step, from 0."""
        epoch = self.epoch(step)
        first = (step - self._start(epoch)) * self.bins_per_step
        return self._bins(epoch)[first : first + self.bins_per_step]

    def rows(self, step: int) -> list[int]:
        """Row ids of any step, from 0."""
        return [row for bin in self.bins(step) for row in bin]

    def _steps_of(self, epochs: float) -> int:
        """Steps of so many epochs: of the last one, as large a part."""
        whole, part = divmod(epochs, 1)
        first = self._start(int(whole))
        if not part:
            return first
        return first + part_of(part, self._start(int(whole) + 1) - first)

    def _start(self, epoch: int) -> int:
        """The first step of an epoch; those before it are packed to know it."""
        with self._counting:
            while len(self._starts) <= epoch:
                bins = len(self._bins(len(self._starts) - 1))
                self._starts.append(self._starts[-1] + -(-bins // self.bins_per_step))
        return self._starts[epoch]

    def _make_bins(self, epoch: int) -> list[list[int]]:
        return full_bins(self.lengths, self.order.order(epoch), self.capacity, [self.seed, epoch])

    def state_dict(self) -> dict:
        """The position, and what must be equal for it to mean the same; no world size."""
        return {name: getattr(self, name) for name in ("position", *_SAME_BINS)}

    def load_state_dict(self, state: dict) -> None:
        check_same(state, self, _SAME_BINS)
        self.position = state["position"]


_SAME_ROWS = {
    "num_rows": "--dataset (rows)",
    "rows_per_step": "--global_batch_size",
    "seed": "--seed",
    "shuffle": "shuffle",
}
_SAME_BINS = {
    "num_rows": "--dataset (rows)",
    "bins_per_step": "the number of bins per step",
    "capacity": "--context_length",
    "seed": "--seed",
    "shuffle": "shuffle",
}


def check_same(state: dict, sampler, names: dict[str, str]):
    """Raise ValueError, with the flag, for the first of `names` that a checkpoint has otherwise."""
    for name, flag in names.items():
        if state.get(name) != getattr(sampler, name):
            raise ValueError(
                f"resume: {flag} was {state.get(name)} in the checkpoint and is "
                f"{getattr(sampler, name)} now, which would repeat or skip rows; use the old value, or "
                "start a new run"
            )


def step_sampler(dataset, per_step: int, unit: str = "row", **order) -> StepSampler | BinSampler:
    """The sampler of a tokenized dataset for steps of so many rows or bins; `order` as they take it."""
    if unit == "row":
        return StepSampler(len(dataset), per_step, **order)
    return BinSampler(dataset.lengths, dataset.report.context_length, per_step, **order)


def total_steps(num_rows: int, rows_per_step: int, epochs: float = 1, max_steps: int = -1) -> int:
    """Steps of a whole run; of a part of an epoch as many as begin in it."""
    return max_steps if max_steps > 0 else part_of(epochs, -(-num_rows // rows_per_step))


def part_of(epochs: float, steps: int) -> int:
    """Steps of so many epochs of `steps` each, the last one begun; 0.1 of 30 is 3."""
    return math.ceil(round(epochs * steps, 6))


def rank_share(
    rows: Sequence,
    rank: int,
    world_size: int,
    micro_batch_size: int,
    lengths: Sequence[int] | None = None,
) -> list[list]:
    """The micro-batches of `rank` in a step: the same number on every rank.

    Rows (or bins of packed rows) are spread evenly, so micro-batches may hold fewer than
    `micro_batch_size`, and some none: those ranks run a filler to join the collectives.

    lengths: tokens of each of `rows`. Then micro-batches that run at the same time hold rows of
        similar length, which means little padding and little waiting; the longest come first, so
        that a step which does not fit fails at once.
    """
    if lengths is not None:
        order = np.argsort(-np.asarray(lengths), kind="stable")
        rows = [rows[index] for index in order]
    num_micro_batches = -(-len(rows) // (world_size * micro_batch_size))
    num_shares = num_micro_batches * world_size
    return [
        _share(rows, _share_number(number, rank, world_size), num_shares)
        for number in range(num_micro_batches)
    ]


def _share(rows: Sequence, number: int, num_shares: int) -> list:
    """Part `number` of `rows` cut into `num_shares` parts whose sizes differ by at most one."""
    size, larger = divmod(len(rows), num_shares)
    start = number * size + min(number, larger)
    return list(rows[start : start + size + (number < larger)])


def _share_number(micro_batch: int, rank: int, world_size: int) -> int:
    """Ranks take turns at the longer end, so none has more work over the whole step."""
    turn = rank if micro_batch % 2 == 0 else world_size - 1 - rank
    return micro_batch * world_size + turn
