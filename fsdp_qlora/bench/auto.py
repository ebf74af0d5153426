"""What is `auto` in a run: planned, measured, and planned again with less if it runs out of memory.

The steps run on random weights in processes of their own, all ranks of them, so that running out of
memory there costs nothing here (`cell_processes.py`). Their batches are those of the run where it has data.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..catalog.arch import ModelShape
from ..catalog.machine import (
    Machine,
    MachineOptions,
    cpu_machine,
    local_gpus,
    machine_from_options,
)
from ..catalog.shapes import shape_from_config
from ..config import RunConfig, plan_batches
from ..config.flags import parse, typed_flags
from ..config.settings import counted, shown
from ..dist import launched, ranks_from_env
from ..estimate import Estimate, Rows
from ..estimate.peak import CONTEXT_GIB, NCCL_GIB
from ..lifecycle.launcher import world_size
from ..loading import read_config
from ..planner import Proposal, free_settings, propose
from ..planner.report import advice, flags
from .cell_processes import How, Job, run_batch
from .row import BenchRow, append_row, empty_row

ATTEMPTS = 8
_LESS = 0.85  # of what the failed choice needed, allowed to the next
BESIDE = CONTEXT_GIB + NCCL_GIB


def run_auto(job: Job, how: How, results: str | Path | None = None) -> BenchRow:
    """The row of a job with auto settings: of the first plan that is measured to fit.

    Where nothing does, the row says so. It is appended to `results` as soon as it is known.
    """
    try:
        _, row = climb_down(*asked(job), job, how, results)
    except ValueError as error:
        print(error, flush=True)
        row = replace(empty_row(job.name), status="error", error=str(error), gpus=job.gpus)
        if results:
            append_row(row, results)
    assert row, "a bench is on one machine, where plans are measured"
    return row


def asked(job: Job) -> tuple[ModelShape, Machine, RunConfig, frozenset[str]]:
    """What a job asks of the planner here: model, machine, settings, and which of them are free."""
    (config,) = parse(job.argv, prog="fsdp-qlora bench")
    shape = shape_from_config(
        read_config(config.model_name, **config.source).to_dict(), config.model_name
    )
    machine = machine_here(replace(config, world_size=job.gpus or config.world_size))
    if job.gpu_memory_gib:
        machine = replace(machine, memory_gib=job.gpu_memory_gib)
    return shape, machine, config, free_settings(config, set(typed_flags(job.argv)))


def climb_down(
    shape: ModelShape,
    machine: Machine,
    config: RunConfig,
    free: frozenset[str],
    job: Job,
    how: How,
    results: str | Path | None = None,
    rows: Rows | None = None,
) -> tuple[Proposal, BenchRow | None]:
    """The first plan that is measured to fit; each one that does not leaves less memory to the next.

    `job` says what to measure, `auto` settings included; what was measured is appended to `results`.
    It is planned for the data's `rows`, or for full ones.
    Raises ValueError if nothing fits.
    """
    for _ in range(ATTEMPTS):
        plan = propose(shape, machine, config, free, rows)
        if plan.choice is None:
            raise ValueError("--sharding_strategy auto: nothing fits; " + "; ".join(advice(plan)))
        print(f"plan: {flags(plan)}: {_promised(plan.choice)}", flush=True)
        if ranks_from_env().nodes > 1:
            print("not probed: several machines", flush=True)
            return plan, None
        (row,) = run_batch([replace(job, argv=with_changes(job.argv, plan.changes))], how, results)
        if row.status == "ok":
            print(f"probe: {measured(row)}", flush=True)
            return plan, row
        if row.status == "error":
            raise ValueError(f"--sharding_strategy auto: the probe failed: {row.error}")
        print(f"probe: out of memory ({row.error}); a plan that needs less", flush=True)
        less = BESIDE + _LESS * (plan.choice.memory.total - BESIDE)
        machine = replace(machine, memory_gib=less)
    raise ValueError(
        f"--sharding_strategy auto: {ATTEMPTS} probes ran out of memory; lower "
        "--context_length, or free the GPUs"
    )


def with_changes(argv: list[str], changes: dict) -> list[str]:
    """The command line with the chosen settings in place of those that were typed for them."""
    dropped, kept, skip = {*changes, "activation_budget_gib", "config"}, [], False
    for part in argv:
        if part.startswith("--"):
            skip = part.split("=")[0].removeprefix("--") in dropped
        if not skip:
            kept.append(part)
    return kept + [p for name, value in changes.items() for p in (f"--{name}", shown(value))]


def _promised(choice: Estimate) -> str:
    """A plan's figures in words."""
    need, machine, batches = choice.memory.total, choice.machine, choice.batches
    step = ""
    if batches:
        units = plan_batches(choice.config, machine.world_size)
        step = f"; {counted(units.per_step, units.unit)} of {batches.tokens:,.0f} tokens a step"
    return (
        f"{need:.1f} of {machine.memory_gib:.1f} GiB and "
        f"{choice.step.tokens_per_second_per_gpu:,.0f} tokens/s per GPU by the estimate{step}"
    )


def measured(row: BenchRow) -> str:
    """A probe's figures in words."""
    peak = f", {row.peak_reserved_gib:.1f} GiB reserved" if row.peak_reserved_gib else ""
    return f"{row.tokens_per_second_per_gpu:,.0f} tokens/s per GPU{peak}"


def machine_here(config: RunConfig) -> Machine:
    """This machine, with as much of it as the run may use.

    On the CPU its memory is shared by the ranks and the limit; speeds are a guess.
    """
    ranks = ranks_from_env()
    world = ranks.world_size if launched() else world_size(config)
    here = ranks.local_world_size if launched() else world
    try:
        if config.device == "cpu":
            raise ValueError("not wanted")
        local_gpus()
        machine = machine_from_options(MachineOptions(gpus=here, nodes=max(1, world // here)))
    except ValueError:
        if config.device == "cuda":
            raise
        machine = cpu_machine(here, max(1, world // here), BESIDE)
    return machine
