"""What a run keeps and says of itself while it runs. Only rank 0 writes.

`metrics.jsonl` has every record of a run, also those before it was stopped; `report` reads nothing
else. The other sinks get a mean of every few steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from tqdm import tqdm

from ..redact import redact
from .metrics import (
    HISTORY,
    EndRecord,
    EvalMetrics,
    Record,
    RollBackRecord,
    StepMetrics,
    mean_of,
)
from .sinks import Sink
from .throughput import Pace


class RunLog:
    """Writes the records of a run to `metrics.jsonl`, and passes them on to a terminal and trackers.

    Of steps these get the mean since the one before: after a start's first step, each `every`-th and
    the last. earlier: the lines of the same run before it was stopped; they stay. Trackers are closed
    by who opened them.
    """

    def __init__(
        self,
        folder: str | Path,
        is_main: bool = True,
        *,
        terminal: Sink | None = None,
        trackers: Sequence[Sink] = (),
        every: int = 1,
        pace: Pace | None = None,
        earlier: Sequence[dict] = (),
    ):
        self.is_main, self.every, self.pace = is_main, every, pace or Pace()
        self.terminal = terminal or Sink()
        self.sinks, self.waiting, self.is_begun = [self.terminal, *trackers], [], False
        self.steps = [StepMetrics(**r) for r in earlier if r["kind"] == "step"]
        self.evaluations = [EvalMetrics(**r) for r in earlier if r["kind"] == "eval"]
        if not is_main:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = Path(folder) / "metrics.jsonl"
        self.begin(earlier)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        if not self.is_main:
            return
        self.end_steps()
        status, said = (
            ("finished", "") if error is None else (how_it_ended(error), in_one_line(error))
        )
        self.keep(EndRecord(self.last_step(), status, said, now()))
        if self.unwritten:
            self.warn("there is still no space", "its last lines are lost")
        self.file.close()

    def begin(self, records: Sequence[dict]):
        """Start the file with these lines; it is never seen half written."""
        begun = self.path.with_suffix(".partial")
        try:
            begun.write_text("".join(json.dumps(r) + "\n" for r in records))
            begun.replace(self.path)
        except OSError as error:
            raise ValueError(
                f"--output_dir {self.path.parent}: {self.path.name} can't be written "
                f"({error.strerror}); free some space, or give another folder"
            ) from error
        self.file, self.unwritten = open(self.path, "ab", buffering=0), b""  # noqa: SIM115  see __exit__

    def last_step(self) -> int:
        """The last step that was logged."""
        return self.steps[-1].step if self.steps else 0

    def log(self, metrics: StepMetrics):
        """Record and show one step."""
        self.steps.append(metrics)
        self.pace.add(metrics)
        if not self.is_main:
            return
        self.keep(metrics)
        self.waiting.append(metrics)
        self.tell("step", metrics)
        if not self.is_begun or metrics.step % self.every == 0:
            self.show_steps()
        self.is_begun = True

    def show_steps(self):
        """Give the sinks the mean of the steps that they have not been given."""
        if not self.waiting:
            return
        progress = mean_of(self.waiting, **self.pace.where(self.waiting[-1].step))
        self.waiting = []
        self.tell("write", progress)

    def log_evaluation(self, metrics: EvalMetrics):
        """Record and show one evaluation."""
        self.evaluations.append(metrics)
        self.record(metrics)

    def record(self, record: Record):
        """Record and show anything but a step."""
        self.pace.add(record)
        if not self.is_main:
            return
        if record.line():
            self.show_steps()  # in their order
        self.keep(record)
        self.tell("write", record)

    def keep(self, record: Record):
        """One line in the file."""
        self.write(json.dumps(asdict(record)) + "\n")

    def write(self, text: str = ""):
        """Append to the file. On a full disk lines wait for the next one, and the run continues."""
        had_room, self.unwritten = not self.unwritten, self.unwritten + text.encode()
        try:
            while self.unwritten:
                self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
        except OSError as error:
            if had_room:
                self.warn(error.strerror, "its lines are kept until there is space")

    def warn(self, reason: str, then: str):
        """Say on stderr, beside a bar, that the file can't be written."""
        tqdm.write(f"warning: {self.path} can't be written ({reason}); {then}", file=sys.stderr)

    def tell(self, what: str, *args):
        """Call a method of every sink; one that fails is left out, for it must not end a run."""
        for sink in list(self.sinks):
            try:
                getattr(sink, what)(*args)
            except Exception as error:  # a tracker's own, of any kind
                self.sinks.remove(sink)
                print(
                    f"warning: {type(sink).__name__} failed and gets no more records; metrics.jsonl still "
                    f"does: {in_one_line(error)}",
                    flush=True,
                )

    def rewind(self, step: int):
        """Forget what came after `step`, but not what went wrong."""
        gone_to = self.last_step()
        self.steps = [s for s in self.steps if s.step <= step]
        self.evaluations = [e for e in self.evaluations if e.step <= step]
        self.waiting = []
        if not self.is_main:
            return
        self.file.close()
        lines = map(json.loads, (self.path.read_bytes() + self.unwritten).splitlines())
        self.begin([r for r in lines if r["step"] <= step or r["kind"] in HISTORY])
        self.tell("rewind", step)
        self.record(RollBackRecord(step, gone_to))

    def end_steps(self):
        """There are no more steps: show those that wait, and leave the terminal to others."""
        if not self.is_main or self.terminal not in self.sinks:
            return
        self.show_steps()
        self.sinks.remove(self.terminal)
        self.terminal.close("finished")


def how_it_ended(error: BaseException) -> str:
    """stopped or failed; the exception of a stop that was asked for says so itself."""
    return getattr(
        error, "ends_as", "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
    )


def in_one_line(error: BaseException) -> str:
    """An exception in a line, without secrets; mistakes of users explain themselves."""
    said = (
        f"{error}"
        if isinstance(error, ValueError | OSError) or hasattr(error, "ends_as")
        else (f"{type(error).__name__}: {error}")
    )
    return redact(said).strip().split("\n")[0].removesuffix(":")


def now() -> str:
    """The time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
