"""Optimizer steps as ready batches for one rank, prepared ahead in a thread.

Slicing arrays and padding takes well under a millisecond a row and mostly runs in C, so a thread is
enough: no worker processes, nothing to pickle, nothing left behind when a run is interrupted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from .collate import (
    FILLER_TOKENS,
    IGNORE,
    Example,
    PadTo,
    collate,
    few_widths,
    filler,
    padded_length,
)
from .packing import balanced, collate_packed, pack
from .sampler import BinSampler, StepSampler, rank_share
from .tokenized import TokenizedDataset


@dataclass
class Step:
    """What one rank computes in one optimizer step."""

    index: int
    epoch: int
    micro_batches: list[dict]  # this rank's; as many on every rank
    num_rows: int  # of all ranks
    num_tokens: int  # of all ranks, without padding
    num_trained_tokens: int  # of all ranks: what the sum of losses is divided by
    num_trained_tokens_local: int  # of this rank
    row_ids: Sequence = ()  # of all ranks: places in the data set, or in the files of a stream
    mean_weight: float = 1.0  # of its trained tokens, which its rows' weights are divided by
    micro_batch_tokens: Sequence[int] = ()  # of each of this rank's micro-batches, without padding


@dataclass(frozen=True)
class Layout:
    """The shape of a micro-batch: what is computed, and how much of it is rows'."""

    num_rows: int  # or bins
    width: int
    tokens: int  # of rows
    squares: (
        int  # of the lengths that attention takes: padded rows, or packed ones and what fills a bin
    )

    @property
    def places(self) -> int:
        return self.num_rows * self.width


class StepLoader:
    """Iterates `Step`s from the sampler's position to its end.

    Every rank knows all lengths, so `Step` gives the trained tokens of all ranks without a
    collective. Trained tokens are those left after the shift, labels[:, 1:] != -100.

    sampler: gives the rows of each step, or the bins (`BinSampler`).
    micro_batch_size: rows of a micro-batch at most; bins, if packing.
    packing: put rows of the same step together in bins of the context length; the sampler's, or as few
        as its rows need, which changes the layout and not the gradient. Batches come from
        `collate_packed`, which attention must be told about.
    pad_to_multiple_of, pad_to: as in `collate`.
    num_workers: steps prepared ahead, each in a thread; 0 prepares a step when it is asked for.
    pin_memory: for asynchronous copies to a GPU.
    mark_tokens: as in `Collation`.
    """

    def __init__(
        self,
        dataset: TokenizedDataset,
        sampler: StepSampler | BinSampler,
        rank: int = 0,
        world_size: int = 1,
        micro_batch_size: int = 1,
        *,
        pad_token_id: int,
        packing: bool = False,
        pad_to_multiple_of: int = 1,
        pad_to: PadTo = None,
        num_workers: int = 2,
        pin_memory: bool = False,
        mark_tokens: bool = False,
    ):
        if micro_batch_size < 1:
            raise ValueError(f"--batch_size {micro_batch_size}: give at least 1 row")
        assert len(dataset) == sampler.num_rows, "the sampler was made for another dataset"
        assert packing or isinstance(sampler, StepSampler), "bins are for packing"
        self.dataset, self.sampler = dataset, sampler
        self.rank, self.world_size, self.micro_batch_size = rank, world_size, micro_batch_size
        self.packing, self.num_workers = packing, num_workers
        self.collation = Collation(
            micro_batch_size,
            pad_token_id,
            packing,
            pad_to_multiple_of,
            pad_to,
            longest=None if pad_to is None else int(dataset.lengths.max(initial=1)),
            pin_memory=pin_memory,
            mark_tokens=mark_tokens,
        )

    def __len__(self) -> int:
        return self.sampler.total_steps - self.sampler.position

    def __iter__(self) -> Iterator[Step]:
        for step in self._steps(range(self.sampler.position, self.sampler.total_steps)):
            self.sampler.position = step.index + 1  # a checkpoint in the step counts it as done
            yield step

    def _steps(self, indices: range) -> Iterator[Step]:
        if not self.num_workers:
            yield from map(self.step, indices)
            return
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="step-loader")
        remaining, ahead = iter(indices), deque()
        try:
            for index in remaining:
                ahead.append(pool.submit(self.step, index))
                if len(ahead) > self.num_workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:  # also when the training loop stops early
            pool.shutdown(wait=True, cancel_futures=True)

    def step(self, index: int) -> Step:
        """Any step, without moving the sampler."""
        rows = self.sampler.rows(index)
        weights, mean_weight = self.dataset.weights, 1.0
        if weights is not None:
            weights, mean_weight = relative_weights(weights, self.dataset.trained_counts, rows)
        shares = self._shares(index)
        micro_batches = [
            self.collation.batch(share, self.dataset.__getitem__, weights) for share in shares
        ]
        return Step(
            index,
            self.sampler.epoch(index),
            micro_batches,
            len(rows),
            int(self.dataset.lengths[rows].sum()),
            int(self.dataset.trained_counts[rows].sum()),
            sum(num_trained_tokens(batch) for batch in micro_batches),
            rows,
            mean_weight,
            [self.collation.tokens(share, self.dataset.lengths) for share in shares],
        )

    def padded_shapes(self, num_steps: int = 200) -> list[tuple[int, int]]:
        """(B, T) of this rank's padded micro-batches in its next steps, the most frequent first.

        Those that occur once are left out.
        """
        first, counts = self.sampler.position, Counter()
        for index in range(first, min(first + num_steps, self.sampler.total_steps)):
            counts.update(
                (layout.num_rows, layout.width) for layout in self.layouts(index) if layout.tokens
            )
        return [shape for shape, count in counts.most_common() if count > 1]

    def layouts(self, index: int) -> list[Layout]:
        """The shape of each micro-batch of any step, from the lengths alone."""
        return [self._layout(units) for units in self._shares(index)]

    def _layout(self, units: list) -> Layout:
        lengths = [np.atleast_1d(self.dataset.lengths[unit]) for unit in units]
        used = [int(rows.sum()) for rows in lengths]
        width = self.collation.width(max(used, default=FILLER_TOKENS))
        count = max(len(units), self.collation.num_bins)
        squares = count * width**2
        if self.packing:
            empty = [width] * (count - len(units)) + [width - tokens for tokens in used]
            squares = sum(int((rows**2).sum()) for rows in lengths) + sum(map(self._squares, empty))
        return Layout(count, width, sum(used), max(squares, 1))

    def _squares(self, places: int) -> int:
        """Of the rows that the padding of a bin is cut into."""
        longest = self.collation.longest or max(places, 1)
        whole, rest = divmod(places, longest)
        return whole * longest**2 + rest**2

    def filled_share(self, num_steps: int = 100) -> float:
        """Share of this rank's tokens that are the rows' own, not padding, in its first steps."""
        own = computed = 0
        for index in range(min(num_steps, self.sampler.total_steps)):
            for units in self._shares(index):
                lengths = [int(self.dataset.lengths[unit].sum()) for unit in units]
                own += sum(lengths)
                computed += len(lengths) * max(lengths, default=0)
        return own / max(computed, 1)

    def bin_fill(self, num_steps: int = 100) -> float:
        """Share of the places of this rank's bins that hold a token, in its first steps."""
        bins = [
            bin
            for index in range(min(num_steps, self.sampler.total_steps))
            for units in self._shares(index)
            for bin in units
        ]
        own = sum(int(self.dataset.lengths[bin].sum()) for bin in bins)
        return own / max(len(bins) * self.dataset.report.context_length, 1)

    def _shares(self, index: int) -> list[list]:
        """This rank's micro-batches: lists of row ids, or of bins of row ids."""
        if isinstance(self.sampler, BinSampler):
            bins = self.sampler.bins(index)
            return share_bins(
                bins, self.dataset.lengths, self.rank, self.world_size, self.micro_batch_size
            )
        rows = self.sampler.rows(index)
        capacity = self.dataset.report.context_length if self.packing else None
        return share_out(
            rows,
            self.dataset.lengths[rows],
            self.rank,
            self.world_size,
            self.micro_batch_size,
            capacity,
            seed=index,
        )


def share_out(
    rows: Sequence,
    lengths: Sequence[int],
    rank: int,
    world_size: int,
    micro_batch_size: int,
    capacity: int | None = None,
    seed: int = 0,
) -> list[list]:
    """This rank's micro-batches of a step's rows, as many as the other ranks have.

    capacity: tokens of a bin; then micro-batches are of lists of rows, packed together, and what ranks
        compute beside each other holds nearly the same number of tokens.
    """
    if capacity is not None:
        bins = pack(lengths, capacity, seed)
        parts = world_size * -(-len(bins) // (world_size * micro_batch_size))
        bins = balanced(lengths, bins, capacity, parts)
        rows, lengths = (
            [[rows[i] for i in bin] for bin in bins],
            [sum(lengths[i] for i in bin) for bin in bins],
        )
    return rank_share(rows, rank, world_size, micro_batch_size, lengths)


def share_bins(
    bins: list[list[int]], lengths: np.ndarray, rank: int, world_size: int, micro_batch_size: int
) -> list[list]:
    """This rank's micro-batches of a step's full bins, as many as the other ranks have.

    Bins hold as many tokens and differ in what attention within rows takes, the sum of squares of their
    `lengths`: those that ranks compute beside each other are alike in it.
    """
    work = [int((lengths[bin].astype(np.int64) ** 2).sum()) for bin in bins]
    return rank_share(bins, rank, world_size, micro_batch_size, work)


@dataclass(frozen=True)
class Collation:
    """How micro-batches are made of rows.

    pad_to_multiple_of, pad_to, longest: as in `collate` and `collate_packed`.
    pin_memory: for asynchronous copies to a GPU.
    mark_tokens: add real_tokens (B, T) fp32, which are 1 at rows' tokens and 0 at padding and fillers.
    """

    micro_batch_size: int
    pad_token_id: int
    packing: bool = False
    pad_to_multiple_of: int = 1
    pad_to: PadTo = None
    longest: int | None = None
    pin_memory: bool = False
    mark_tokens: bool = False

    @property
    def num_bins(self) -> int:
        """Bins of a micro-batch at least.

        Of one width, as compiled code wants it, the last step's batches get the others' shape too.
        """
        return self.micro_batch_size if self.packing and isinstance(self.pad_to, int) else 1

    def width(self, longest: int) -> int:
        """T of a micro-batch whose longest row, or fullest bin, has so many tokens."""
        return padded_length(longest, self.pad_to_multiple_of, self.pad_to)

    def tokens(self, share: list, lengths: np.ndarray) -> int:
        """Tokens of a micro-batch of `share_out`, without padding."""
        rows = [row for bin in share for row in bin] if self.packing else share
        return sum(int(lengths[row]) for row in rows)

    def batch(
        self,
        share: list,
        example: Callable[[object], Example],
        weights: dict[int, float] | None = None,
    ) -> dict:
        """A micro-batch of `share_out`, of what `example` makes of a row; a filler if it has no row.

        weights: of the step's rows, as `relative_weights` gives them; None where all are alike.
        """
        padding = dict(
            pad_token_id=self.pad_token_id,
            pad_to_multiple_of=self.pad_to_multiple_of,
            pad_to=self.pad_to,
        )
        nothing = filler(self.pad_token_id)
        if self.packing:
            bins = [[example(row) for row in bin] for bin in share]
            filled = [sum(len(ids) for ids, _ in bin) for bin in bins]
            bins = bins or [[nothing]]
            bins += [[]] * (self.num_bins - len(bins))
            of_bins = None if weights is None else [[weights[row] for row in bin] for bin in share]
            batch = collate_packed(bins, **padding, longest=self.longest, weights=of_bins)
        else:
            rows = [example(row) for row in share]
            filled = [len(ids) for ids, _ in rows]
            of_rows = None if weights is None else [weights[row] for row in share]
            batch = collate(rows or [nothing], **padding, weights=of_rows)
        if self.mark_tokens:
            batch["real_tokens"] = torch.zeros(batch["input_ids"].shape)
            for places, count in zip(batch["real_tokens"], filled, strict=False):
                places[:count] = 1
        return pin(batch) if self.pin_memory else batch


def relative_weights(
    weights: np.ndarray, trained_counts: np.ndarray, rows: Sequence[int]
) -> tuple[dict[int, float], float]:
    """Weights of a step's rows over the mean weight of its trained tokens, and that mean.

    With these, the sum of weighted losses over the number of trained tokens is the weighted mean.
    """
    given, counts = weights[rows].astype(np.float64), trained_counts[rows]
    mean = float((given * counts).sum() / counts.sum())
    return dict(zip(rows, (given / mean).tolist(), strict=True)), mean


def run_widths(context_length: int, compiled: bool, one: bool) -> PadTo:
    """T of a run's batches: as their rows are, but few or `one` where blocks are compiled for them."""
    if not compiled:
        return None
    return context_length if one else few_widths(context_length)


def num_trained_tokens(batch: dict) -> int:
    """Tokens whose prediction enters the loss: labels after the shift."""
    return int((batch["labels"][:, 1:] != IGNORE).sum())


def pin(batch: dict) -> dict:
    return {
        name: value.pin_memory() if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }


def on_device(batch: dict, device: torch.device) -> dict:
    """A batch as the model takes it: tensors on `device`, numbers, and nothing that is None."""
    return {
        k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v
        for k, v in batch.items()
        if v is not None
    }
