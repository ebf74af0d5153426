"""Which records of a stream each step trains on: read, shuffled and shared out a window at a time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, pairwise

from .dataset import groups
from .marked_tokens import Encoded
from .packing import window_bins
from .records import Source
from .sampler import check_same

RawRow = tuple[int, str, dict | bytes]  # place in the epoch, place in the files, record
ReadRow = tuple[int, str, Encoded]

# Records that bins are filled from at a time, with the rows left from those before.
BIN_WINDOW = 1024


@dataclass
class Window:
    """Records of all ranks that are read together: those of a step, or those that fill bins."""

    index: int  # in its epoch
    epoch: int
    is_last: bool  # of its epoch
    rows: list[RawRow]


@dataclass
class Part:
    """What ranks make of the records of a window: the rows that are kept."""

    index: int
    epoch: int
    is_last: bool
    rows: list[ReadRow]


class StreamSampler:
    """Which records each optimizer step trains on, in the order of a shuffled stream.

    Every record is in exactly one step of an epoch; the last step of an epoch may be short.

    shuffle_buffer: records among which the next is drawn; 1 keeps the order of the source.
    max_steps: stop after so many steps, in as many epochs as that takes; -1 follows `epochs`.
    """

    same = {
        "seed": "--seed",
        "rows_per_step": "--global_batch_size",
        "shuffle_buffer": "--shuffle_buffer",
    }

    def __init__(
        self,
        source: Source,
        rows_per_step: int,
        *,
        seed: int = 42,
        shuffle_buffer: int = 5000,
        epochs: float = 1,  # whole, unless max_steps ends it
        max_steps: int = -1,
    ):
        if shuffle_buffer < 1:
            raise ValueError(f"--shuffle_buffer {shuffle_buffer}: give at least 1 row")
        self.source, self.rows_per_step, self.window_size = source, rows_per_step, rows_per_step
        self.seed, self.shuffle_buffer = seed, shuffle_buffer
        self.epochs, self.max_steps = epochs, max_steps
        self.go_to(0, 0, 0, 0, [])

    @property
    def total_steps(self) -> int | None:
        """Steps of the run; None where only the end of the stream will tell."""
        return self.max_steps if self.max_steps > 0 else None

    def go_to(self, position: int, epoch: int, window: int, window_start: int, carried: list[int]):
        """Step `position` is the next one.

        It is of `window` or a later one; the first step of that window is `window_start`, and rows at
        the places `carried` in the epoch were left for it.
        """
        self.position, self.epoch, self.window = position, epoch, window
        self.window_start, self.carried = window_start, carried

    def windows(self) -> Iterator[Window]:
        """Windows from the next step's on; the records before it are read again, but not parsed."""
        at = self.epoch, self.window, set(self.carried)  # this runs ahead of the steps
        for epoch in count(at[0]) if self.max_steps > 0 else range(at[0], int(self.epochs)):
            yield from self._windows(epoch, *at[1:] if epoch == at[0] else (0, set()))

    def _windows(self, epoch: int, first: int, carried: set[int]) -> Iterator[Window]:
        left: list[RawRow] = []
        records = groups(
            ((place, *row) for place, row in enumerate(self._order(epoch))), self.window_size
        )
        rows = None
        for index, (rows, following) in enumerate(pairwise(chain(records, [None]))):
            if index < first:
                left += [row for row in rows if row[0] in carried]
                continue
            yield Window(index, epoch, following is None, left + rows)
            left = []
        if rows is None:
            raise ValueError("--dataset: no row to train on")

    def _order(self, epoch: int) -> Iterator[tuple[str, dict | bytes]]:
        rng = random.Random(f"{self.seed}, {epoch}")
        return shuffled(self.source.raw_records(), self.shuffle_buffer, rng)

    def steps_of(self, part: Part, lengths: Sequence[int]) -> tuple[list[list], list[int]]:
        """Steps of the rows of a window, by their numbers in it, and rows left for the next window."""
        return [list(range(len(lengths)))], []

    def state_dict(self) -> dict:
        """The position, and what must be equal for it to mean the same; no world size."""
        return {name: getattr(self, name) for name in (*PLACE, *self.same)}

    def load_state_dict(self, state: dict) -> None:
        check_same(state, self, self.same)
        if missing := set(PLACE) - state.keys():
            raise ValueError(
                "resume: an earlier version wrote the checkpoint's stream position, without "
                f"{min(missing)}; start a new run"
            )
        self.go_to(*(state[name] for name in PLACE))


PLACE = ("position", "epoch", "window", "window_start", "carried")


class StreamBinSampler(StreamSampler):
    """Which records are in which bin of each optimizer step, in the order of a shuffled stream.

    Bins are filled from a window of records at a time. The emptiest, and those beyond whole steps, are
    not trained on: their rows are left for the next window, so only the end of an epoch is underfilled.
    Every row is in exactly one bin of an epoch; the last step of an epoch may have fewer bins.

    capacity: tokens of a bin, --context_length. bins_per_step: over all ranks.
    """

    same = {
        "seed": "--seed",
        "bins_per_step": "bins per step",
        "capacity": "--context_length",
        "shuffle_buffer": "--shuffle_buffer",
    }

    def __init__(self, source: Source, capacity: int, bins_per_step: int, **order):
        super().__init__(source, BIN_WINDOW, **order)
        self.capacity, self.bins_per_step = capacity, bins_per_step

    def steps_of(self, part: Part, lengths: Sequence[int]) -> tuple[list[list], list[int]]:
        """Steps as lists of bins, of numbers of rows."""
        if not part.is_last and sum(lengths) <= self.capacity * self.bins_per_step:
            return [], list(range(len(lengths)))  # not yet a step of full bins
        bins = window_bins(lengths, self.capacity, [self.seed, part.epoch, part.index])
        full_steps = (len(bins) - 1) // self.bins_per_step
        trained = len(bins) if part.is_last else full_steps * self.bins_per_step
        return (
            list(groups(bins[:trained], self.bins_per_step)),
            sorted(row for bin in bins[trained:] for row in bin),
        )


def shuffled(items: Iterable, size: int, rng: random.Random) -> Iterator:
    """Each item once, drawn from a buffer of `size` that the next item then refills."""
    items = iter(items)
    buffer = list(islice(items, size))
    for item in items:
        place = rng.randrange(size)
        yield buffer[place]
        buffer[place] = item
    rng.shuffle(buffer)
    yield from buffer
