"""Read a profile: what the device did, and how much communication was not hidden behind it.

Works on the events of a Chrome trace, as torch.profiler writes them. On a GPU these are kernels and
copies with a stream each; on the CPU torch's operators, and gloo's transfers on threads of their
own. Communication is exposed where nothing is computed at the same time: that part a step waits for.
Pure: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_Interval = tuple[float, float]

_COMMUNICATION = {
    "all-gather": r"all_?gather",
    "reduce-scatter": r"reduce_?scatter",
    "all-reduce": r"all_?reduce",
    "broadcast": r"broadcast",
    "other communication": r"nccl|gloo|c10d",
}
COMPUTE = {
    "attention": r"attention|attn|fmha|flash|sdpa",
    "products": r"gemm|gemv|cutlass|xmma|nvjet|cublas|wgmma|aten::(add)?(b?mm|linear|matmul)\b",
    "quantize, dequantize": r"quantize|_nf4",
    "optimizer": r"adam|multi_tensor|foreach",
}
OTHER, _COPIES = "other compute", "copies"


@dataclass(frozen=True)
class Span:
    """One piece of work of the device; times in microseconds."""

    kind: str
    start: float
    end: float
    stream: int

    @property
    def is_communication(self) -> bool:
        return self.kind in _COMMUNICATION

    @property
    def is_compute(self) -> bool:
        return not self.is_communication and self.kind != _COPIES


@dataclass(frozen=True)
class Part:
    """One kind of work; seconds of all steps together, of which `exposed` beside no computation."""

    kind: str
    calls: int
    seconds: float
    exposed: float | None = None  # of communication and copies


@dataclass(frozen=True)
class _Summary:
    """Where the time of the recorded steps goes. `idle` is when the device does nothing at all."""

    steps: int
    seconds: float
    parts: list[Part]
    idle: float


def kind_of(name: str, category: str = "kernel") -> str:
    """What a kernel, copy or operator is, by its name."""
    if category in ("gpu_memcpy", "gpu_memset"):
        return _COPIES
    if re.search(r"nccl|gloo|c10d", name, re.IGNORECASE):
        return next(
            k for k, pattern in _COMMUNICATION.items() if re.search(pattern, name, re.IGNORECASE)
        )
    for kind, pattern in COMPUTE.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return OTHER


def device_spans(events: list[dict]) -> list[Span]:
    """The device's work in a trace, by start."""
    gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = gpu or [*_cpu_operators(events), *transfers(events)]
    spans = [
        Span(kind_of(e["name"], e["cat"]), e["ts"], e["ts"] + e.get("dur", 0), e["tid"])
        for e in found
    ]
    return sorted(spans, key=lambda span: span.start)


def transfers(events: list[dict]) -> list[dict]:
    """gloo's transfers."""
    return [e for e in events if e.get("ph") == "X" and e["name"].startswith("gloo:")]


def _cpu_operators(events: list[dict]) -> list[dict]:
    """The outermost operators of torch and bitsandbytes on threads that transfer nothing."""
    transferring = {e["tid"] for e in transfers(events)}
    own = [
        e
        for e in events
        if e.get("cat") == "cpu_op"
        and e["tid"] not in transferring
        and e["name"].startswith(("aten::", "bitsandbytes::"))
    ]
    outer, busy_until = [], {}
    for event in sorted(own, key=lambda e: (e["ts"], -e.get("dur", 0))):
        if event["ts"] < busy_until.get(event["tid"], 0):
            continue
        busy_until[event["tid"]] = event["ts"] + event.get("dur", 0)
        outer.append(event)
    return outer


def number_of_steps(events: list[dict]) -> int:
    """Steps that the profiler marked."""
    return len({e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")})


def summarize(spans: list[Span], steps: int = 1) -> _Summary:
    """Add up spans by kind; overlaps within a kind count once."""
    if not spans:
        return _Summary(steps, 0.0, [], 0.0)
    whole = spans[0].start, max(span.end for span in spans)
    compute = union((s.start, s.end) for s in spans if s.is_compute)
    parts = []
    for kind in (*COMPUTE, OTHER, *_COMMUNICATION, _COPIES):
        own = [span for span in spans if span.kind == kind]
        times = union((s.start, s.end) for s in own)
        hidden_by = None if not own or own[0].is_compute else compute
        exposed = None if hidden_by is None else length(without(times, hidden_by)) / 1e6
        if own:
            parts.append(Part(kind, len(own), length(times) / 1e6, exposed))
    idle = length(without([whole], union((s.start, s.end) for s in spans))) / 1e6
    return _Summary(steps, (whole[1] - whole[0]) / 1e6, parts, idle)


def union(intervals: Iterable[_Interval]) -> list[_Interval]:
    """The same times as intervals that don't touch, in order."""
    merged: list[_Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def without(times: list[_Interval], others: list[_Interval]) -> list[_Interval]:
    """What of `times` is in none of `others`; both are unions."""
    left: list[_Interval] = []
    others = iter([*others, (float("inf"), float("inf"))])
    cut = next(others)
    for start, end in times:
        while cut[1] <= start:
            cut = next(others)
        while cut[0] < end:
            if start < cut[0]:
                left.append((start, cut[0]))
            start = max(start, cut[1])
            if cut[1] > end:
                break
            cut = next(others)
        if start < end:
            left.append((start, end))
    return left


def length(times: list[_Interval]) -> float:
    """The sum of intervals that don't overlap."""
    return sum(end - start for start, end in times)


def summary_table(summary: _Summary) -> str:
    """The summary as text, per step: a row of each kind, its share, and what of it is exposed."""
    steps = max(1, summary.steps)
    lines = [
        f"one of {steps} recorded steps: {1000 * summary.seconds / steps:.1f} ms",
        f"{'':<22}{'calls':>7}{'ms':>10}{'share':>8}{'exposed ms':>12}",
    ]
    for part in summary.parts:
        exposed = "" if part.exposed is None else f"{1000 * part.exposed / steps:.2f}"
        lines.append(
            f"{part.kind:<22}{part.calls / steps:>7.0f}{1000 * part.seconds / steps:>10.2f}"
            f"{part.seconds / summary.seconds:>8.1%}{exposed:>12}"
        )
    idle = f"{1000 * summary.idle / steps:>10.2f}{summary.idle / max(summary.seconds, 1e-12):>8.1%}"
    return "\n".join([*lines, f"{'nothing':<22}{'':>7}{idle}"])
