"""What happened to the data on the way to tokens, so that nothing is dropped or cut in silence.

`DataReport` travels with the tokenised data (it is stored in the cache beside them) and is meant to
be printed once before training. `preview` shows rows as the model will see them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..config.settings import counted
from .collate import IGNORE

_EXAMPLES_KEPT = 3  # sources named for each reason that rows are counted for
_BAR_WIDTH = 40
_GREEN, PLAIN = "\033[32m", "\033[0m"
COUNTS = (
    "rows_read",
    "rows_kept",
    "rows_truncated",
    "rows_with_folded_system",
    "tokens_total",
    "tokens_trained",
    "tokens_cut",
)


@dataclass
class Counted:
    """Rows of which the same is to be said."""

    rows: int = 0
    sources: list[str] = field(default_factory=list)  # of the first few

    def add(self, rows: int, sources: list[str]) -> None:
        self.rows += rows
        self.sources = (self.sources + sources)[:_EXAMPLES_KEPT]


@dataclass
class DataReport:
    """Counts of rows and tokens. Tokens trained are those that are predicted, after the shift."""

    context_length: int
    train_on: str = "completion"
    rows_read: int = 0
    rows_kept: int = 0
    rows_truncated: int = 0
    rows_with_folded_system: int = 0
    tokens_total: int = 0
    tokens_trained: int = 0
    tokens_cut: int = 0
    dropped: dict[str, Counted] = field(default_factory=dict)  # reason -> rows
    notes: dict[str, Counted] = field(default_factory=dict)  # what else befell rows -> rows
    unread: dict[str, int] = field(default_factory=dict)  # field of records -> rows that have it
    prompt_formats: dict[str, int] = field(default_factory=dict)  # where there is no chat template
    files: list[str] = field(default_factory=list)  # what was read of a folder, and what was not
    lengths: dict[int, int] = field(default_factory=dict)  # rows of up to so many tokens
    weights: list[float] = field(default_factory=list)  # the least and the largest of kept rows

    def drop(self, reason: str, source: str) -> None:
        self.dropped.setdefault(reason, Counted()).add(1, [source])

    def tell(
        self, source: str, notes: Iterable[str], unread: Iterable[str], prompt_format: str | None
    ) -> None:
        """Count what is to be said of a row that is kept."""
        for note in notes:
            self.notes.setdefault(note, Counted()).add(1, [source])
        for field_name in unread:
            self.unread[field_name] = self.unread.get(field_name, 0) + 1
        if prompt_format:
            self.prompt_formats[prompt_format] = self.prompt_formats.get(prompt_format, 0) + 1

    def keep(
        self,
        length: int,
        trained: int,
        tokens_cut: int = 0,
        folded_system: bool = False,
        weight: float = 1.0,
    ) -> None:
        """Count a row of `length` tokens, `tokens_cut` of it already gone."""
        self.rows_kept += 1
        self.rows_truncated += tokens_cut > 0
        self.rows_with_folded_system += folded_system
        self.tokens_total += length
        self.tokens_trained += trained
        self.tokens_cut += tokens_cut
        self.weights = _ends([*self.weights, weight])
        # Four bars an octave: rows of one task often lie within one.
        width = max(1, (1 << max(length - 1, 0).bit_length()) // 8)
        bound = min(-(-length // width) * width, self.context_length)
        self.lengths[bound] = self.lengths.get(bound, 0) + 1

    def add(self, other: DataReport) -> None:
        """Count another rank's rows too."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("dropped", "notes"):
            mine = getattr(self, name)
            for reason, counted_rows in getattr(other, name).items():
                mine.setdefault(reason, Counted()).add(counted_rows.rows, counted_rows.sources)
        for name in ("unread", "prompt_formats", "lengths"):
            mine = getattr(self, name)
            for key, rows in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + rows
        self.weights = _ends(self.weights + other.weights)

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> DataReport:
        """The inverse of `to_dict`, also after JSON has made strings of the keys."""
        lengths = {int(bound): rows for bound, rows in values["lengths"].items()}
        by_reason = {
            name: {reason: Counted(**counts) for reason, counts in values.get(name, {}).items()}
            for name in ("dropped", "notes")
        }
        return cls(**{**values, **by_reason, "lengths": lengths})

    def format_report(self) -> str:
        """The report as a few lines of text, with a histogram of row lengths."""
        share = self.tokens_trained / max(self.tokens_total, 1)
        lines = [
            f"data: {self.rows_kept:,} of {counted(self.rows_read, 'row')}, {self.tokens_total:,} "
            f"tokens, {self.tokens_trained:,} trained ({share:.1%}, {self.train_on})"
        ]
        lines += [f"  {line}" for line in (*self.files, *self.dropped_lines())]
        if any("chat template" in reason for reason in self.dropped):
            lines.append(
                "  nothing is learnt of rows that the template can't write; --chat_template takes another"
            )
        if self.rows_truncated:
            lines.append(
                f"  truncated {counted(self.rows_truncated, 'row')} to {self.context_length:,} "
                f"tokens (--context_length), losing {self.tokens_cut:,} tokens"
            )
        if self.weights and self.weights != [1, 1]:
            least, largest = self.weights
            lines.append(f"  weights from {least:g} to {largest:g} (--weight_column)")
        if self.rows_with_folded_system:
            lines.append(
                "  folded the system message into the first user turn in "
                f"{counted(self.rows_with_folded_system, 'row')}: the chat template takes no system "
                "message"
            )
        lines += [
            f"  {counted(said.rows, 'row')}: {note} ({_named(said)})"
            for note, said in self.notes.items()
        ]
        if self.unread:
            lines.append(
                "  unused fields: "
                + ", ".join(
                    f"{name} ({counted(rows, 'row')})" for name, rows in self.unread.items()
                )
            )
        if "weight" in self.unread:
            lines.append("  --weight_column weight weighs the loss of each row by that field")
        return "\n".join(lines + self._histogram())

    def format_dropped(self) -> str:
        """One line: how many rows were read, and why they were dropped."""
        if not self.rows_read:
            return "it is empty"
        return "; ".join([f"{self.rows_read:,} read", *self.dropped_lines()])

    def format_remedy(self) -> str:
        """What to do where every row was dropped."""
        reasons = "; ".join(self.dropped)
        if not self.rows_read:
            return "give rows"
        if "chat template" in reasons:
            return "give another --chat_template, or rows that this one can write"
        if "--weight_column" in reasons:
            return "give rows of a weight above 0"
        if "--context_length" in reasons:
            return "give rows whose answer fits within --context_length"
        return "give rows with an answer"

    def dropped_lines(self) -> list[str]:
        """For each reason, how many rows were dropped for it, and some of them."""
        return [
            f"dropped {dropped.rows:,}: {reason} ({_named(dropped)})"
            for reason, dropped in self.dropped.items()
        ]

    def _histogram(self) -> list[str]:
        most = max(self.lengths.values(), default=1)
        return [
            f"  up to {bound:>7,} tokens {rows:>9,} {'#' * -(-rows * _BAR_WIDTH // most)}"
            for bound, rows in sorted(self.lengths.items())
        ]

    def plot(self, path: str | Path) -> None:
        """The histogram of row lengths as a picture; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ValueError(
                f"{path}: plots need the package matplotlib; run: pip install fsdp_qlora[plot]"
            ) from None
        bounds = sorted(self.lengths)
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.bar([f"{bound:,}" for bound in bounds], [self.lengths[bound] for bound in bounds])
        axes.set(
            xlabel="tokens in a row, up to",
            ylabel="rows",
            title=f"{self.rows_kept:,} rows, {self.tokens_total:,} tokens, "
            f"{self.tokens_trained:,} trained",
        )
        figure.savefig(path, dpi=150)


def preview(dataset, tokenizer, n: int = 2, color: bool | None = None) -> str:
    """The first `n` rows as text, trained tokens in green, or in [[...]] where color is False.

    color: None colours if stdout is a terminal.
    """
    if color is None:
        color = sys.stdout.isatty()
    before, after = (_GREEN, PLAIN) if color else ("[[", "]]")
    rows = []
    for row in range(min(n, len(dataset))):
        input_ids, labels = dataset[row]
        runs = [
            f"{before}{text}{after}" if trained else text
            for trained, text in _runs(input_ids, labels, tokenizer)
        ]
        rows.append(f"--- row {row}, {len(input_ids)} tokens\n{''.join(runs)}")
    return "\n".join(rows)


def _runs(input_ids, labels, tokenizer):
    """(trained, text) for each run of tokens that are trained, or are not."""
    start = 0
    trained = (labels != IGNORE).tolist()
    for end in range(1, len(trained) + 1):
        if end == len(trained) or trained[end] != trained[start]:
            yield (
                trained[start],
                tokenizer.decode(input_ids[start:end], clean_up_tokenization_spaces=False),
            )
            start = end


def _ends(values: list[float]) -> list[float]:
    """The least and the largest of some values; nothing of none."""
    return [min(values), max(values)] if values else []


def _named(rows: Counted) -> str:
    more = ", ..." if rows.rows > len(rows.sources) else ""
    return ", ".join(rows.sources) + more
