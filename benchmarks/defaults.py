"""Held-out loss with the defaults of `train` and around them: three tasks, three seeds.

    python benchmarks/defaults.py --results benchmarks/results/defaults.jsonl

It makes a small base (quality_base.py), and then takes the defaults, and a sweep of the learning rate
around them, for adapters and for all weights, beside the original script's defaults. `--only` runs
other variants: schedules, rows of a step, alpha, dropout, decay, clipping. Each line of the results is
one run, and runs whose line is there are not run again. The table at the end has the mean loss of the
seeds, and how far it is above the best of the sweep: that is what a default is judged by.
`python scripts/defaults_page.py` puts the table into docs/defaults.md.

Tasks: the demo's questions for SQL (chats, answers trained), source of the standard library (plain
text, all of it trained), and the head of a function of the library from its docstring (instructions).
Each run sees its rows once, so that more rows a step means fewer steps.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import random
import sysconfig
from pathlib import Path

import torch
from defaults_table import TASKS, VARIANTS, tables
from quality import (
    SKIPPED,
    Job,
    about,
    finished,
    make_data,
    run_grid,
    tokenize,
    visible_gpus,
)
from quality_base import make_base

from fsdp_qlora.config import RunConfig

ROWS, HELD_OUT = 640, 128
# What no default decides: speed, and nothing but metrics written.
COMMON = dict(
    train_type="qlora",
    sharding_strategy="ddp",
    compile=False,
    world_size=1,
    use_gradient_checkpointing=False,
    save_model=False,
    checkpoint_minutes=0.0,
    verify_frozen_minutes=0.0,
    resume="none",
    log_to="stdout",
)
# A step's rows at once where a GPU has room for them; the losses are the same.
BATCH = dict(batch_size=8, gradient_accumulation_steps=1)


def make_rows(folder: Path, rows: int):
    """Data of the three tasks, cut to what a run trains on."""
    make_data(folder)
    found = signatures(Path(sysconfig.get_path("stdlib")))
    random.Random(0).shuffle(found)
    _write(folder / "signatures_train.jsonl", found[:rows])
    _write(folder / "signatures_heldout.jsonl", found[-HELD_OUT:])
    _write(folder / "stdlib_train.jsonl", _read(folder / "stdlib_train.jsonl")[:rows])
    for task in ("stdlib", "text_to_sql"):
        _write(folder / f"{task}_heldout.jsonl", _read(folder / f"{task}_heldout.jsonl")[:HELD_OUT])
    questions = Path(inspect.getfile(RunConfig)).parents[1] / "demo" / "text_to_sql_train.jsonl"
    _write(folder / "text_to_sql_train.jsonl", _read(questions)[:rows])


def signatures(root: Path) -> list[dict]:
    """Rows that ask for the head of a function, by the first line of its docstring."""
    rows = []
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text(errors="replace"))):
            if isinstance(node, ast.FunctionDef) and (said := ast.get_docstring(node)):
                asked = f"{path.stem}: {said.splitlines()[0]}"
                answer = f"def {node.name}({ast.unparse(node.args)}):"
                if len(asked) < 120 and len(answer) < 120:
                    rows.append({"instruction": asked, "output": answer})
    return rows


def _read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, rows: list[dict]):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def jobs_of(seeds: int, only: list[str]) -> list[Job]:
    """Seed by seed, the important variants first: a command that is cut off leaves whole seeds."""
    return [
        Job(task, variant, seed)
        for seed in range(seeds)
        for variant in VARIANTS
        for task in TASKS
        if variant.startswith(tuple(only))
    ]


def config_of(job: Job, options: argparse.Namespace) -> RunConfig:
    """A run of one variant: the defaults but for what it names."""
    name = f"{job.task} {job.variant} {job.seed}".replace(" ", "_")
    return RunConfig(
        **COMMON
        | BATCH
        | TASKS[job.task]
        | dict(
            model_name=str(options.base),
            dataset=str(options.folder / f"{job.task}_train.jsonl"),
            eval_dataset=str(options.folder / f"{job.task}_heldout.jsonl"),
            data_cache=str(options.folder / "tokens"),
            output_dir=str(options.folder / name),
            seed=job.seed,
            device=options.device,
        )
        | VARIANTS[job.variant](options.hidden_size)
        | dict(precision=precision(job, options))
    )


def precision(job: Job, options: argparse.Namespace) -> str:
    """bf16 products on a GPU; weights that are trained are stored in fp32."""
    if options.device == "cpu" or not visible_gpus():
        return "fp32"
    return "bf16_autocast" if job.variant.startswith("full") else "bf16"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; grows")
    parser.add_argument("--hidden_size", type=int, default=512, help="of the base")
    parser.add_argument("--layers", type=int, default=4, help="of the base")
    parser.add_argument("--base_steps", type=int, default=600, help="that the base learns")
    parser.add_argument("--base_megabytes", type=int, default=20, help="of its text")
    parser.add_argument("--rows", type=int, default=ROWS, help="of each task")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="default,lr,full,classic", help="variants that begin so")
    parser.add_argument("--jobs", type=int, dest="processes", help="runs side by side")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no run that would end later"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--folder", type=Path, default=Path(".cache/defaults"))
    options = parser.parse_args()
    options.processes = options.processes or (4 if torch.cuda.is_available() else 1)
    options.base = options.folder / f"base{options.hidden_size}"
    options.model_name = str(options.base)
    if not (options.base / "config.json").exists():
        make_base(
            options.base,
            options.hidden_size,
            options.layers,
            options.base_steps,
            megabytes=options.base_megabytes,
        )
    make_rows(options.folder, options.rows)
    base = dict(hidden_size=options.hidden_size)
    done = finished(options.results, **base)
    jobs = {
        job: config_of(job, options)
        for job in jobs_of(options.seeds, options.only.split(","))
        if job not in done
    }
    tokenize([config_of(Job(task, "lr x1", 0), options) for task in TASKS])
    run_grid(jobs, options, about(options) | base)
    print("\n" + tables(_read(options.results)))


if __name__ == "__main__":
    main()
