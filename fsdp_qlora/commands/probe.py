"""`--sharding_strategy auto`: plan, confirm by a few measured steps, go down if it must, remember.

The steps run on random weights and tokens in processes of their own, all ranks of them, so that running
out of memory there costs nothing here (`bench/drive.py`). What was confirmed is kept in
~/.cache/fsdp_qlora/plans and taken again for the same model, GPUs, settings, versions and commit.
"""
from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

from ..bench.drive import How, Job, run_jobs
from ..bench.measure import commit, versions
from ..bench.row import Row
from ..catalog.arch import ModelShape, shape_from_config
from ..catalog.hardware import Gpu
from ..catalog.machine import Machine, MachineOptions, host_memory_here, local_gpus, machine_from_options
from ..config import RunConfig
from ..config.flags import recipe_of, typed_flags
from ..config.settings import shown
from ..dist import launched, ranks_from_env, told_by_main
from ..estimate.peak import CONTEXT_GIB, NCCL_GIB
from ..loading import read_config
from ..planner import Plan, free_settings, make_plan
from ..planner.report import advice, flags
from ..training.launch import world_size

ATTEMPTS = 8
LESS = 0.85                 # of what the failed choice needed, allowed to the next
STEPS = How(steps=3, warmup=2, minutes=10)
BESIDE = CONTEXT_GIB + NCCL_GIB


def planned_argv(config: RunConfig, argv: list[str]) -> list[str]:
    """The command line with everything that was auto chosen.

    Under torchrun rank 0 plans, and the others wait. Raises ValueError if nothing fits.
    """
    argv = [*recipe_of(argv).flags, *argv]
    def changes() -> str: return json.dumps(confirmed_changes(config, argv))
    return with_changes(argv, json.loads(told_by_main(changes) if launched() else changes()))


def with_changes(argv: list[str], changes: dict) -> list[str]:
    """The command line with the chosen settings in place of those that were typed for them."""
    dropped, kept, skip = {*changes, "activation_budget_gib", "config"}, [], False
    for part in argv:
        if part.startswith("--"): skip = part.split("=")[0].removeprefix("--") in dropped
        if not skip: kept.append(part)
    return kept + [p for name, value in changes.items() for p in (f"--{name}", shown(value))]


def confirmed_changes(config: RunConfig, argv: list[str], allowed_gib: float | None = None) -> dict:
    """Settings that were measured to work, from the store or by probes; says every step.

    `allowed_gib` limits the probes' memory in place of the machine's.
    """
    given = set(typed_flags(argv))
    shape = shape_from_config(read_config(config.model_name, **config.source).to_dict(),
                              config.model_name)
    machine, free = machine_here(config), free_settings(config, given)
    file = store_file(shape, machine, config, free)
    if file.exists():
        stored = json.loads(file.read_text())
        print(f"plan of {stored['date']}: {as_flags(stored['changes'])} ({file})", flush=True)
        return stored["changes"]
    plan, row = climb_down(shape, machine, config, free, argv, allowed_gib)
    keep(file, plan, row)
    return plan.changes


def climb_down(shape: ModelShape, machine: Machine, config: RunConfig, free: frozenset[str],
               argv: list[str], allowed_gib: float | None) -> tuple[Plan, Row | None]:
    """The first plan that its probe bears out; each one that does not leaves less to the next."""
    for _ in range(ATTEMPTS):
        plan = make_plan(shape, machine, config, free)
        if plan.choice is None:
            raise ValueError("--sharding_strategy auto: nothing fits; " + "; ".join(advice(plan)))
        print(f"plan: {flags(plan)}: {plan.choice.memory.total:.1f} of {machine.memory_gib:.1f} GiB and "
              f"{plan.choice.step.tokens_per_second_per_gpu:,.0f} tokens/s per GPU by the estimate",
              flush=True)
        if ranks_from_env().nodes > 1:
            print("not probed: several machines", flush=True)
            return plan, None
        row = probe(plan, argv, allowed_gib)
        if row.status == "ok":
            print(f"probe: {measured(row)}", flush=True)
            return plan, row
        if row.status == "error": raise ValueError(f"--sharding_strategy auto: the probe failed: "
                                                   f"{row.error}")
        print(f"probe: out of memory ({row.error}); a plan that needs less", flush=True)
        less = BESIDE + LESS * (plan.choice.memory.total - BESIDE)
        machine = replace(machine, memory_gib=less)
    raise ValueError(f"--sharding_strategy auto: {ATTEMPTS} probes ran out of memory; lower "
                     "--context_length, or free the GPUs")


def probe(plan: Plan, argv: list[str], allowed_gib: float | None) -> Row:
    """A few steps of the plan's choice on all ranks."""
    job = Job("probe", [*with_changes(argv, plan.changes), "--random_weights", "true"],
              plan.machine.world_size, allowed_gib)
    (row,) = run_jobs([job], STEPS)
    return row


def measured(row: Row) -> str:
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
        if config.device == "cpu": raise ValueError("not wanted")
        local_gpus()
        machine = machine_from_options(MachineOptions(gpus=here, nodes=max(1, world // here)))
    except ValueError:
        if config.device == "cuda": raise
        cpu = Gpu(name="CPU", memory_gib=host_memory_here() / here, bf16_tflops=0.5, bandwidth_gb_s=20,
                  source="a guess")
        machine = Machine(gpu=cpu, gpus=here, nodes=max(1, world // here),
                          memory_gib=cpu.memory_gib + BESIDE, here=True)
    return machine


def store_file(shape: ModelShape, machine: Machine, config: RunConfig, free: frozenset[str]) -> Path:
    """Where the plan for exactly this is kept."""
    ignored = ("output_dir", "dataset", "num_epochs", "max_steps", "seed", "lr", "master_port")
    settings = {k: v for k, v in asdict(config).items() if k not in ignored}
    key = json.dumps([asdict(shape), asdict(machine), settings, sorted(free), versions(), commit()],
                     sort_keys=True, default=str)
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "fsdp_qlora" / "plans" / (hashlib.sha256(key.encode()).hexdigest()[:20] + ".json")


def keep(file: Path, plan: Plan, row: Row | None):
    """Store a confirmed plan; a folder that can't be written is said, and costs the next start."""
    kept = dict(changes=plan.changes, date=date.today().isoformat(), row=asdict(row) if row else None)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kept, indent=1))
    except OSError as error:
        print(f"the plan is not kept: {error}", flush=True)


def as_flags(changes: dict) -> str:
    """Settings as they are typed."""
    return " ".join(f"--{name} {shown(value)}" for name, value in changes.items())
