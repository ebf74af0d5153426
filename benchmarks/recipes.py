"""Recipes as their pages give them: `train.py --config` on real rows, beside what the run promised.

    python benchmarks/recipes.py /dev/shm 8b-1xh100 dora llama-pro --steps 8 --results rows.jsonl

A checkpoint of random weights of the recipe's model is made under the folder if it is not there. Rows are
of the kind that the recipe is for (`real_rows_data.py`). The plan is that of the card at hand, so a recipe
for a smaller one keeps its own settings and leaves memory unused. Other flags are settings of each run.
Prints tokens per second and peak memory beside the run's own estimate; rows are named `recipe NAME`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from random_checkpoint import write
from real_rows import ROOT, RealRow, gpu_name
from real_rows_data import save_tokenizer, write_rows
from real_rows_figures import failure, figures, records_of, watched
from transformers import AutoConfig, AutoTokenizer

from fsdp_qlora.bench.measure import commit, versions
from fsdp_qlora.bench.row import append_row
from fsdp_qlora.catalog.known_models import known_config
from fsdp_qlora.config import RunConfig, plan_batches
from fsdp_qlora.config.flags import parse
from fsdp_qlora.config.recipe import read_recipe

RECIPES = ROOT / "examples/recipes"
CHATS, DOCUMENTS = ("chat",), ("llama-pro", "continued-pretraining")
LONGEST_MEAN = 1024  # tokens of a row, that rows are made for; those of documents are cut to bins


def model_folder(folder: Path, model_name: str) -> Path:
    """A folder of random weights of the model's shape, with a tokenizer, under `folder`."""
    target = folder / model_name.rsplit("/", 1)[-1].lower()
    if not (target / "model.safetensors.index.json").exists():
        settings = known_config(model_name, None)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        write(target, config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if not (target / "tokenizer.json").exists():
        save_tokenizer(target)
    return target


def kind_of(recipe: str) -> str:
    """The kind of rows that a recipe is for."""
    return "b" if recipe in CHATS else "c" if recipe in DOCUMENTS else "a"


def tokens_of(config: RunConfig, steps: int) -> int:
    """Enough for these steps, rows that are as long as they may be included."""
    batches = plan_batches(config, world_size=1)
    each = config.context_length if batches.unit == "bin" else LONGEST_MEAN
    return int(1.25 * steps * batches.per_step * min(each, config.context_length))


def train_command(path: Path, model: Path, rows: Path, output: Path, options) -> list[str]:
    """What a user types, cut to some steps."""
    settings = dict(
        config=path,
        model_name=model,
        dataset=rows,
        output_dir=output,
        max_steps=options.steps,
        save_model="false",
        log_every=1,
        log_to="stdout",
        world_size=1,
    )
    if any(flag.startswith("--lr_warmup_steps") for flag in read_recipe(str(path)).flags):
        settings["lr_warmup_steps"] = 1  # not longer than the run
    typed = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "train.py"), *typed, *options.settings]


def measured(name: str, options) -> RealRow:
    """The row of one recipe."""
    path = RECIPES / f"{name}.yaml"
    (config,) = parse(["--config", str(path), *options.settings])
    model = options.model or model_folder(options.folder, config.model_name)
    row = RealRow(
        f"recipe {name}",
        kind_of(name),
        "recipe",
        model.name,
        gpu_name(),
        {},
        versions(),
        commit(),
        date.today().isoformat(),
    )
    with tempfile.TemporaryDirectory(prefix="recipes_") as folder:
        rows, output = Path(folder) / "rows.jsonl", Path(folder) / "output"
        tokenizer = AutoTokenizer.from_pretrained(model)
        write_rows(row.data, rows, tokenizer, tokens_of(config, options.steps), options.shrink)
        log = (options.logs or Path(folder)) / f"recipe_{name}.log"
        command = train_command(path, model, rows, output, options)
        code, first = watched(command, log, output / "metrics.jsonl", 60 * options.minutes)
        found = figures(records_of(output / "metrics.jsonl"), options.first)
        row = replace(row, seconds_to_first_step=first, **found)
        return row if code == 0 else replace(row, **failure(code, log))


def line_of(row: RealRow) -> str:
    """A row for people: measured, and the error of what the run promised."""
    if row.status != "ok" or not row.tokens_per_second:
        return f"{row.name}: {row.status} {row.error or 'no step was measured'}"
    found = f"{row.tokens_per_second:,.0f} tokens/s"
    if row.estimate_tokens_per_second:
        found += f", promised {row.estimate_tokens_per_second / row.tokens_per_second - 1:+.1%}"
    if row.peak_allocated_gib:
        error = row.estimate_peak_gib / row.peak_allocated_gib - 1
        found += f"; {row.peak_allocated_gib:.2f} GiB, promised {error:+.1%}"
    return f"{row.name}: {found}"


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where models are, or are made")
    parser.add_argument(
        "recipes", nargs="+", choices=sorted(p.stem for p in RECIPES.glob("*.yaml"))
    )
    parser.add_argument(
        "--model", type=Path, help="a folder to train instead of the recipes' models"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--first", type=int, default=3, help="the first step that counts")
    parser.add_argument("--minutes", type=float, default=4.0, help="after which a run is stopped")
    parser.add_argument(
        "--shrink", type=int, default=1, help="divide the lengths of rows by so much"
    )
    parser.add_argument("--logs", type=Path, help="folder for what runs print")
    parser.add_argument("--results")
    options, options.settings = parser.parse_known_args(argv)
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    for name in options.recipes:
        row = measured(name, options)
        print(line_of(row), flush=True)
        if row.log:
            print(row.log, flush=True)
        if options.results:
            append_row(row, options.results)


if __name__ == "__main__":
    main()
