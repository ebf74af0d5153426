"""Fill torch's compile cache before measuring: for grids, speed rows and recipes, several at a time.

    python benchmarks/compile_ahead.py benchmarks/grids/accuracy.yaml --only '1 GPU' --processes 5
    python benchmarks/compile_ahead.py --rows 8b_qlora_ddp --world_size 4
    python benchmarks/compile_ahead.py --config examples/recipes/34b-2x24gb.yaml --world_size 2

Compiling takes most of a cell's time, and one CPU core or two. Blocks of a model are alike, so a step of
two blocks, or as many as hold each kind, is enough for each policy and shape; processes do it side by side,
which they must not when something is timed. Then `fsdp-qlora bench` finds the graphs on disk. Each rank
has graphs of its own, as its device is part of them: cells of several GPUs are compiled on as many. What
is auto is planned first, for the whole model on this machine, as bench will.
"""

from __future__ import annotations

import argparse
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial

from speed_rows import CASES

from fsdp_qlora.bench.cell_processes import How, Job, job_of, run_batch
from fsdp_qlora.bench.grid import Cell, read_grid
from fsdp_qlora.bench.row import BenchRow
from fsdp_qlora.catalog.llama_pro import expanded_shape
from fsdp_qlora.config import AUTO, RunConfig, plan_batches
from fsdp_qlora.config.flags import parse, typed_flags
from fsdp_qlora.config.recipe import read_recipe
from fsdp_qlora.config.settings import default_of, shown
from fsdp_qlora.estimate import choose_policies
from fsdp_qlora.estimate.policies import choose_tiles
from fsdp_qlora.plan_draft import draft_plan

# What a compiled block does not know of.
OUTSIDE = (
    "use_cpu_offload",
    "use_activation_cpu_offload",
    "use_vocabulary_cpu_offload",
    "optimizer",
    "gradient_accumulation_steps",
    "global_batch_size",
    "sharding_strategy",
    "cuda_graphs",
    "keep_fp8_weights",
    "activation_budget_gib",
    "world_size",
    "resume",
    "llama_pro_path",
)
BLOCKS = 2


def recipe_cell(path: str, gpus: int, gpu_memory_gib: float | None = None) -> Cell:
    """A recipe as `fsdp-qlora bench --config` measures it on so many GPUs."""
    (config,), given = parse(["--config", path]), typed_flags([*read_recipe(path).flags])
    settings = {name: getattr(config, name) for name in sorted(given)} | dict(random_weights=True)
    return Cell(f"recipe {path}", settings, gpus, gpu_memory_gib=gpu_memory_gib)


def settled(cell: Cell) -> Cell:
    """The cell with what is chosen for the whole model in place of auto, a budget and tiles of -1.

    Raises ValueError where nothing fits.
    """
    settings = dict(cell.settings)
    if cell.config.is_auto:
        settings |= planned(cell) | dict(activation_budget_gib=None)
    cell = replace(
        cell, settings={name: value for name, value in settings.items() if value is not None}
    )
    config, shape = cell.config, expanded_shape(cell.shape, cell.config)
    plan, budget = draft_plan(config, cell.gpus), config.activation_budget_gib
    tiles, policy = config.mlp_tiles, config.activation_policy
    if tiles == AUTO:
        tiles = choose_tiles(shape, plan, budget)
    if budget is not None:
        policy = choose_policies(shape, plan.change(mlp_tiles=tiles), budget)
    return replace(
        cell,
        settings=cell.settings
        | dict(mlp_tiles=tiles, activation_policy=policy, activation_budget_gib=None),
    )


def planned(cell: Cell) -> dict:
    """The settings that the plan for this machine sets; bench measures them first."""
    from fsdp_qlora.bench.auto import asked
    from fsdp_qlora.planner import propose

    plan = propose(*asked(job_of(cell)))
    if plan.choice is None:
        raise ValueError("nothing fits")
    print(f"{cell.name}: {' '.join(f'--{name} {shown(v)}' for name, v in plan.changes.items())}")
    return plan.changes


def thin_cells(cells: list[Cell]) -> list[Cell]:
    """One cell of a few blocks for each graph that compiled cells need."""
    found: dict[tuple, Cell] = {}
    default = {f.name: default_of(f) for f in fields(RunConfig)}
    for cell in cells:
        if cell.config.compile is False:
            continue
        try:
            cell = settled(cell)
        except ValueError as error:
            print(f"{cell.name}: left out: {error}")
            continue
        for thin in thinned(cell):
            graph = {k: v for k, v in thin.settings.items() if v != default[k]} | dict(
                gpus=thin.gpus
            )
            graph["sharding_strategy"] = thin.config.sharding_strategy == "ddp"
            found.setdefault(tuple(sorted((k, str(v)) for k, v in graph.items())), thin)
    return list(found.values())


def thinned(cell: Cell) -> list[Cell]:
    """A settled cell cut to its first blocks, once for each of its activation policies."""
    order = cell.shape.order
    blocks = max([BLOCKS, *(1 + order.index(kind) for kind in {*order})])
    config, parts = cell.config, cell.config.activation_policy.split(",")
    strategy = "ddp" if cell.gpus == 1 else config.sharding_strategy
    seen = {name: value for name, value in cell.settings.items() if name not in OUTSIDE}
    seen |= dict(
        sharding_strategy=strategy, batch_size=plan_batches(config, cell.gpus).micro_batch_size
    )
    if config.adapter == "llama_pro":
        seen["llama_pro_blocks"] = 1  # beside one of the base's
    if config.adapted_blocks:
        seen["layers_to_transform"] = "0"  # and one without an adapter
    return [
        replace(
            cell,
            name=f"{cell.name}: {part}",
            num_hidden_layers=blocks,
            gpu_memory_gib=None,
            settings=seen | dict(activation_policy=part.split(":")[0]),
        )
        for part in parts
    ]


def compile_cells(cells: list[Cell], processes: int, minutes: float) -> list[BenchRow]:
    """A step of each, in so many processes; what takes longer than `minutes` in all is left."""
    jobs = [job_of(cell) for cell in cells]
    shares = [jobs[first::processes] for first in range(min(processes, len(jobs)))]
    end = time.perf_counter() + 60 * minutes
    with ThreadPoolExecutor(processes) as pool:
        return [row for rows in pool.map(partial(share_rows, end=end), shares) for row in rows]


def share_rows(jobs: list[Job], end: float) -> list[BenchRow]:
    """A step of each job, one after the other until `end`; one that fails does not keep off the rest."""
    rows: list[BenchRow] = []
    while len(rows) < len(jobs) and (left := (end - time.perf_counter()) / 60) > 0:
        batch = jobs[len(rows) :]
        rows += run_batch(batch, How(steps=1, warmup=0, minutes=left / len(batch)))
    return rows


def wanted_cells(options: argparse.Namespace) -> list[Cell]:
    """Cells of the grids, rows of speed_rows.py, and recipes on as many GPUs as `bench` would take."""
    from fsdp_qlora.lifecycle.launcher import world_size

    found = [
        c
        for path in options.grids
        for c in read_grid(path).cells
        if re.search(options.only, c.name)
    ]
    for name in options.rows:
        found.append(
            Cell(
                name,
                CASES[name].all_settings() | dict(model_name=CASES[name].model),
                options.world_size or CASES[name].gpus[0],
            )
        )
    for path in options.config:
        size = ["--world_size", str(options.world_size)] if options.world_size else []
        gpus = world_size(parse(["--config", path, *size])[0])
        found.append(recipe_cell(path, gpus, options.gpu_memory_gib))
    return found


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grids", nargs="*")
    parser.add_argument("--only", default="", help="cells of grids whose name has this in it")
    parser.add_argument("--rows", nargs="*", default=[], help="of speed_rows.py")
    parser.add_argument(
        "--config", action="append", default=[], help="a recipe; may be given again"
    )
    parser.add_argument("--world_size", type=int, help="GPUs of rows and recipes")
    parser.add_argument(
        "--gpu_memory_gib", type=float, help="of each GPU, for recipes that are auto"
    )
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=3, help="to stop after")
    options = parser.parse_args(argv)
    started, cells = time.perf_counter(), wanted_cells(options)
    thin = thin_cells(cells)
    rows = compile_cells(thin, options.processes, options.minutes)
    print(
        f"{sum(row.status == 'ok' for row in rows)} of {len(thin)} graphs for {len(cells)} cells "
        f"compiled in {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
