"""Token ids of rendered rows, with a mark on each token that the model must learn to write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .templates import ChatTemplate

# Tokenised together: a tokenizer holds 170 to 340 bytes for each character (docs/LOG.md), so that a batch of
# books would take the memory of a machine.
_CHARACTERS_TOGETHER = 2**21


@dataclass
class Rendered:
    """Text of a row with the spans (start, end), in characters, that the model must write."""

    text: str
    spans: list[tuple[int, int]]
    add_eos: bool  # the text has no end-of-turn token of its own
    folded_system: bool = False
    excluded: Sequence[tuple[int, int]] = ()  # spans that the author took out of training
    cuts: Sequence[int] = ()  # places in control tokens that a content spells
    notes: Sequence[str] = ()


@dataclass
class Encoded:
    """Token ids (T,) and, for each, whether it is trained; position 0 never is."""

    input_ids: np.ndarray  # int32
    trained: np.ndarray  # bool
    folded_system: bool = False
    notes: Sequence[str] = ()  # for the data report, as all below
    unread: Sequence[str] = ()
    prompt_format: str | None = None
    weight: float = 1.0  # of its loss, relative to other rows


def tokenize(texts: list[str], tokenizer) -> Iterator[tuple[list[int], np.ndarray]]:
    """Ids and character ranges (T, 2) of each text, without any token that the text lacks."""
    for together in _not_too_long(texts):
        batch = tokenizer(
            together, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        for ids, offsets in zip(batch["input_ids"], batch["offset_mapping"], strict=True):
            yield ids, _without_gaps(np.array(offsets, dtype=np.int64).reshape(-1, 2))


def _not_too_long(texts: list[str]) -> Iterator[list[str]]:
    """Texts in turn, so many together as are of some length in all; a longer one is alone."""
    together: list[str] = []
    for text in texts:
        if together and sum(map(len, together)) + len(text) > _CHARACTERS_TOGETHER:
            yield together
            together = []
        together.append(text)
    if together:
        yield together


def _without_gaps(offsets: np.ndarray) -> np.ndarray:
    """Ranges that begin where the token before ends.

    Some byte-level tokenizers report " word" without its space, and a token of spaces as nothing.
    """
    previous_ends = np.maximum.accumulate(np.concatenate([[0], offsets[:-1, 1]]))[: len(offsets)]
    offsets[:, 0] = np.minimum(offsets[:, 0], previous_ends)
    return offsets


def mark_tokens(
    rendered: Rendered,
    ids: list[int],
    offsets: np.ndarray,
    prefix: list[int],
    chat: ChatTemplate,
    train_on: str,
) -> Encoded:
    """A row's tokens, all marked that touch a span of it, with the BOS and EOS that it lacks.

    ids, offsets: as `tokenize` gives them for its text. prefix: as `prefix_ids`. train_on "all" marks
    all but what the author took out.
    """
    if train_on == "completion" or rendered.cuts:
        ids, offsets = _split(rendered, ids, offsets, chat, at_starts=train_on == "completion")
    trained = (
        _overlaps(offsets, rendered.spans)
        if train_on == "completion"
        else ~_overlaps(offsets, rendered.excluded)
    )
    prefix = missing_prefix(ids, prefix)
    suffix = _missing_eos(ids, chat.tokenizer) if rendered.add_eos else []
    trained = np.concatenate([np.zeros(len(prefix), bool), trained, np.ones(len(suffix), bool)])
    trained[:1] = False  # nothing stands before it to predict it from
    return Encoded(np.array(prefix + ids + suffix, dtype=np.int32), trained, rendered.folded_system)


def _overlaps(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    trained = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        trained |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return trained


def _split(
    rendered: Rendered, ids: list[int], offsets: np.ndarray, chat: ChatTemplate, at_starts: bool
):
    """Tokens anew, cut in control tokens that a content spells, and where one would hold the end of a
    prompt and the start of an answer.

    When asked, the model sees the prompt tokenised alone ("assistant\\n"), so it must not be
    trained on a token across the border ("\\n\\n", if the answer starts with a newline).
    """
    starts = [
        start
        for start, _ in rendered.spans
        if ((offsets[:, 0] < start) & (offsets[:, 1] > start)).any()
    ]
    cuts = sorted({*rendered.cuts, *(starts if at_starts else [])})
    if not cuts or chat.adds_space:
        return ids, offsets
    borders = [0, *cuts, len(rendered.text)]
    pieces = [rendered.text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    parts = list(tokenize(pieces, chat.tokenizer))
    return (
        [token for part, _ in parts for token in part],
        np.concatenate([ranges + at for (_, ranges), at in zip(parts, borders, strict=False)]),
    )


def prefix_ids(tokenizer) -> list[int]:
    """What the tokenizer itself puts before a text (BOS); empty if it adds nothing.

    Then nothing is added here either: the model has not seen a BOS there.
    """
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    return full[: full.index(bare[0])] if bare and bare[0] in full else []


def missing_prefix(ids: list[int], prefix: list[int]) -> list[int]:
    """`prefix`, unless the text begins with it already, as where the template writes BOS."""
    return [] if ids[: len(prefix)] == prefix else prefix


def _missing_eos(ids: list[int], tokenizer) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no eos_token, so "
            "the model can't learn to stop; set eos_token in its tokenizer_config.json"
        )
    return [] if ids[-1:] == [tokenizer.eos_token_id] else [tokenizer.eos_token_id]
