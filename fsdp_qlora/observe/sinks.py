"""Where the records of a run go beside `metrics.jsonl`: one small protocol, `Sink`, for all of them.

Another tracker is a class with these methods and a line in `trackers.TRACKERS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tqdm import tqdm

from .metrics import Progress, Record, StepMetrics

_TERMINAL = ("tqdm", "stdout", "jsonl")  # forms of --log_to that go to the terminal; one at a time


class Sink:
    """Takes the records of a run in their order; what it does not override does nothing."""

    def step(self, metrics: StepMetrics):
        """One optimizer step."""

    def write(self, record: Record):
        """`Progress` every --log_every steps, and every record that is no step."""

    def rewind(self, step: int):
        """Forget what came after `step`; the run resumes from there."""

    def close(self, status: str):
        """The run is over: finished, stopped or failed."""


class _Bar(Sink):
    """A progress bar on a terminal, with evaluations above it."""

    def __init__(self, total_steps: int | None, initial: int):
        self.bar = tqdm(total=total_steps, unit="step", initial=initial, dynamic_ncols=True)

    def step(self, metrics: StepMetrics):
        self.bar.update()

    def write(self, record: Record):
        if isinstance(record, Progress):
            self.bar.set_postfix_str(_postfix(record))
        elif line := record.line():
            self.bar.write(line)

    def rewind(self, step: int):
        self.bar.update(step - self.bar.n)

    def close(self, status: str):
        self.bar.close()


def _postfix(progress: Progress) -> str:
    """What stands behind a progress bar, which has steps and time itself."""
    parts = [f"loss {progress.loss:.3f}"]
    if progress.token_accuracy is not None:
        parts.append(f"accuracy {progress.token_accuracy:.1%}")
    parts.append(f"{progress.tokens_per_second:,.0f} tok/s")
    if progress.share_of_peak is not None:
        parts.append(f"{progress.share_of_peak:.0%} of peak")
    if progress.peak_allocated_gib:
        parts.append(f"{progress.peak_allocated_gib:.1f} GiB")
    if progress.dollars is not None:
        parts.append(f"${progress.dollars:,.2f}")
    return ", ".join(parts)


class Lines(Sink):
    """One line a record on stdout: what a log file or a scheduler keeps well."""

    def write(self, record: Record):
        if line := record.line():
            print(line, flush=True)


class _JsonLines(Sink):
    """The lines of `metrics.jsonl` on stdout as they are written."""

    def step(self, metrics: StepMetrics):
        print(json.dumps(asdict(metrics)), flush=True)

    def write(self, record: Record):
        if not isinstance(record, Progress):
            print(json.dumps(asdict(record)), flush=True)


def terminal(names: Sequence[str], total_steps: int | None, initial: int) -> Sink:
    """What --log_to shows here. The bar is the default, and lines where there is no terminal."""
    if "jsonl" in names:
        return _JsonLines()
    if "stdout" in names or not sys.stderr.isatty():
        return Lines()
    return _Bar(total_steps, initial)
