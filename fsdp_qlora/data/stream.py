"""Training on more rows than memory or disk should hold tokenised: rows are read as they are needed.

Every rank reads the same records in the same shuffled order, which costs little, and parses and
tokenises only its own, in a thread. The rows of a step are then the same on 1 GPU or on 64, a run
resumes from a number on any number of ranks, and memory holds one buffer of unread records.

Once per step the ranks give each other, through `gather`, what they made of their records: the tokens,
5 bytes each, or that a row is broken, or that their stream is at its end. So each knows all rows of
the step, as with `StepLoader`, and they share them out alike: as many micro-batches on every rank, and
packed bins that hold nearly the same number of tokens.
"""
from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, islice
from operator import itemgetter

from .collate import Example, PadTo
from .dataset import as_example, check_vocab_size, cut_and_count, groups
from .loader import Step, collated, num_trained_tokens, share_out
from .masking import Encoded, encode_rows
from .records import Source, parse_row
from .report import DataReport
from .templates import ChatTemplate

RawRow = tuple[str, dict | bytes]  # place and record, as Source.raw_records gives them


@dataclass
class RawStep:
    """The records of one optimizer step, of all ranks."""

    index: int
    epoch: int
    rows: list[RawRow]


@dataclass
class Part:
    """What one rank makes of its records of a step: the rows that are kept, by their place in it."""

    index: int
    epoch: int
    rows: list[tuple[int, Encoded]]


class StreamSampler:
    """Which records each optimizer step trains on, in the order of a shuffled stream.

    Every record is in exactly one step of an epoch; the last step of an epoch may be short.

    shuffle_buffer: records among which the next is drawn; 1 keeps the order of the source.
    max_steps: stop after so many steps, in as many epochs as that takes; -1 follows `epochs`.
    """

    def __init__(self, source: Source, rows_per_step: int, *, seed: int = 42,
                 shuffle_buffer: int = 5000, epochs: int = 1, max_steps: int = -1):
        if shuffle_buffer < 1:
            raise ValueError(f"--shuffle_buffer {shuffle_buffer}: give at least 1 row")
        self.source, self.rows_per_step = source, rows_per_step
        self.seed, self.shuffle_buffer = seed, shuffle_buffer
        self.epochs, self.max_steps = epochs, max_steps
        self.position = self.epoch = self.epoch_start = 0  # the next step, its epoch and its first

    @property
    def total_steps(self) -> int | None:
        """Steps of the run; None where only the end of the stream will tell."""
        return self.max_steps if self.max_steps > 0 else None

    def steps(self) -> Iterator[RawStep]:
        """Steps from the position on; the records before it are read again, but not parsed."""
        index = self.epoch_start
        for epoch in count(self.epoch) if self.max_steps > 0 else range(self.epoch, self.epochs):
            first = index
            for rows in groups(self._order(epoch), self.rows_per_step):
                if index >= self.position: yield RawStep(index, epoch, rows)
                index += 1
                if index == self.max_steps: return
            if index == first: raise ValueError("--dataset: no row to train on")

    def _order(self, epoch: int) -> Iterator[RawRow]:
        rng = random.Random(f"{self.seed}, {epoch}")
        return shuffled(self.source.raw_records(), self.shuffle_buffer, rng)

    def advance(self, index: int, epoch: int) -> None:
        """Step `index`, of `epoch`, is done."""
        if epoch != self.epoch: self.epoch, self.epoch_start = epoch, index
        self.position = index + 1

    def state_dict(self) -> dict:
        """The position, and what must be equal for it to mean the same; no world size."""
        return {name: getattr(self, name) for name in (*PLACE, *SAME)}

    def load_state_dict(self, state: dict) -> None:
        for name, flag in SAME.items():
            if state[name] != getattr(self, name):
                raise ValueError(f"resume: {flag} was {state[name]} in the checkpoint and is "
                                 f"{getattr(self, name)} now, so rows would be repeated or left "
                                 "out; use the old value, or start a new run")
        for name in PLACE: setattr(self, name, state[name])


PLACE = ("position", "epoch", "epoch_start")
SAME = {"seed": "--seed", "rows_per_step": "--global_batch_size",
        "shuffle_buffer": "--shuffle_buffer"}


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


class StreamLoader:
    """Iterates `Step`s as `StepLoader` does, from a stream.

    gather: a value of this rank -> the values of all ranks, in their order; called once per step on
        the thread that iterates. The default is a world of one.
    context_length, train_on: as in `tokenize_rows`. Rows that are dropped leave their step smaller.
    vocab_size: rows of the model's embedding; a token beyond it is an error.
    steps_ahead: steps prepared while another is trained on.
    Raises ValueError on every rank if a record of any of them is broken, or if no row is left.
    """

    def __init__(self, sampler: StreamSampler, tokenizer, rank: int = 0, world_size: int = 1,
                 micro_batch_size: int = 1, *, context_length: int, pad_token_id: int,
                 train_on: str = "completion", vocab_size: int | None = None,
                 packing: bool = False, pad_to_multiple_of: int = 1, pad_to: PadTo = None,
                 gather: Callable[[object], list] = lambda value: [value], steps_ahead: int = 4,
                 pin_memory: bool = False):
        self.sampler, self.rank, self.world_size = sampler, rank, world_size
        self.micro_batch_size, self.packing, self.vocab_size = micro_batch_size, packing, vocab_size
        self.padding = {"pad_token_id": pad_token_id, "pad_to_multiple_of": pad_to_multiple_of,
                        "pad_to": pad_to}
        self.gather, self.steps_ahead, self.pin_memory = gather, steps_ahead, pin_memory
        self.chat = ChatTemplate(deepcopy(tokenizer))  # its thread's own
        self.report = DataReport(context_length, train_on)  # of this rank's rows, each once
        self.counted_epoch, self.counted_steps = None, 0

    def __iter__(self) -> Iterator[Step]:
        started_at, rows_so_far = self.sampler.position, 0
        with closing(ahead(map(self._tokenize, self.sampler.steps()), self.steps_ahead)) as steps:
            while (step := self._agree(steps)) is not None:
                rows_so_far += step.num_rows
                if step.epoch and not started_at: self._check_any(rows_so_far)
                self.sampler.advance(step.index, step.epoch)
                if step.num_rows: yield step
        if not started_at: self._check_any(rows_so_far)

    def full_report(self) -> DataReport:
        """What all ranks have read so far, later epochs left out; every rank must call it."""
        total = DataReport(self.report.context_length, self.report.train_on)
        for values in self.gather(self.report.to_dict()): total.add(DataReport.from_dict(values))
        return total

    # ---- in the thread ----

    def _tokenize(self, step: RawStep) -> tuple[Part, DataReport, list[str]]:
        """The part of `step` that is this rank's, for rows are dealt in turn; the places of all rows."""
        report = DataReport(self.report.context_length, self.report.train_on)
        first = (self.rank - step.index * self.sampler.rows_per_step) % self.world_size
        places = range(first, len(step.rows), self.world_size)
        rows = [parse_row(step.rows[place][1], step.rows[place][0]) for place in places]
        encoded = zip(places, rows, encode_rows(rows, self.chat, report.train_on), strict=True)
        kept = [(place, row) for place, given, item in encoded
                if (row := cut_and_count(item, given.source, report)) is not None]
        largest = max((int(row.input_ids.max()) for _, row in kept), default=-1)
        if self.vocab_size is not None: check_vocab_size(largest, self.vocab_size)
        return Part(step.index, step.epoch, kept), report, [place for place, _ in step.rows]

    # ---- with the other ranks ----

    def _agree(self, steps: Iterator[tuple[Part, DataReport, list[str]]]) -> Step | None:
        """This rank's share of the next step; None where the streams of all are at their end."""
        told, row_ids, error = None, [], None
        try:
            if (item := next(steps, None)) is not None:
                told, report, row_ids = item
                self._count(told, report)
        except Exception as caught:  # noqa: BLE001  the others would wait for this rank
            error, told = caught, one_line(caught)
        everyone = self.gather(told)
        if faults := [state for state in everyone if isinstance(state, str)]:
            raise ValueError(faults[0]) from error
        parts = [state for state in everyone if state is not None]
        return self._share_of(parts, row_ids) if parts else None

    def _share_of(self, parts: list[Part], row_ids: list[str]) -> Step:
        """What this rank computes of a step that the ranks have read in parts."""
        rows = [row for _, row in sorted((pair for part in parts for pair in part.rows),
                                         key=itemgetter(0))]
        lengths = [len(row.input_ids) for row in rows]
        shares = share_out(rows, lengths, self.rank, self.world_size, self.micro_batch_size,
                           self.report.context_length if self.packing else None, parts[0].index)
        micro_batches = [collated(share, example_of, self.packing, self.padding, self.pin_memory)
                         for share in shares]
        return Step(parts[0].index, parts[0].epoch, micro_batches, len(rows), sum(lengths),
                    sum(int(row.trained.sum()) for row in rows),
                    sum(map(num_trained_tokens, micro_batches)), row_ids)

    def _count(self, step: Part, report: DataReport):
        """Take a step into the report, unless its rows were in it: an epoch or a rollback ago."""
        if self.counted_epoch is None: self.counted_epoch = step.epoch
        if step.epoch != self.counted_epoch or step.index < self.counted_steps: return
        self.report.add(report)
        self.counted_steps = step.index + 1

    def _check_any(self, rows: int) -> None:
        if not rows:
            raise ValueError("--dataset: no row is left to train on "
                             f"({self.full_report().format_dropped()}); give rows with an answer within "
                             "--context_length")


def ahead(items: Iterator, depth: int) -> Iterator:
    """The items, up to `depth` of them computed ahead in a thread."""
    pool, items = ThreadPoolExecutor(1, thread_name_prefix="stream"), iter(items)
    end = object()
    waiting = deque(pool.submit(next, items, end) for _ in range(depth))
    try:
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def one_line(error: Exception) -> str:
    """An error as the other ranks will raise it."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def example_of(row: Encoded) -> Example:
    """A row as a batch takes it."""
    return as_example(row.input_ids, row.trained)
