"""Rows of unequal length as one batch, padded on the right.

Padding is known by position, so any existing id serves as pad and the vocabulary is never resized:
a [PAD] whose id is the size of the embedding is an index error, and a resized embedding is a
checkpoint that other tools cannot load.

Shapes: B rows of the batch, T tokens of its longest row (rounded up).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

IGNORE = -100  # label of tokens that are not trained: torch's cross_entropy leaves it out

Example = tuple[Tensor, Tensor]  # input_ids (T,), labels (T,)
PadTo = int | Sequence[int] | None

_WIDTH_MULTIPLE = 64


def collate(
    examples: Sequence[Example],
    pad_token_id: int,
    pad_to_multiple_of: int = 1,
    pad_to: PadTo = None,
    weights: Sequence[float] | None = None,
) -> dict[str, Tensor]:
    """input_ids and labels, each (B, T) int64; with weights of the rows, loss_weights (B, T) fp32.

    There is no attention_mask: causal attention does not look right, where the padding is, so real
    tokens get the same result without one, and attention takes its fast causal kernels. Nor are there
    positions: with them transformers would ask the GPU whether rows are packed, and wait.
    pad_to: T for every batch, or the widths to choose from (`few_widths`), for compiled models; else
        the longest row, rounded up to `pad_to_multiple_of`.
    """
    lengths = [len(input_ids) for input_ids, _ in examples]
    width = padded_length(max(lengths), pad_to_multiple_of, pad_to)
    input_ids = torch.full((len(examples), width), pad_token_id)
    labels = torch.full_like(input_ids, IGNORE)
    for row, (ids, targets) in enumerate(examples):
        input_ids[row, : len(ids)] = ids
        labels[row, : len(ids)] = targets
    batch = {"input_ids": input_ids, "labels": labels}
    if weights is not None:
        batch["loss_weights"] = torch.zeros(labels.shape)
        batch["loss_weights"][: len(weights)] = torch.tensor(weights)[:, None]
    return batch


FILLER_TOKENS = 2


def filler(pad_token_id: int, num_tokens: int = FILLER_TOKENS) -> Example:
    """A row without a trained token, for a rank that has none left in a step.

    The rank still runs forward and backward on it and so joins every collective; its loss is a sum
    over no tokens. Two tokens, so that the shifted labels are not empty.
    """
    return torch.full((num_tokens,), pad_token_id), torch.full((num_tokens,), IGNORE)


def choose_pad_token_id(tokenizer, vocab_size: int | None = None) -> int:
    """An id that the model already embeds: the pad token, else unk, else EOS, else 0.

    vocab_size: rows of the model's embedding; a token added beyond it is passed over.
    """
    for token_id in (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id):
        if token_id is not None and (vocab_size is None or token_id < vocab_size):
            return token_id
    return 0


def few_widths(most: int) -> list[int]:
    """Widths to pad rows of up to `most` tokens to: multiples of 64, at most four for each doubling.

    Each width is a shape that kernels are chosen, and CUDA graphs captured, for. Padding to the next
    one adds 6% on average to rows of more than 256 tokens.
    """
    widths = [0]
    while widths[-1] < most:
        octave = widths[-1].bit_length() - 1  # of the width just passed
        widths.append(widths[-1] + max(_WIDTH_MULTIPLE, 2 ** max(0, octave - 2)))
    return [*widths[1:-1], most]


def padded_length(longest: int, pad_to_multiple_of: int = 1, pad_to: PadTo = None) -> int:
    """T for a batch whose longest row has `longest` tokens; the arguments are those of `collate`."""
    if pad_to is None:
        return -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    widths = [pad_to] if isinstance(pad_to, int) else pad_to
    if longest > widths[-1]:
        raise ValueError(
            f"pad_to={widths[-1]}: a row has {longest} tokens; set it to the --context_length that "
            "rows were truncated to"
        )
    return widths[bisect_left(widths, longest)]
