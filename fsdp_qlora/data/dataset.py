"""Tokenised rows, held compactly, and the one call that makes them from a name or a file.

A million rows of a thousand tokens are 5 GB here (4 bytes an id, 1 byte a mark) and would be over
30 GB as lists of Python ints. With a cache file they are memory-mapped, so the ranks of a host share
one copy.

Shapes: N rows, T tokens of a row, S tokens of all rows.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from tqdm import tqdm

from . import node_share
from .cache import DamagedFile, build_or_wait
from .collate import IGNORE, Example
from .formats import Row
from .masking import Encoded, encode_rows
from .records import first_line
from .report import DataReport
from .sources import open_source
from .templates import ChatTemplate, UnusableRow

ROWS_PER_BATCH = 256  # tokenised together
_BAR_AFTER_S = 2
_CACHE_VERSION = 4  # raise it when the same input gives other tokens


@dataclass(frozen=True)
class TokenizedDataset:
    """N rows of token ids; `dataset[i]` is (input_ids, labels), both (T,) int64."""

    input_ids: np.ndarray  # (S,) int32
    trained: np.ndarray  # (S,) bool; False at the first token of every row
    offsets: np.ndarray  # (N + 1,) int64, where each row starts
    report: DataReport
    weights: np.ndarray | None = None  # (N,) float32, of each row's loss; None where all are alike

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Example:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        part = slice(self.offsets[row], self.offsets[row + 1])
        return as_example(self.input_ids[part], self.trained[part])

    @cached_property
    def lengths(self) -> np.ndarray:
        """(N,) tokens of each row."""
        return np.diff(self.offsets)

    @property
    def mean_length(self) -> float:
        """Tokens of a row in the mean; 0 of no rows."""
        return float(self.lengths.mean()) if len(self) else 0.0

    @cached_property
    def trained_counts(self) -> np.ndarray:
        """(N,) trained tokens of each row; each is predicted, as a row's first never is trained."""
        sums = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]]

    def check_vocab_size(self, vocab_size: int) -> None:
        check_vocab_size(int(self.input_ids.max(initial=-1)), vocab_size)

    def digest(self) -> str:
        """SHA-256 of the rows and their order."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for values in self._arrays.values():
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()

    def checksum(self, key: str, report: str) -> str:
        """Of all that a file of these rows says, and of the key that it is found by."""
        arrays = self._arrays.values()
        parts = [key, report, self.digest(), *((str(a.dtype), a.shape) for a in arrays)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {"offsets": self.offsets, "input_ids": self.input_ids, "trained": self.trained}
        return arrays if self.weights is None else arrays | {"weights": self.weights}

    def save(self, path: str | Path, key: str = "") -> None:
        tensors, metadata = self._as_file(key)
        save_file(tensors, path, metadata=metadata)

    def to_bytes(self, key: str = "") -> bytes:
        """What `save` writes."""
        return save(*self._as_file(key))

    def _as_file(self, key: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        report = json.dumps(self.report.to_dict())
        tensors = {name: torch.from_numpy(values) for name, values in self._arrays.items()}
        return tensors, {"report": report, "checksum": self.checksum(key, report)}

    @classmethod
    def load(cls, path: str | Path, key: str = "") -> TokenizedDataset:
        """What `save` wrote under this key. Raises DamagedFile if any of it has changed."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
            arrays = {name: values.numpy() for name, values in load_file(path).items()}  # mapped
            report = DataReport.from_dict(json.loads(metadata["report"]))
            found = cls(**arrays, report=report)
            is_whole = found.checksum(key, metadata["report"]) == metadata["checksum"]
        except (
            SafetensorError,
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            raise DamagedFile(f"it can't be read ({type(error).__name__}: {error})") from error
        if not is_whole:
            raise DamagedFile("its bytes differ from those written")
        return found


def as_example(input_ids: np.ndarray, trained: np.ndarray) -> Example:
    """(input_ids, labels), both (T,) int64, from the compact form."""
    ids = torch.from_numpy(input_ids.astype(np.int64))
    return ids, ids.masked_fill(~torch.from_numpy(trained.copy()), IGNORE)


def check_vocab_size(largest: int, vocab_size: int) -> None:
    """ValueError if the model has no embedding for a token, which on a GPU is a device assert.

    vocab_size: rows of the model's embedding.
    """
    if largest >= vocab_size:
        raise ValueError(
            f"the data hold token id {largest}, but the model embeds ids below {vocab_size}; use "
            "the tokenizer of --model_name, or a checkpoint with embeddings resized for the added "
            "tokens"
        )


@dataclass(frozen=True)
class Subset:
    """Some rows of a dataset, whose tokens stay where they are."""

    dataset: TokenizedDataset
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Example:
        return self.dataset[int(self.rows[row])]

    @property
    def report(self) -> DataReport:
        """Of the whole dataset."""
        return self.dataset.report

    @cached_property
    def lengths(self) -> np.ndarray:
        return self.dataset.lengths[self.rows]

    @property
    def mean_length(self) -> float:
        return float(self.lengths.mean()) if len(self) else 0.0

    @cached_property
    def trained_counts(self) -> np.ndarray:
        return self.dataset.trained_counts[self.rows]

    @cached_property
    def weights(self) -> np.ndarray | None:
        weights = self.dataset.weights
        return None if weights is None else weights[self.rows]

    def check_vocab_size(self, vocab_size: int) -> None:
        self.dataset.check_vocab_size(vocab_size)

    def digest(self) -> str:
        """SHA-256 of the rows and their order."""
        rows = np.ascontiguousarray(self.rows)
        return hashlib.sha256(self.dataset.digest().encode() + rows.tobytes()).hexdigest()


def hold_out(dataset: TokenizedDataset, share: float) -> tuple[Subset, Subset]:
    """The rows to train on, and `share` of all rows (one at least) to evaluate on.

    A row's side follows from a hash of its tokens, so it is the same in every run, most rows keep
    theirs when the data grow, and copies of a row are never on both sides.
    """
    digests = np.array([_row_digest(dataset, row) for row in range(len(dataset))], dtype=np.uint64)
    largest = np.sort(digests)[max(1, round(share * len(digests))) - 1]
    train, held_out = np.flatnonzero(digests > largest), np.flatnonzero(digests <= largest)
    if not len(train):
        raise ValueError(
            f"--eval_share {share}: all {len(dataset)} rows would be held out; give a "
            "smaller share or more rows"
        )
    return Subset(dataset, train), Subset(dataset, held_out)


def shared_rows(rows: TokenizedDataset, held_out: TokenizedDataset) -> int:
    """How many of the held-out rows are trained on too, token by token."""
    held = {_row_digest(held_out, row) for row in range(len(held_out))}
    as_long = np.flatnonzero(np.isin(rows.lengths, held_out.lengths))
    both = held & {_row_digest(rows, int(row)) for row in as_long}
    return sum(_row_digest(held_out, row) in both for row in range(len(held_out)))


def _row_digest(dataset: TokenizedDataset, row: int) -> int:
    tokens = dataset.input_ids[dataset.offsets[row] : dataset.offsets[row + 1]].tobytes()
    return int.from_bytes(hashlib.blake2b(tokens, digest_size=8).digest(), "big")


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
    key = _cache_key(source.digest(), tokenizer, options)
    if cache_dir is None:
        return told(_from_node(build, key, str(share), is_writer))
    return told(
        build_or_wait(
            Path(cache_dir) / f"tokens-{key}.safetensors",
            lambda temporary: _save_in_cache(build(), temporary, key, cache_dir),
            lambda path: TokenizedDataset.load(path, key),
            is_writer=is_writer,
            timeout_s=wait_timeout_s,
        )
    )


def _save_in_cache(tokenized: TokenizedDataset, path: Path, key: str, cache_dir: str | Path):
    """Write rows for --data_cache; ValueError with the remedy where the folder can't take them."""
    try:
        tokenized.save(path, key)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"--data_cache {cache_dir}: {first_line(error)}; free some space there, give another "
            "folder, or leave it out"
        ) from error


def _from_node(
    build: Callable[[], TokenizedDataset], key: str, share: str, is_writer: bool
) -> TokenizedDataset:
    """What one rank of the node built; `build()` here where it can't be had."""
    name = f"fsdp_qlora-{hashlib.sha256(f'{share} {key}'.encode()).hexdigest()}"
    if not is_writer:
        found = node_share.read(name, lambda path: TokenizedDataset.load(path, key))
        return build() if found is None else found
    writer = node_share.writer_of(name)
    if writer is None:  # the others find none either
        return build()
    return TokenizedDataset.load(writer.write(lambda: build().to_bytes(key)), key)


def _cache_key(data_digest: str, tokenizer, options: list) -> str:
    parts = [
        _CACHE_VERSION,
        data_digest,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        options,
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


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
        encoded.input_ids[:length],
        encoded.trained[:length],
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
