"""`fsdp-qlora bench`: one configuration, a grid of them, or a report on what was measured."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ..catalog.known_models import is_known
from ..config import AUTO, RunConfig
from ..config.flags import parse, parse_own
from ..config.settings import opt
from ..writable import check_file
from .cell_processes import How, Job, job_of, run_jobs
from .grid import Grid, model_folder, read_grid
from .row import BenchRow, read_rows


@dataclass
class BenchOptions:
    """Benchmark"""

    steps: int = opt(10, "measured optimizer steps")
    warmup: int = opt(
        3, "steps before that are dropped; two at least where CUDA graphs are captured"
    )
    results: str | None = opt(None, "JSON-lines file the rows are appended to")
    row_name: str = opt("", "name of the row")
    gpu_memory_gib: float | None = opt(None, "measure as on a smaller card", unit="GiB", example=24)
    grid: str | None = opt(
        None, "YAML file of configurations to measure", example="benchmarks/grids/accuracy.yaml"
    )
    only: str | None = opt(
        None,
        "cells of the grid whose name has this in it (a regular expression)",
        example="'2 GPUs'",
    )
    together: int = opt(1, "cells measured by one process before a new one starts")
    cell_minutes: float = opt(10.0, "a cell that takes longer is stopped", unit="minutes")
    again: bool = opt(False, "measure also what --results has for this commit and GPU")
    report: str | None = opt(
        None,
        "results files to print as Markdown instead of measuring, separated "
        "by commas; with --grid, beside what others published, or with auto's "
        "share of the best",
    )
    accuracy: bool = opt(
        False, "with --report: only the errors of today's estimates on rows of today's code"
    )
    against: str | None = opt(None, "with --report: a second results file to compare with")
    picture: str | None = opt(
        None, "with --report: draw estimates over measurements there", example="accuracy.png"
    )
    jobs: str | None = opt(None, "folder of jobs, as one bench gives it to another it starts")


def bench_command(argv: list[str]):
    """Measure steps on random tokens: one configuration, or a grid of them."""
    config, options = parse(
        argv, BenchOptions, prog="fsdp-qlora bench", about=bench_command.__doc__
    )
    _check_options(options)
    how = How(options.steps, options.warmup, options.together, options.cell_minutes)
    if not (options.report or options.jobs):
        _check_starts_ranks()
    if options.report:
        _print_report(options)
    elif options.jobs:
        _measure_jobs(config, options.jobs, argv, how)
    elif options.grid:
        _measure_grid(read_grid(options.grid), options, how)
    else:
        _measure_one(config, options, argv, how)


def _check_options(options: BenchOptions):
    """Ranges, what needs what, and whether files can be written."""
    check_file("results", options.results)
    check_file("picture", options.picture)
    if options.steps < 1:
        raise ValueError(f"--steps must be 1 or more, got {options.steps}")
    if options.warmup < 0:
        raise ValueError(f"--warmup must be 0 or more, got {options.warmup}")
    if options.together < 1:
        raise ValueError(f"--together must be 1 or more, got {options.together}")
    if not options.cell_minutes > 0:
        raise ValueError(f"--cell_minutes must be above 0, got {options.cell_minutes:g}")
    if options.gpu_memory_gib is not None and not options.gpu_memory_gib > 0:
        raise ValueError(f"--gpu_memory_gib must be above 0, got {options.gpu_memory_gib:g}")
    for name in ("against", "picture", "accuracy"):
        if getattr(options, name) and not options.report:
            raise ValueError(f"--{name} goes with --report")
    if not options.only:
        return
    if not options.grid:
        raise ValueError(f"--only {options.only} names cells of a grid; give --grid too")
    try:
        re.compile(options.only)
    except re.error as error:
        raise ValueError(
            f"--only {options.only}: {error}; it is a regular expression: write a "
            "backslash before a sign that is meant as it stands"
        ) from error


def _check_starts_ranks():
    """Each of several ranks would start ranks of its own, on the same GPUs."""
    from ..dist import launched, ranks_from_env

    if not launched() or (started := ranks_from_env().world_size) == 1:
        return
    raise ValueError(
        f"bench starts its ranks itself, on one machine, and torchrun started {started} of "
        "it; run it without torchrun: on all GPUs, or on as many as --world_size says"
    )


def _measure_jobs(config: RunConfig, folder: str, argv: list[str], how: How):
    """The ranks' part."""
    from ..lifecycle.launcher import run_on_ranks
    from .cell_worker import run_jobs_here

    run_on_ranks(config, "bench", argv, lambda c: run_jobs_here(c, folder, how))


def _measure_one(config: RunConfig, options: BenchOptions, argv: list[str], how: How):
    """One configuration, in a process of its own."""
    job = Job(
        options.row_name or config.sharding_strategy,
        parse_own(argv, BenchOptions)[1] + _known_shape(config) + _one_micro_batch(config),
        gpu_memory_gib=options.gpu_memory_gib,
    )
    (row,) = run_jobs([job], how, options.results)
    if row.status == "error":
        sys.exit(1)  # it has said why


def _one_micro_batch(config: RunConfig) -> list[str]:
    """Flags for as short a step as there is, unless rows of a step are given."""
    given = config.gradient_accumulation_steps != AUTO or config.units_per_step != AUTO
    return [] if given else ["--gradient_accumulation_steps", "1"]


def _known_shape(config: RunConfig) -> list[str]:
    """Flags that take a known model's shape from here: random weights need nothing of a hub."""
    if not config.random_weights or not is_known(config.model_name):
        return []
    return ["--model_name", str(model_folder(config.model_name))]


def _measure_grid(grid: Grid, options: BenchOptions, how: How):
    """The cells that are wanted and not measured yet."""
    cells = [c for c in grid.cells if not options.only or re.search(options.only, c.name)]
    if not cells:
        raise ValueError(f"--only {options.only}: no cell of {options.grid} is named so")
    known = _measured_names(options) if not options.again else set()
    jobs = sorted((job_of(c) for c in cells if c.name not in known), key=lambda job: job.gpus)
    if known:
        print(f"{len(cells) - len(jobs)} of {len(cells)} cells are measured already")
    left_to_plan = {c.name for c in cells if c.config.is_auto}
    rows = run_jobs([job for job in jobs if job.name not in left_to_plan], how, options.results)
    if left_to_plan:
        from .auto import run_auto

        rows += [run_auto(job, how, options.results) for job in jobs if job.name in left_to_plan]
    failed = [row for row in rows if row.status != "ok"]
    print(
        f"{len(rows) - len(failed)} measured, {sum(r.status == 'oom' for r in failed)} out of memory, "
        f"{sum(r.status == 'error' for r in failed)} failed"
    )


def _measured_names(options: BenchOptions) -> set[str]:
    """Names of the rows in --results that this commit measured on this kind of GPU.

    None if the commit is not known or the tree has changes.
    """
    if not options.results or not Path(options.results).exists():
        return set()
    from .measure import commit, device_name, this_device

    here, gpu = commit(), device_name(this_device())
    if here == "unknown" or here.endswith("+"):
        return set()
    return {
        row.name
        for row in read_rows(options.results)
        if (row.commit, row.gpu) == (here, gpu) and row.status != "error"
    }


def _print_report(options: BenchOptions):
    """Markdown of a results file, and a picture if asked."""
    from .pictures import scatter
    from .tables import accuracy_lines, accuracy_table, against_table, grid_table, results_table

    rows: list[BenchRow] = [row for path in options.report.split(",") for row in read_rows(path)]
    if options.grid:
        print(grid_table(read_grid(options.grid), rows))
    elif options.against:
        print(against_table(rows, read_rows(options.against)))
    else:
        print((accuracy_table if options.accuracy else results_table)(rows))
        try:
            print("\n" + accuracy_lines(rows))
        except ValueError:
            pass
    if options.picture:
        scatter(rows, options.picture)
