"""What a run says while it runs, and keeps: one JSON line per step, a progress bar, a loss picture.

Only rank 0 writes. `metrics.jsonl` is always there, whatever is shown on the terminal.
"""
from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm


@dataclass
class StepMetrics:
    """One optimizer step."""
    step: int                  # from 1
    loss: float                # sum over trained tokens of all ranks / their number
    lr: float
    grad_norm: float           # over all trained weights, before clipping
    trained_tokens: int        # over all ranks
    tokens: int                # with padding, over all ranks
    seconds: float
    tokens_per_second: float   # over all ranks
    peak_allocated_gib: float  # of this rank's GPU; 0 on the CPU
    loss_scale: float | None = None  # with fp16
    kind: str = "step"

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        return math.isfinite(self.loss + self.grad_norm)

    @property
    def overflowed(self) -> bool:
        """Whether fp16 gradients were too large at this scale: a lower one comes next."""
        return (not self.is_finite and math.isfinite(self.loss) and self.loss_scale is not None
                and self.loss_scale > 1)

    def line(self) -> str:
        """The step in one line for people."""
        return (f"step {self.step}  loss {self.loss:.4f}  lr {self.lr:.2e}  "
                f"grad_norm {self.grad_norm:.3f}  {self.tokens_per_second:,.0f} tok/s")


@dataclass
class EvalMetrics:
    """One evaluation on held-out rows."""
    step: int                  # optimizer steps done
    eval_loss: float           # sum over all trained tokens of these rows / their number
    perplexity: float          # e ** eval_loss
    trained_tokens: int
    is_best: bool              # the lowest loss of the run so far
    seconds: float
    kind: str = "eval"

    def line(self) -> str:
        """The evaluation in one line for people."""
        return (f"step {self.step}  held-out loss {self.eval_loss:.4f}  "
                f"perplexity {self.perplexity:.3f}" + ("  best so far" if self.is_best else ""))


@dataclass
class CheckpointMetrics:
    """One checkpoint, at its start; it is written while training goes on."""
    step: int                  # optimizer steps done
    seconds_held: float        # that the next step waited
    kind: str = "checkpoint"


@dataclass
class SkippedMetrics:
    """A step that no rank took, because its loss or gradient was not a number."""
    step: int                  # from 1
    rows: list                 # ids or places of all its rows
    kind: str = "skipped"


class RunLog:
    """Writes the steps of a run to `metrics.jsonl` and shows them as --log_to asks.

    earlier: the lines of the same run before it was stopped; they stay.
    """

    def __init__(self, folder: str | Path, log_to: str, total_steps: int | None, is_main: bool,
                 earlier: Sequence[dict] = ()):
        self.is_main, self.log_to = is_main, log_to
        self.steps = [StepMetrics(**r) for r in earlier if r["kind"] == "step"]
        self.evaluations = [EvalMetrics(**r) for r in earlier if r["kind"] == "eval"]
        if not is_main: return
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = Path(folder) / "metrics.jsonl"
        self.begin(earlier)
        self.bar = tqdm(total=total_steps, unit="step", disable=log_to != "tqdm",
                        initial=self.steps[-1].step if self.steps else 0,
                        mininterval=0.1 if sys.stderr.isatty() else 10, dynamic_ncols=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self.is_main: return
        if self.waiting: self.write()
        if self.waiting: self.warn("still no room", "its last lines are lost")
        self.bar.close()
        self.file.close()

    def begin(self, records: Sequence[dict]):
        """Start the file with these lines; it is never seen half written."""
        begun = self.path.with_suffix(".partial")
        try:
            begun.write_text("".join(json.dumps(r) + "\n" for r in records))
            begun.replace(self.path)
        except OSError as error:
            raise ValueError(f"--output_dir {self.path.parent}: {self.path.name} can't be written "
                             f"({error.strerror}); make room, or give another folder") from error
        self.file, self.waiting = open(self.path, "ab", buffering=0), b""  # noqa: SIM115  see __exit__

    def rewind(self, step: int):
        """Forget what came after `step`."""
        self.steps = [s for s in self.steps if s.step <= step]
        self.evaluations = [e for e in self.evaluations if e.step <= step]
        if not self.is_main: return
        self.file.close()
        lines = map(json.loads, (self.path.read_bytes() + self.waiting).splitlines())
        self.begin([r for r in lines if r["step"] <= step or r["kind"] == "skipped"])
        self.bar.update(step - self.bar.n)

    def log(self, metrics: StepMetrics):
        """Record and show one step."""
        self.steps.append(metrics)
        if not self.is_main: return
        self.record(metrics)
        if self.log_to == "stdout": print(metrics.line(), flush=True)
        self.bar.set_postfix_str(f"loss {metrics.loss:.3f}, {metrics.tokens_per_second:,.0f} tok/s",
                                 refresh=False)
        self.bar.update()

    def log_evaluation(self, metrics: EvalMetrics):
        """Record and show one evaluation."""
        self.evaluations.append(metrics)
        if not self.is_main: return
        self.record(metrics)
        if self.log_to == "tqdm": self.bar.write(metrics.line())
        elif self.log_to == "stdout": print(metrics.line(), flush=True)

    def record(self, metrics: StepMetrics | EvalMetrics | CheckpointMetrics | SkippedMetrics):
        """One line of JSON in the file, and on the terminal if asked."""
        if not self.is_main: return
        text = json.dumps(asdict(metrics))
        self.write(text + "\n")
        if self.log_to == "jsonl": print(text, flush=True)


    def write(self, text: str = ""):
        """Append to the file. On a full disk lines wait for the next one, and the run goes on."""
        had_room, self.waiting = not self.waiting, self.waiting + text.encode()
        try:
            while self.waiting: self.waiting = self.waiting[self.file.write(self.waiting):]
        except OSError as error:
            if had_room: self.warn(error.strerror, "its lines wait until there is room")

    def warn(self, reason: str, then: str):
        """Say on stderr, beside the bar, that the file can't be written."""
        self.bar.write(f"warning: {self.path} can't be written ({reason}); {then}", file=sys.stderr)


def plot_loss(steps: list[StepMetrics], path: str | Path, title: str = "",
              evaluations: list[EvalMetrics] = ()) -> bool:
    """Draw the losses over optimizer steps as a PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    x, losses = [s.step for s in steps], [s.loss for s in steps]
    axes.plot(x, losses, color="#9db8d2", linewidth=1, label="each step")
    axes.plot(x, smoothed(losses), color="#1f5a99", linewidth=2, label="running mean")
    if evaluations:
        axes.plot([e.step for e in evaluations], [e.eval_loss for e in evaluations], color="#c2571a",
                  linewidth=2, marker="o", markersize=4, label="held-out rows")
    axes.set(xlabel="optimizer step", ylabel="loss per trained token", title=title,
             ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def smoothed(values: list[float], window: int = 10) -> list[float]:
    """Mean of the last `window` values at each place."""
    return [sum(part) / len(part) for i in range(len(values))
            if (part := values[max(0, i - window + 1):i + 1])]
