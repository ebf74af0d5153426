"""`--sharding_strategy auto`: plan, confirm by a few measured steps, go down if it must, remember.

How is `bench/auto.py`. What was confirmed is kept in
~/.cache/fsdp_qlora/plans and taken again for the same model, GPUs, settings, versions and commit.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from datetime import date
from pathlib import Path

from ..bench.auto import climb_down, machine_here, with_changes
from ..bench.drive import How, Job
from ..bench.measure import commit, versions
from ..bench.row import Row
from ..catalog.arch import ModelShape, shape_from_config
from ..catalog.machine import Machine
from ..config import RunConfig
from ..config.flags import recipe_of, typed_flags
from ..config.settings import shown
from ..dist import launched, told_by_main
from ..json_input import read_object
from ..loading import read_config
from ..planner import Plan, free_settings

STEPS = How(steps=3, warmup=2, minutes=10)


def planned_argv(config: RunConfig, argv: list[str]) -> list[str]:
    """The command line with everything that was auto chosen.

    Under torchrun rank 0 plans, and the others wait. Raises ValueError if nothing fits.
    """
    argv = [*recipe_of(argv).flags, *argv]

    def changes() -> str:
        return json.dumps(confirmed_changes(config, argv))

    return with_changes(argv, json.loads(told_by_main(changes) if launched() else changes()))


def confirmed_changes(config: RunConfig, argv: list[str], allowed_gib: float | None = None) -> dict:
    """Settings that were measured to work, from the store or by probes; says every step.

    `allowed_gib` limits the probes' memory in place of the machine's.
    """
    given = set(typed_flags(argv))
    shape = shape_from_config(
        read_config(config.model_name, **config.source).to_dict(), config.model_name
    )
    machine, free = machine_here(config), free_settings(config, given)
    file = _store_file(shape, machine, config, free)
    if file.exists():
        stored = read_object(file)
        print(f"plan of {stored['date']}: {_as_flags(stored['changes'])} ({file})", flush=True)
        return stored["changes"]
    job = Job("probe", [*argv, "--random_weights", "true"], machine.world_size, allowed_gib)
    plan, row = climb_down(shape, machine, config, free, job, STEPS)
    keep(file, plan, row)
    return plan.changes


def _store_file(
    shape: ModelShape, machine: Machine, config: RunConfig, free: frozenset[str]
) -> Path:
    """Where the plan for exactly this is kept."""
    ignored = ("output_dir", "dataset", "num_epochs", "max_steps", "seed", "lr", "master_port")
    settings = {k: v for k, v in asdict(config).items() if k not in ignored}
    key = json.dumps(
        [asdict(shape), asdict(machine), settings, sorted(free), versions(), commit()],
        sort_keys=True,
        default=str,
    )
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "fsdp_qlora" / "plans" / (hashlib.sha256(key.encode()).hexdigest()[:20] + ".json")


def keep(file: Path, plan: Plan, row: Row | None):
    """Store a confirmed plan; a folder that can't be written is said, and costs the next start."""
    kept = dict(
        changes=plan.changes, date=date.today().isoformat(), row=asdict(row) if row else None
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kept, indent=1))
    except OSError as error:
        print(f"the plan is not kept: {error}", flush=True)


def _as_flags(changes: dict) -> str:
    """Settings as they are typed."""
    return " ".join(f"--{name} {shown(value)}" for name, value in changes.items())
