"""A run that `real_rows.py` starts and watches, and what its records say of speed and memory."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from fsdp_qlora.bench.cell_processes import end


def watched(
    argv: list[str], log: Path, metrics: Path, seconds: float
) -> tuple[int | None, float | None]:
    """The exit code of a command, None if it had to be stopped, and the seconds to its first step."""
    started, first = time.monotonic(), None
    with open(log, "w") as out:
        process = subprocess.Popen(
            argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() - started < seconds:
                if first is None and steps_of(records_of(metrics)):
                    first = time.monotonic() - started
                time.sleep(0.1)
            return process.poll(), first
        finally:
            end(process)


def records_of(metrics: Path) -> list[dict]:
    """The whole lines of a run's metrics."""
    if not metrics.exists():
        return []
    lines = metrics.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(records: Iterable[dict]) -> list[dict]:
    """The records of steps."""
    return [r for r in records if r["kind"] == "step"]


def figures(records: list[dict], first: int, gpus: int = 1) -> dict:
    """What a row says of a run's steps, those before `first` left out; speeds are of one GPU."""
    steps = [step | dict(tokens=step["tokens"] / gpus) for step in steps_of(records)]
    start = next((r for r in records if r["kind"] == "start"), {})
    if not steps:
        return {}
    found = dict(
        startup_seconds=start.get("startup_seconds", {}),
        loss_first=steps[0]["loss"],
        loss_last=steps[-1]["loss"],
        compilations=steps[-1].get("compilations"),
        peak_allocated_gib=max(s["peak_allocated_gib"] for s in steps) or None,
        estimate_tokens_per_second=estimated_speed(start, gpus),
        estimate_peak_gib=start.get("estimate", {}).get("peak_allocated_gib"),
    )
    before = [s for s in steps if s["step"] < first]
    measured = steps[len(before) :]
    if not measured:
        return found
    tokens, seconds = (sum(s[name] for s in measured) for name in ("tokens", "seconds"))
    computed = sum(
        s["padded_tokens"] / gpus if s.get("padded_tokens") else s["tokens"] for s in measured
    )
    if before and found["compilations"] is not None:
        found["compilations_after_first"] = found["compilations"] - before[-1]["compilations"]
    return found | dict(
        tokens_per_second=tokens / seconds,
        filled_share=tokens / computed,
        tokens_per_second_from_5=rate([s for s in steps if s["step"] >= 5]),
        tokens_per_micro_batch=tokens / len(measured) / start.get("accumulation", 1),
        seconds_per_step=statistics.median(s["seconds"] for s in measured),
        first_measured_step=first,
        steps_measured=len(measured),
    )


def estimated_speed(start: dict, gpus: int) -> float | None:
    """The tokens per second of one GPU that a run promised at its start."""
    speed = start.get("estimate", {}).get("tokens_per_second")
    return speed / gpus if speed else None


def rate(steps: list[dict]) -> float | None:
    """Tokens per second of some steps."""
    return sum(s["tokens"] for s in steps) / sum(s["seconds"] for s in steps) if steps else None


def failure(code: int | None, log: Path) -> dict:
    """How a command ended that did not end well."""
    lines = log.read_text(errors="replace").strip().splitlines()
    said = next(
        (line for line in reversed(lines) if re.search("error|out of memory", line, re.I)), ""
    )
    memory = code is not None and re.search("out of memory|OutOfMemory", "\n".join(lines[-80:]))
    return dict(
        status="oom" if memory else "error",
        log="\n".join(lines[-30:]),
        error="stopped: out of time" if code is None else said[:300] or f"exit code {code}",
    )
