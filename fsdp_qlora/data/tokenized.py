"""Tokenised rows, held compactly, whole or some of them.

A million rows of a thousand tokens are 5 GB here (4 bytes an id, 1 byte a mark) and would be over
30 GB as lists of Python ints. In a file they are memory-mapped, so the ranks of a host share one copy.

Shapes: N rows, T tokens of a row, S tokens of all rows.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from ..tensor_files import write_tensors
from .cache import DamagedFile
from .collate import IGNORE, Example
from .report import DataReport


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
        write_tensors(tensors, path, metadata)

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
