"""What the ranks of a measuring process do: one job after the other, with notes for who started them."""

from __future__ import annotations

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ..config import RunConfig
from ..config.flags import parse
from ..dist import print_main, process_group, rank_device, ranks_from_env
from ..estimate.peak import CONTEXT_GIB, NCCL_GIB
from .batches import RunRows
from .cell_processes import How, Job
from .measure import MemoryLimit, describe_run, measure, summary
from .row import append_row

_OUT_OF_MEMORY = 99  # exit code


def run_jobs_here(config: RunConfig, folder: str | Path, how: How):
    """Measure the jobs of `folder`/jobs.json on these ranks; rows and notes go into the folder.

    Rows also go where jobs.json says. A rank that fails says why in a file and ends at once, since the
    others may wait for it in a collective: the launcher ends them.
    """
    files, device = Path(folder), rank_device(config.device)
    asked = json.loads((files / "jobs.json").read_text())
    with process_group(device, config.timeout_minutes):
        for job in asked["jobs"]:
            try:
                _run_job(Job(**job), files, how, device, asked["results"])
            except Exception as error:
                _give_up(files, error)
            clean_up(device)


def _run_job(job: Job, files: Path, how: How, device: torch.device, results: str | None = None):
    """Measure one job; rank 0 keeps its row."""
    from ..loading import read_config
    from ..run_plan import plan_run

    (config,) = parse(job.argv, prog="fsdp-qlora bench")
    layers = read_config(config.model_name, **config.source).get_text_config().num_hidden_layers
    is_main = ranks_from_env().is_main
    rows = RunRows.read(config) if job.own_rows else None
    config = rows.planned if rows else config
    plan = plan_run(config, device)
    row = describe_run(config, plan, job.name, layers, device)
    row.gpu_memory_limit_gib = job.gpu_memory_gib
    if is_main:
        (files / "current.json").write_text(json.dumps(asdict(row)))
    measure(row, config, plan, how, device, limit_memory(job.gpu_memory_gib, device), rows)
    print_main(summary(row))
    if is_main:
        for path in filter(None, (files / "rows.jsonl", results)):
            append_row(row, path)


def limit_memory(limit_gib: float | None, device: torch.device) -> MemoryLimit:
    """A smaller card: torch may reserve no more than it would there, beside CUDA and NCCL.

    On the CPU, memory of this process is looked at after each step instead.
    """
    if device.type != "cuda":
        return MemoryLimit(limit_gib)
    whole = torch.cuda.get_device_properties(device).total_memory / 2**30
    several = ranks_from_env().world_size > 1
    torchs = (limit_gib or 2 * whole) - CONTEXT_GIB - several * NCCL_GIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, torchs / whole)), device)
    return MemoryLimit(None)


def _give_up(files: Path, error: Exception):
    """Note why, and end this rank."""
    memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(
        error
    )
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    try:
        with open(files / "failed.json", "x") as file:  # the first rank to fail
            file.write(json.dumps(dict(status="oom" if memory else "error", error=line)))
    except FileExistsError:
        pass
    print(
        f"{'out of memory' if memory else 'error'} (rank {ranks_from_env().rank}): {line}",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_OUT_OF_MEMORY if memory else 1)


def clean_up(device: torch.device):
    """Free what the job before held; compiled graphs of other shapes too."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
