"""From a name or a file to tokenised rows, in one call."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from . import node_share
from .formats import Row
from .kept_rows import key_of, rows_in_folder, rows_of_node
from .marked_tokens import Encoded
from .masking import encode_rows
from .report import DataReport
from .sources import open_source
from .templates import ChatTemplate, UnusableRow
from .tokenized import TokenizedDataset

ROWS_PER_BATCH = 256  # tokenised together
_BAR_AFTER_S = 2


def tokenize_rows(
    rows: Iterable[Row], tokenizer, *, context_length: int, train_on: str = "completion"
) -> TokenizedDataset:
    """Rows as tokens, in order, with what was dropped or cut in the `report`.

    context_length: rows are cut after so many tokens.
    train_on: "completion" (what an assistant writes, with the token that ends its turn) or "all".
    """
    if context_length < 2:
        raise ValueError(f"--context_length {context_length}: give at least 2 tokens")
    chat = ChatTemplate(tokenizer)
    builder = _Builder(DataReport(context_length, train_on))
    for batch in groups(rows, ROWS_PER_BATCH):
        for row, encoded in zip(batch, encode_rows(batch, chat, train_on), strict=True):
            builder.add(row.source, encoded)
    return builder.finish()


def load_dataset(
    dataset: str | Path | list,
    tokenizer,
    *,
    split: str = "train",
    samples: int | None = None,
    context_length: int = 512,
    train_on: str = "completion",
    seed: int = 42,
    cache_dir: str | Path | None = None,
    is_writer: bool = True,
    wait_timeout_s: float = 6 * 3600,
    shows_progress: bool = False,
    share: str | None = None,
    weight_column: str | None = None,
) -> TokenizedDataset:
    """Read and tokenise `dataset` (see `read_rows`); every rank gets the same rows.

    cache_dir: where the tokens are kept, under a name that follows from the data, the tokenizer,
        its template and the options. None: nowhere.
    is_writer: True on the one rank per cache_dir, or node, that tokenises; the others wait for it.
        Call this before the process group exists, so that no collective can time out.
    shows_progress: a bar on a terminal, if it takes more than a moment.
    share: a text that only the ranks of this run on this node have in common.
        Without a cache_dir one of them tokenises for all (node_share.py). None: each for itself.
    weight_column: the key of each record that holds the weight of its loss.
    Raises ValueError if no row is left.
    """
    source = open_source(
        dataset,
        split=split,
        samples=samples,
        seed=seed,
        dummy_words=context_length,  # a word is at least a token
        weight_column=weight_column,
    )

    def build() -> TokenizedDataset:
        rows = tqdm(
            source.rows(),
            desc="tokenizing",
            unit=" rows",
            delay=_BAR_AFTER_S,
            leave=False,
            disable=None if shows_progress else True,  # None: where there is no terminal
        )
        tokenized = tokenize_rows(rows, tokenizer, context_length=context_length, train_on=train_on)
        if not len(tokenized):
            report = tokenized.report
            raise ValueError(
                f"--dataset {dataset}: no row is left to train on "
                f"({report.format_dropped()}); {report.format_remedy()}"
            )
        return tokenized

    def told(tokenized: TokenizedDataset) -> TokenizedDataset:
        tokenized.report.files = list(source.files)  # also beside a cache of the same rows
        return tokenized

    shares = share and node_share.can_share() and hasattr(tokenizer, "backend_tokenizer")
    if cache_dir is None and not shares:
        return told(build())
    options = [split, samples, seed, context_length, train_on]
    options += [weight_column] if weight_column else []
    key = key_of(source.digest(), tokenizer, options)
    if cache_dir is None:
        return told(rows_of_node(str(share), key, build, is_writer=is_writer))
    kept = rows_in_folder(cache_dir, key, build, is_writer=is_writer, timeout_s=wait_timeout_s)
    return told(kept)


def groups(items: Iterable, size: int) -> Iterator[list]:
    """Lists of `size` items in turn; the last may be shorter."""
    items = iter(items)
    while group := list(islice(items, size)):
        yield group


def cut_and_count(
    encoded: Encoded | UnusableRow, source: str, report: DataReport
) -> Encoded | None:
    """The row within the context length, or None if nothing is left to train; the report says so."""
    report.rows_read += 1
    if isinstance(encoded, UnusableRow):
        report.drop(str(encoded), source)
        return None
    length = report.context_length
    row = Encoded(
        encoded.input_ids[:length].copy(),  # a view would keep all of a book
        encoded.trained[:length].copy(),
        encoded.folded_system,
        weight=encoded.weight,
    )
    if not row.trained.any():
        reason = (
            f"no trained token within {length:,} tokens (--context_length)"
            if encoded.trained.any()
            else "no answer to train on"
        )
        report.drop(reason, source)
        return None
    report.tell(source, encoded.notes, encoded.unread, encoded.prompt_format)
    report.keep(
        len(row.input_ids),
        int(row.trained.sum()),
        tokens_cut=len(encoded.input_ids) - len(row.input_ids),
        folded_system=row.folded_system,
        weight=row.weight,
    )
    return row


class _Builder:
    """Grows the flat arrays row by row, and counts."""

    def __init__(self, report: DataReport):
        self.report = report
        self.input_ids, self.trained, self.offsets = array("i"), array("b"), array("q", [0])
        self.weights = array("f")

    def add(self, source: str, encoded: Encoded | UnusableRow) -> None:
        row = cut_and_count(encoded, source, self.report)
        if row is None:
            return
        self.input_ids.frombytes(row.input_ids.tobytes())
        self.trained.frombytes(row.trained.tobytes())
        self.offsets.append(len(self.input_ids))
        self.weights.append(row.weight)

    def finish(self) -> TokenizedDataset:
        weights = np.array(self.weights, dtype=np.float32)
        return TokenizedDataset(
            np.array(self.input_ids, dtype=np.int32),
            np.frombuffer(self.trained, dtype=np.bool_).copy(),
            np.array(self.offsets, dtype=np.int64),
            self.report,
            None if (weights == weights[:1]).all() else weights,
        )
