"""Training on more rows than memory or disk should hold tokenised: rows are read as they are needed.

Every rank reads the same records in the same shuffled order, which costs little, and parses and
tokenises only its own, in a thread. The rows of a step are then the same on 1 GPU or on 64, a run
resumes from a number on any number of ranks, and memory holds one buffer of unread records.

Records are read a window at a time: those of a step, or those that full bins are filled from. For each
window the ranks give each other, through `gather`, what they made of their records: the tokens, 5 bytes
each, or that a row is broken, or that their stream is at its end. So each knows all rows of the step, as
with `StepLoader`, and they share them out alike: as many micro-batches on every rank, and packed bins
that hold nearly the same number of tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy
from operator import itemgetter

import numpy as np

from .collate import Example, PadTo
from .dataset import cut_and_count
from .loader import Collation, Step, num_trained_tokens, relative_weights, share_bins, share_out
from .marked_tokens import Encoded
from .masking import encode_rows
from .report import DataReport
from .stream_sampler import Part, ReadRow, StreamBinSampler, StreamSampler, Window
from .templates import ChatTemplate
from .tokenized import as_example, check_vocab_size


class StreamLoader:
    """Iterates `Step`s as `StepLoader` does, from a stream.

    gather: a value of this rank -> the values of all ranks, in their order; called once per window
        on the thread that iterates. The default is a world of one.
    context_length, train_on: as in `tokenize_rows`. Rows that are dropped leave their step smaller.
    vocab_size: rows of the model's embedding; a token beyond it is an error.
    windows_ahead: windows of records, steps without bins, that are read while another is trained on.
    Raises ValueError on every rank if a record of any of them is broken, or if no row is left.
    """

    def __init__(
        self,
        sampler: StreamSampler,
        tokenizer,
        rank: int = 0,
        world_size: int = 1,
        micro_batch_size: int = 1,
        *,
        context_length: int,
        pad_token_id: int,
        train_on: str = "completion",
        vocab_size: int | None = None,
        packing: bool = False,
        pad_to_multiple_of: int = 1,
        pad_to: PadTo = None,
        gather: Callable[[object], list] = lambda value: [value],
        windows_ahead: int = 4,
        pin_memory: bool = False,
        mark_tokens: bool = False,
    ):
        self.sampler, self.rank, self.world_size = sampler, rank, world_size
        self.micro_batch_size, self.packing, self.vocab_size = micro_batch_size, packing, vocab_size
        self.gather, self.windows_ahead = gather, windows_ahead
        self.collation = Collation(
            micro_batch_size,
            pad_token_id,
            packing,
            pad_to_multiple_of,
            pad_to,
            pin_memory=pin_memory,
            mark_tokens=mark_tokens,
        )
        self.chat = ChatTemplate(deepcopy(tokenizer))  # its thread's own
        self.report = DataReport(context_length, train_on)  # of this rank's rows, each once
        self.counted_epoch, self.counted_windows = None, 0

    def __iter__(self) -> Iterator[Step]:
        started_at, rows_so_far, left = self.sampler.position, 0, []
        read = map(self._tokenize, self.sampler.windows())
        with closing(ahead(read, self.windows_ahead)) as parts:
            while not self._has_ended() and (part := self._agree(parts)) is not None:
                rows_so_far += len(part.rows)
                if part.epoch and not started_at:
                    self._check_any(rows_so_far)
                left = yield from self._steps(part, left)
        if not started_at:
            self._check_any(rows_so_far)

    def _has_ended(self) -> bool:
        return self.sampler.position == self.sampler.total_steps

    def full_report(self) -> DataReport:
        """What all ranks have read so far, later epochs left out; every rank must call it."""
        total = DataReport(self.report.context_length, self.report.train_on)
        for values in self.gather(self.report.to_dict()):
            total.add(DataReport.from_dict(values))
        return total

    # ---- in the thread ----

    def _tokenize(self, window: Window) -> tuple[Part, DataReport]:
        """The part of `window` that is this rank's, for rows are dealt in turn."""
        report = DataReport(self.report.context_length, self.report.train_on)
        dealt = [row for row in window.rows if row[0] % self.world_size == self.rank]
        rows = [self.sampler.source.row(record, name) for _, name, record in dealt]
        encoded = zip(dealt, rows, encode_rows(rows, self.chat, report.train_on), strict=True)
        kept = [
            (place, name, row)
            for (place, name, _), given, item in encoded
            if (row := cut_and_count(item, given.source, report)) is not None
        ]
        largest = max((int(row.input_ids.max()) for *_, row in kept), default=-1)
        if self.vocab_size is not None:
            check_vocab_size(largest, self.vocab_size)
        return Part(window.index, window.epoch, window.is_last, kept), report

    # ---- with the other ranks ----

    def _agree(self, parts: Iterator[tuple[Part, DataReport]]) -> Part | None:
        """All rows of the next window; None where the streams of all ranks are at their end."""
        told, error = None, None
        try:
            if (item := next(parts, None)) is not None:
                told, report = item
                self._count(told, report)
        except Exception as caught:  # noqa: BLE001  the others would wait for this rank
            error, told = caught, _one_line(caught)
        everyone = self.gather(told)
        if faults := [state for state in everyone if isinstance(state, str)]:
            raise ValueError(faults[0]) from error
        read = [state for state in everyone if state is not None]
        if not read:
            return None
        return Part(
            read[0].index,
            read[0].epoch,
            all(part.is_last for part in read),
            sorted((row for part in read for row in part.rows), key=itemgetter(0)),
        )

    def _steps(self, part: Part, left: list[ReadRow]) -> Generator[Step, None, list[ReadRow]]:
        """Steps of a window and the rows left from those before it; the rows that are left for the next.

        The first steps of a window were done before where the run has resumed in its middle.
        """
        sampler, rows = self.sampler, left + part.rows
        first = sampler.window_start
        carried = sampler.carried
        steps, numbers = sampler.steps_of(part, [len(row.input_ids) for *_, row in rows])
        left = [rows[number] for number in numbers]
        at_end = part.epoch, part.index + 1, first + len(steps), [place for place, *_ in left]
        if not steps:
            sampler.go_to(sampler.position, *at_end)
        for index, units in enumerate(steps, start=first):
            if index < sampler.position:
                continue
            done = index + 1 - first == len(steps)
            sampler.go_to(index + 1, *at_end if done else (part.epoch, part.index, first, carried))
            step = self._share_of(index, part.epoch, rows, units)
            if step.num_rows:
                yield step
            if self._has_ended():
                break
        return left

    def _share_of(self, index: int, epoch: int, rows: list[ReadRow], units: list) -> Step:
        """What this rank computes of a step: of the rows, or bins of rows, with these numbers."""
        encoded = [row for *_, row in rows]
        lengths = np.array([len(row.input_ids) for row in encoded])
        if isinstance(self.sampler, StreamBinSampler):
            numbers = [number for bin in units for number in bin]
            shares = share_bins(units, lengths, self.rank, self.world_size, self.micro_batch_size)
        else:
            numbers = units
            shares = share_out(
                units,
                lengths,
                self.rank,
                self.world_size,
                self.micro_batch_size,
                self.report.context_length if self.packing else None,
                index,
            )
        trained = np.array([int(row.trained.sum()) for row in encoded])
        weights, mean_weight = None, 1.0
        if self.sampler.source.weight_column is not None:
            given = np.array([row.weight for row in encoded])
            weights, mean_weight = relative_weights(given, trained, numbers)
        micro_batches = [
            self.collation.batch(share, lambda number: _example_of(encoded[number]), weights)
            for share in shares
        ]
        return Step(
            index,
            epoch,
            micro_batches,
            len(numbers),
            int(lengths[numbers].sum()),
            int(trained[numbers].sum()),
            sum(map(num_trained_tokens, micro_batches)),
            [rows[number][1] for number in numbers],
            mean_weight,
            [self.collation.tokens(share, lengths) for share in shares],
        )

    def _count(self, part: Part, report: DataReport):
        """Take a window into the report, unless its rows were in it: an epoch or a rollback ago."""
        if self.counted_epoch is None:
            self.counted_epoch = part.epoch
        if part.epoch != self.counted_epoch or part.index < self.counted_windows:
            return
        self.report.add(report)
        self.counted_windows = part.index + 1

    def _check_any(self, rows: int) -> None:
        if not rows:
            report = self.full_report()
            raise ValueError(
                f"--dataset: no row is left to train on ({report.format_dropped()}); "
                f"{report.format_remedy()}"
            )


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


def _one_line(error: Exception) -> str:
    """An error as the other ranks will raise it."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _example_of(row: Encoded) -> Example:
    """A row as a batch takes it."""
    return as_example(row.input_ids, row.trained)
