"""`--sharding_strategy auto`: plan, confirm by a few measured steps, go down if it must, remember.

How is `bench/auto.py`. What was confirmed is kept in ~/.cache/fsdp_qlora/plans and taken again for the
same model, lengths of rows, GPUs, settings, versions and commit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

from ..bench.auto import climb_down, machine_here, with_changes
from ..bench.batches import RunRows
from ..bench.cell_processes import How, Job
from ..bench.measure import commit, versions
from ..bench.row import BenchRow
from ..catalog.arch import ModelShape
from ..catalog.machine import Machine
from ..catalog.shapes import shape_from_config
from ..config import RunConfig
from ..config.flags import parse_own, recipe_of, typed_flags
from ..config.settings import shown
from ..data import RowLengths
from ..dist import broadcast_by_main, launched
from ..json_input import read_object
from ..loading import read_config
from ..planner import Proposal, free_settings, packing_line
from ..preflight.sampled_lengths import sampled_lengths

STEPS = How(steps=3, warmup=2, minutes=10)


def planned_argv(config: RunConfig, argv: list[str], own: type) -> list[str]:
    """The command line with everything that was auto chosen. `own`: settings of the command itself.

    Under torchrun rank 0 plans, and the others wait. Raises ValueError if nothing fits.
    """
    argv = [*recipe_of(argv).flags, *argv]

    def changes() -> str:
        return json.dumps(_confirmed_changes(config, parse_own(argv, own)[1]))

    return with_changes(argv, json.loads(broadcast_by_main(changes) if launched() else changes()))


def _confirmed_changes(
    config: RunConfig, argv: list[str], allowed_gib: float | None = None
) -> dict:
    """Settings that were measured to work, from the store or by probes; says every step.

    `allowed_gib` limits the probes' memory in place of the machine's. Raises what a run would for its
    data, and ValueError if nothing fits.
    """
    given = set(typed_flags(argv))
    shape = shape_from_config(
        read_config(config.model_name, **config.source).to_dict(), config.model_name
    )
    machine, (sample, _) = machine_here(config), sampled_lengths(config)
    free = free_settings(config, given, rows=sample)
    file = _store_file(shape, machine, config, free, sample)
    if file.exists():
        stored = read_object(file)
        print(f"plan of {stored['date']}: {_as_flags(stored['changes'])} ({file})", flush=True)
        return stored["changes"]
    with _data_cache(config) as cache:
        rows = RunRows.read(replace(config, data_cache=cache)).lengths
        flags = with_changes(
            argv, dict(random_weights=True) | (dict(data_cache=cache) if cache else {})
        )
        job = Job("probe", flags, machine.world_size, allowed_gib, own_rows=True)
        plan, row = climb_down(shape, machine, config, free, job, STEPS, rows=rows)
    if line := packing_line(plan):
        print(line, flush=True)
    keep(file, plan, row)
    return plan.changes


@contextmanager
def _data_cache(config: RunConfig) -> Iterator[str | None]:
    """Where the probes' ranks find the tokens that were made for the plan; a stream is read anew."""
    if config.stream or config.data_cache:
        yield config.data_cache
        return
    with TemporaryDirectory(prefix="fsdp_qlora_rows_") as folder:
        yield folder


def _store_file(
    shape: ModelShape,
    machine: Machine,
    config: RunConfig,
    free: frozenset[str],
    rows: RowLengths | None = None,
) -> Path:
    """Where the plan for exactly this is kept."""
    ignored = ("output_dir", "dataset", "num_epochs", "max_steps", "seed", "lr", "master_port")
    settings = {k: v for k, v in asdict(config).items() if k not in ignored}
    key = json.dumps(
        [
            asdict(shape),
            asdict(machine),
            settings,
            sorted(free),
            rows and asdict(rows),
            versions(),
            commit(),
        ],
        sort_keys=True,
        default=str,
    )
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return root / "fsdp_qlora" / "plans" / (hashlib.sha256(key.encode()).hexdigest()[:20] + ".json")


def keep(file: Path, plan: Proposal, row: BenchRow | None):
    """Store a confirmed plan; a folder that can't be written is said, and costs the next start."""
    batches = plan.choice.batches if plan.choice else None
    kept = dict(
        changes=plan.changes,
        date=date.today().isoformat(),
        row=row and asdict(row),
        batches=batches and asdict(batches),  # that the plan expects of the data
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(kept, indent=1))
    except OSError as error:
        print(f"the plan was not saved: {error}", flush=True)


def _as_flags(changes: dict) -> str:
    """Settings as they are typed."""
    return " ".join(f"--{name} {shown(value)}" for name, value in changes.items())
