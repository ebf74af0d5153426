"""The records of a run: each is one JSON line of `metrics.jsonl`.

`line()` is for people, `values()` for trackers such as TensorBoard; a record without them is kept in
the file alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..json_input import from_json

_SHOWN_OF_ANSWER = 70  # characters, in a line
_SHOWN_SCORES = 6  # of --eval_command, in a line


class Record:
    """One thing that happened in a run, after `step` optimizer steps; `kind` names it in the file."""

    step: int
    kind: str

    def line(self) -> str:
        """The record in one line for people."""
        return ""

    def values(self) -> dict[str, float]:
        """Its numbers by the names that trackers show."""
        return {}


@dataclass
class StepMetrics(Record):
    """One optimizer step."""

    step: int  # from 1
    loss: float  # sum over trained tokens of all ranks / their number
    lr: float
    grad_norm: float  # over all trained weights, before clipping
    trained_tokens: int  # over all ranks
    tokens: int  # of the rows themselves, without padding, over all ranks
    seconds: float
    tokens_per_second: float  # over all ranks, padding not counted
    peak_allocated_gib: float  # of this rank's GPU; 0 on the CPU
    loss_scale: float | None = None  # with fp16
    kind: str = "step"
    model_tflops_per_gpu: float | None = None  # None: a family whose shape is not known
    share_of_peak: float | None = None  # of the GPU's dense bf16 rate; None: a card not known
    padded_tokens: int | None = None  # with padding: what was computed
    # Of a mixture, as means over its blocks: rows that the busiest expert got, and experts that got none.
    busiest_expert_share: float | None = None
    idle_expert_share: float | None = None
    compilations: int = 0  # graphs that torch compiled in this process by the end of the step
    token_accuracy: float | None = None  # share of trained tokens with the largest logit

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        return math.isfinite(self.loss + self.grad_norm)

    @property
    def overflowed(self) -> bool:
        """Whether fp16 gradients were too large at this scale: a lower one comes next."""
        return (
            not self.is_finite
            and math.isfinite(self.loss)
            and self.loss_scale is not None
            and self.loss_scale > 1
        )

    def line(self) -> str:
        parts = [
            f"loss {self.loss:.4f}{accuracy_of(self)}",
            f"lr {self.lr:.2e}",
            f"grad_norm {self.grad_norm:.3f}",
            f"{self.tokens_per_second:,.0f} tok/s",
        ]
        if self.model_tflops_per_gpu and self.model_tflops_per_gpu >= 0.05:
            parts.append(self.rate())
        if self.peak_allocated_gib:
            parts.append(f"{self.peak_allocated_gib:.1f} GiB")
        return "  ".join([f"step {self.step}", *parts])

    def rate(self) -> str:
        """Model TFLOP/s of a GPU, and of what its datasheet promises."""
        of_peak = "" if self.share_of_peak is None else f" ({self.share_of_peak:.0%} of peak)"
        digits = 0 if self.model_tflops_per_gpu >= 10 else 1
        return f"{self.model_tflops_per_gpu:.{digits}f} TFLOP/s{of_peak}"

    def values(self) -> dict[str, float]:
        names = (
            "loss",
            "token_accuracy",
            "lr",
            "grad_norm",
            "tokens_per_second",
            "model_tflops_per_gpu",
            "share_of_peak",
            "peak_allocated_gib",
            "seconds",
            "busiest_expert_share",
            "idle_expert_share",
        )
        return {
            f"train/{name}": value for name in names if (value := getattr(self, name)) is not None
        }


@dataclass
class Progress(StepMetrics):
    """Several steps as one: their means, and where the run stands after the last of them."""

    total_steps: int | None = None  # None: until a stream ends
    seconds_left: float | None = None  # without the evaluations to come
    dollars: float | None = None  # so far, for all GPUs; None: no price is known

    def line(self) -> str:
        step = f"step {self.step}" + (f"/{self.total_steps}" if self.total_steps else "")
        parts = [step, super().line().split("  ", 1)[1]]
        if self.seconds_left:
            parts.append(f"{clock(self.seconds_left)} left")
        if self.dollars is not None:
            parts.append(f"${self.dollars:,.2f}")
        return "  ".join(parts)

    def values(self) -> dict[str, float]:
        return super().values() | ({} if self.dollars is None else {"run/dollars": self.dollars})


def mean_of(steps: Sequence[StepMetrics], **where) -> Progress:
    """Steps in a row as one: loss per trained token of all, rates over all, the last learning rate.

    Loss and norm are of the steps that were taken, unless none was.
    """
    last, trained = steps[-1], sum(s.trained_tokens for s in steps)
    seconds, count = sum(s.seconds for s in steps), len(steps)
    taken = [s for s in steps if s.is_finite] or steps

    def mean(name: str, weights: str | None = None) -> float | None:
        if getattr(last, name) is None:
            return None
        counted = steps if weights == "seconds" else taken
        shares = [getattr(s, weights) if weights else 1 for s in counted]
        if not sum(shares):
            return getattr(last, name)
        return sum(getattr(s, name) * n for s, n in zip(counted, shares, strict=True)) / sum(shares)

    return Progress(
        step=last.step,
        loss=mean("loss", "trained_tokens"),
        token_accuracy=mean("token_accuracy", "trained_tokens"),
        lr=last.lr,
        grad_norm=mean("grad_norm"),
        trained_tokens=trained,
        tokens=sum(s.tokens for s in steps),
        seconds=seconds / count,
        tokens_per_second=sum(s.tokens for s in steps) / seconds,
        peak_allocated_gib=max(s.peak_allocated_gib for s in steps),
        compilations=last.compilations,
        padded_tokens=sum(s.padded_tokens or s.tokens for s in steps),
        model_tflops_per_gpu=mean("model_tflops_per_gpu", "seconds"),
        share_of_peak=mean("share_of_peak", "seconds"),
        busiest_expert_share=mean("busiest_expert_share"),
        idle_expert_share=mean("idle_expert_share"),
        **where,
    )


@dataclass
class EvalMetrics(Record):
    """One evaluation on held-out rows."""

    step: int  # optimizer steps done
    eval_loss: float  # sum over all trained tokens of these rows / their number
    perplexity: float  # e ** eval_loss
    trained_tokens: int
    is_best: bool  # the lowest loss of the run so far
    seconds: float
    kind: str = "eval"
    token_accuracy: float | None = None  # share of these tokens with the largest logit

    def line(self) -> str:
        return (
            f"step {self.step}  held-out loss {self.eval_loss:.4f}{accuracy_of(self)}  "
            f"perplexity {self.perplexity:.3f}" + ("  best so far" if self.is_best else "")
        )

    def values(self) -> dict[str, float]:
        found = {"eval/loss": self.eval_loss, "eval/perplexity": self.perplexity}
        accuracy = self.token_accuracy
        return found if accuracy is None else found | {"eval/token_accuracy": accuracy}


@dataclass
class SampleRecord(Record):
    """What the model answers now."""

    step: int  # optimizer steps done; 0 before the first
    samples: list[dict]  # prompt, answer and reference (empty if there is none), as text
    seconds: float
    kind: str = "samples"

    def line(self) -> str:
        first = " ".join(self.samples[0]["answer"].split())
        shown = first if len(first) <= _SHOWN_OF_ANSWER else first[:_SHOWN_OF_ANSWER] + "..."
        return f"step {self.step}  answers {shown!r}"


@dataclass
class ScoreRecord(Record):
    """What --eval_command measured."""

    step: int  # optimizer steps done
    scores: dict[str, float]
    seconds: float
    kind: str = "scores"

    def line(self) -> str:
        shown = [f"{name} {value:.4g}" for name, value in self.scores.items()]
        more = f", and {len(shown) - _SHOWN_SCORES} more" if len(shown) > _SHOWN_SCORES else ""
        return f"step {self.step}  {', '.join(shown[:_SHOWN_SCORES])}{more}"

    def values(self) -> dict[str, float]:
        return {f"eval/{name}": value for name, value in self.scores.items()}


@dataclass
class StartRecord(Record):
    """A run began, or went on from a checkpoint: all that is known before its next step."""

    step: int  # optimizer steps done before
    time: str  # ISO 8601, UTC
    run_id: str  # the same for as long as a run is resumed
    settings: dict  # of RunConfig, with where it runs under "about"; no secrets
    ranks: int
    total_steps: int | None
    micro_batch: int  # rows, or bins under --packing
    accumulation: int
    trained_weights: int
    load_seconds: float
    data: dict  # the data report, and how many rows are trained on and held out
    rows_per_step: int | None = None  # None: a step is of bins
    bins_per_step: int | None = None
    estimate: dict = field(
        default_factory=dict
    )  # GiB and seconds that were predicted, where they were
    startup_seconds: dict[str, float] = field(
        default_factory=dict
    )  # of this process, by what it did
    dollars_per_hour: float | None = None
    kind: str = "start"


@dataclass
class EndRecord(Record):
    """This is how a run ended; a run that was killed has none."""

    step: int
    status: str  # finished, stopped or failed
    message: str
    time: str
    kind: str = "end"


@dataclass
class DataRecord(Record):
    """What happened to the rows of a stream, at its end."""

    step: int
    data: dict
    kind: str = "data"


@dataclass
class RollBackRecord(Record):
    """A run went back to its checkpoint after `step` steps, and left rows of bad steps out."""

    step: int
    from_step: int
    kind: str = "rollback"


@dataclass
class CheckpointMetrics(Record):
    """One checkpoint, at its start; it is written while training goes on."""

    step: int  # optimizer steps done
    seconds_held: float  # that the next step waited
    kind: str = "checkpoint"


@dataclass
class SkippedMetrics(Record):
    """A step that no rank took, because its loss or gradient was not a number."""

    step: int  # from 1
    rows: list  # ids or places of all its rows
    kind: str = "skipped"


def accuracy_of(metrics: StepMetrics | EvalMetrics) -> str:
    """What a line says behind the loss, where it is known."""
    known = metrics.token_accuracy
    return "" if known is None else f"  accuracy {known:.1%}"


def read_record(line: str) -> dict | None:
    """A line of metrics.jsonl; None if it was cut or damaged, and so is no record of its kind."""
    try:
        record = from_json(line)
        {"step": StepMetrics, "eval": EvalMetrics}.get(record["kind"], dict)(**record)
    except (ValueError, TypeError, LookupError):
        return None
    return record if isinstance(record.get("step"), int) else None


# What a run that goes back to a checkpoint does not forget.
HISTORY = ("start", "end", "rollback", "skipped")


def clock(seconds: float) -> str:
    """Seconds as people read them off: 45 s, 12 min, 3 h 05, 2 d 4 h."""
    if not math.isfinite(seconds):
        return "?"
    minutes = seconds / 60
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes:.0f} min"
    hours, minutes = divmod(round(minutes), 60)
    return f"{hours} h {minutes:02}" if hours < 48 else f"{hours // 24} d {hours % 24} h"
