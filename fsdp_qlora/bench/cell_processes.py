"""Runs cells in processes of their own, so that one that runs out of memory is a row like the others.

A process measures several cells one after the other (`cell_worker.py`) and leaves a note of what it is at; if
it ends early, that cell is the failed one, and a new process goes on after it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from .grid import Cell
from .row import BenchRow, append_row, empty_row, read_rows, row_from_dict

_GRACE_SECONDS = 60  # of a process that is told to end, before it is killed


@dataclass(frozen=True)
class Job:
    """What a process is asked to measure: its command line without the bench's own flags."""

    name: str
    argv: list[str]
    gpus: int | None = None  # None: as the process finds it
    gpu_memory_gib: float | None = None
    num_hidden_layers: int | None = None
    own_rows: bool = False  # of --dataset, as a run trains on them; else random tokens


@dataclass(frozen=True)
class How:
    """How cells are measured."""

    steps: int = 10
    warmup: int = 3
    together: int = 1  # cells a process measures before a new one starts
    minutes: float = 10.0  # for one cell, its start included


def job_of(cell: Cell) -> Job:
    """A grid's cell as a job."""
    return Job(cell.name, cell.argv(), cell.gpus, cell.gpu_memory_gib, cell.num_hidden_layers)


def run_jobs(jobs: list[Job], how: How, results: str | Path | None = None) -> list[BenchRow]:
    """A row for each job, appended to `results` as it comes; failed ones too."""
    rows, left = [], list(jobs)
    while left:
        batch = [job for job in left[: how.together] if job.gpus == left[0].gpus]
        found = run_batch(batch, how, results)
        for row in found:
            if results and row.status != "ok":
                append_row(row, results)
        rows += found
        left = left[len(found) :]
    return rows


def run_batch(batch: list[Job], how: How, results: str | Path | None = None) -> list[BenchRow]:
    """Rows of the first jobs of a batch: of all, or up to the one that failed.

    The process itself appends what it measures to `results`: what is there survives an end of both. A
    failure is the caller's to append.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp_qlora_bench_") as folder:
        files = Path(folder)
        (files / "jobs.json").write_text(
            json.dumps(
                dict(
                    jobs=[vars(job) for job in batch],
                    results=results and str(Path(results).absolute()),
                )
            )
        )
        code = _run_process(command(files, batch[0], how), how.minutes * 60 * len(batch))
        rows = read_rows(files / "rows.jsonl") if (files / "rows.jsonl").exists() else []
        if len(rows) < len(batch):
            rows.append(_failed_row(files, batch[len(rows)], code))
        return rows


def command(files: Path, first: Job, how: How) -> list[str]:
    """The command line of the process that measures a batch."""
    size = [] if first.gpus is None else ["--world_size", str(first.gpus)]
    device = [
        a
        for flag, value in zip(first.argv, first.argv[1:], strict=False)
        if flag in ("--device", "--world_size")
        for a in (flag, value)
    ]
    return [
        sys.executable,
        "-m",
        "fsdp_qlora.cli",
        "bench",
        "--jobs",
        str(files),
        *device,
        *size,
        "--steps",
        str(how.steps),
        "--warmup",
        str(how.warmup),
    ]


def _run_process(argv: list[str], seconds: float) -> int | None:
    """The exit code of a process and all its ranks; None if it had to be stopped.

    It gets no RANK: it starts ranks of its own even where a launcher started this one. It ends with
    this process, also where that is killed.
    """
    from ..lifecycle.launcher import as_launcher_of

    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
        and name
        not in (
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
    }
    process = subprocess.Popen(argv, start_new_session=True, env=as_launcher_of(env))
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen):
    """End a process that still runs, and the ranks that it started.

    Ranks have sessions of their own, so only it can end them: killed at once it would leave them to
    hold the GPUs that the next cell is measured on.
    """
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _failed_row(files: Path, job: Job, code: int | None) -> BenchRow:
    """The row of a job whose process ended: out of memory, an error, or out of time."""
    notes = {
        name: json.loads((files / name).read_text())
        for name in ("current.json", "failed.json")
        if (files / name).exists()
    }
    row = empty_row(job.name)
    current = notes.get("current.json")
    if current and current["name"] == job.name:
        row = row_from_dict(current)
    why = notes.get(
        "failed.json", dict(status="error", error=f"the process ended with code {code}")
    )
    if code is None:
        why = dict(status="error", error="stopped: out of time")
    if code == -signal.SIGKILL or code == 128 + signal.SIGKILL:
        why = dict(status="oom", error="killed by the system, as it does when memory runs out")
    return replace(row, **why)
