"""Several rows in one line of tokens, instead of padding.

Rows of a step are put into bins of the context length by best-fit decreasing: the longest row first,
each into the fullest bin that still takes it (at most 11/9 of the best number of bins,
https://en.wikipedia.org/wiki/Bin_packing_problem). Attention must then keep the rows apart; the
batch says how, in the names of transformers: positions restart, for masks, and `cu_seq_lens_q` has
the borders, for variable-length kernels (model/attention.py).

Shapes: B bins of the batch, T tokens of a bin, N rows of the batch, runs of padding included.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .collate import IGNORE, Example, PadTo, padded_length


def pack(lengths: Sequence[int], capacity: int, seed: int | list[int] = 0) -> list[list[int]]:
    """Bins of indices into `lengths`, each index once, each bin's lengths at most `capacity`.

    seed: order of rows of equal length, so that the same rows do not always meet.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if lengths.max(initial=0) > capacity:
        raise ValueError(
            f"packing: a row of {lengths.max()} tokens does not fit a bin of {capacity}; pack to "
            "the --context_length that rows were truncated to"
        )
    shuffled = np.random.default_rng(seed).permutation(len(lengths))
    longest_first = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    bins: list[list[int]] = []
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]  # free space -> numbers of bins
    spaces = 0  # bit f is set where open_bins[f] is not empty: finds the best fit in one step
    for index in longest_first.tolist():
        length = int(lengths[index])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            number = open_bins[space].pop()
            if not open_bins[space]:
                spaces &= ~(1 << space)
        else:
            space, number = capacity, len(bins)
            bins.append([])
        bins[number].append(index)
        open_bins[space - length].append(number)
        spaces |= 1 << (space - length)
    return bins


WINDOW = 16_384  # rows that bins are filled from at a time


def full_bins(
    lengths: np.ndarray, order: np.ndarray, capacity: int, seed: list[int]
) -> list[list[int]]:
    """Bins of all rows of an epoch, each of `order` once, in an order that is drawn from `seed`.

    Bins are filled from a window of rows at a time, so rows near each other in `order` are trained near
    each other. What is left over, the emptiest bin of a window, goes into the next.
    """
    found: list[list[int]] = []
    left = np.empty(0, dtype=np.int64)
    for number, start in enumerate(range(0, len(order), WINDOW)):
        rows = np.concatenate([left, order[start : start + WINDOW]])
        bins = [rows[bin] for bin in window_bins(lengths[rows], capacity, [*seed, number])]
        if start + WINDOW < len(order):
            left = bins.pop()
        found += [bin.tolist() for bin in bins]
    return found


def window_bins(lengths: Sequence[int], capacity: int, seed: list[int]) -> list[list[int]]:
    """`pack`'s bins in an order that is drawn from `seed`, but for the emptiest, which is the last."""
    lengths = np.asarray(lengths, dtype=np.int64)
    bins = pack(lengths, capacity, seed)
    if not bins:
        return bins
    emptiest = min(range(len(bins)), key=lambda i: int(lengths[bins[i]].sum()))
    last = bins.pop(emptiest)
    return [bins[i] for i in np.random.default_rng(seed).permutation(len(bins))] + [last]


def balanced(
    lengths: Sequence[int], bins: list[list[int]], capacity: int, parts: int
) -> list[list[int]]:
    """The same rows in a multiple of `parts` bins that hold nearly the same number of tokens.

    Ranks that compute beside each other are done when the fullest of their bins is. The longest row
    first, each into the emptiest bin (Graham's LPT rule, https://doi.org/10.1137/0117039). If that does
    not fit, the bins are left as they are.
    """
    count = min(-(-len(bins) // parts) * parts, len(lengths))
    heap, found = [(0, number) for number in range(count)], [[] for _ in range(count)]
    for index in sorted((i for bin in bins for i in bin), key=lambda i: -int(lengths[i])):
        tokens, number = heap[0]
        if tokens + int(lengths[index]) > capacity:
            return bins
        found[number].append(index)
        heapreplace(heap, (tokens + int(lengths[index]), number))
    return found


def collate_packed(
    bins: Sequence[Sequence[Example]],
    pad_token_id: int,
    pad_to_multiple_of: int = 1,
    pad_to: PadTo = None,
    longest: int | None = None,
    weights: Sequence[Sequence[float]] | None = None,
) -> dict:
    """A batch of B bins, each the concatenation of its examples.

    input_ids, labels (B, T): the first label of every row is -100, so none predicts the next row.
    position_ids (B, T): start again at 0 in every row and in the padding, which is rows of its own.
    cu_seq_lens_q, cu_seq_lens_k (N + 1,) int32, max_length_q, max_length_k int: borders of all rows
        in the batch flattened to (1, B * T), and the tokens of the longest.
    loss_weights (B, T) fp32: with weights of the rows of each bin.

    longest: what the batch says of the longest row, at least as much as it is. Code is compiled for
        that number, so it should be one for all batches; with one width for all, that is its default.
    """
    width = padded_length(
        max(sum(len(ids) for ids, _ in bin) for bin in bins), pad_to_multiple_of, pad_to
    )
    input_ids = torch.full((len(bins), width), pad_token_id)
    labels = torch.full_like(input_ids, IGNORE)
    position_ids, borders = torch.zeros_like(input_ids), [0]
    for row, examples in enumerate(bins):
        start = 0
        for ids, targets in examples:
            part = slice(start, start + len(ids))
            input_ids[row, part], labels[row, part] = ids, targets
            labels[row, start] = IGNORE
            position_ids[row, part] = torch.arange(len(ids))
            start += len(ids)
            borders.append(row * width + start)
        if start < width:  # padding is in rows that are no longer than the others
            piece = longest or width
            position_ids[row, start:] = torch.arange(width - start) % piece
            borders += [row * width + end for end in (*range(start + piece, width, piece), width)]
    cu_seq_lens = torch.tensor(borders, dtype=torch.int32)
    longest = longest or (
        width if isinstance(pad_to, int) else max(b - a for a, b in pairwise(borders))
    )
    batch = {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    if weights is not None:
        batch["loss_weights"] = _loss_weights(bins, weights, labels.shape)
    return batch


def _loss_weights(bins, weights, shape: torch.Size) -> Tensor:
    """The weight of each token's row (B, T); 0 where there is none."""
    found = torch.zeros(shape)
    for row, (examples, of_rows) in enumerate(zip(bins, weights, strict=False)):
        lengths = torch.tensor([len(ids) for ids, _ in examples])
        found[row, : int(lengths.sum())] = torch.tensor(of_rows).repeat_interleave(lengths)
    return found


def block_diagonal_mask(position_ids: Tensor, dtype: torch.dtype = torch.bool) -> Tensor:
    """Causal attention within each row: (B, 1, T, T) from the position_ids (B, T) of packed rows.

    dtype: bool gives True where attention is allowed; a float dtype gives 0 there and its lowest
        value elsewhere, to be added to the scores. Padding attends to padding, as a row without any
        allowed position is NaN.
    """
    rows = (position_ids == 0).cumsum(-1)
    allowed = (rows[:, None, :, None] == rows[:, None, None, :]).tril()
    if dtype == torch.bool:
        return allowed
    mask = torch.zeros(allowed.shape, dtype=dtype, device=position_ids.device)
    return mask.masked_fill(~allowed, torch.finfo(dtype).min)
