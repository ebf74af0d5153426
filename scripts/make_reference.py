"""Write what is generated: pages of docs/ (flags, recipes, guide, messages, nodes, api), the recipes' schema,
and the types of the names that `fsdp_qlora` imports on first use.

    python scripts/make_reference.py            # tests say when it is needed

A recipe's header names a machine in the estimator's flags; its `expects` line is the estimate for it
and its `measured` line the row of benchmarks/results that is nearest.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import is_dataclass
from pathlib import Path

from fsdp_qlora import cli
from fsdp_qlora.bench import command as bench
from fsdp_qlora.catalog.machine import MachineOptions, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.commands import calibrate, export, planning, report
from fsdp_qlora.config import RunConfig, plan_batches
from fsdp_qlora.config.flags import parse
from fsdp_qlora.config.migration import SAME, TABLES, flag_table
from fsdp_qlora.config.recipe import RecipeOptions
from fsdp_qlora.config.reference import flags_page, schema
from fsdp_qlora.config.run import GROUPS
from fsdp_qlora.estimate import Estimate, estimate
from fsdp_qlora.estimate.report import duration

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from api_page import api_page, public_types  # noqa: E402
from guide_page import guide_page  # noqa: E402
from messages_page import messages_page  # noqa: E402
from nodes_page import with_tables  # noqa: E402

RESULTS = ROOT / "benchmarks/results"
ROWS = 1000  # for which a recipe's header gives the time
# The rows of benchmarks/results nearest to recipes that were not measured themselves.
NEAREST = {
    "8b-1xh100": "8B 1x8192 keep_all",
    "continued-pretraining": "8b_qlora_ddp on 2",
    "70b-4x80gb": "70B 2x2048x4 keep_linears",
    "70b-2x24gb": "70B offload 2x2048, 2 GPUs of 24 GB",
}
INTRO = """# Recipes

Made by `python scripts/make_reference.py` from the headers of [examples/recipes](../examples/recipes);
do not edit.

Start from the recipe nearest to your machine and task. A recipe is a YAML file of settings, one
`name: value` a line, with the names of the [flags](flags.md). `--config recipe.yaml` reads it, and flags of
the command line win:

```bash
python train.py --config examples/recipes/7b-1x24gb.yaml --dataset my.jsonl --dry_run
fsdp-qlora estimate --config examples/recipes/7b-1x24gb.yaml --gpu "RTX 4090"
```

Paths in a recipe are relative to the folder where the command runs. An unknown name is refused with its
line and the nearest name. Editors with the YAML language server check a recipe while you write it: its
first line names the schema, which `fsdp-qlora schema > schema.json` makes.

Most recipes pack short rows into bins of `context_length` tokens, since a micro-batch of one short row leaves
a GPU idle. A step then has as many bins as hold about 32 rows, at most 8 unless there are more GPUs;
`--packing false --global_batch_size 16` makes steps of 16 rows instead.

"Expects" is the prediction of `fsdp-qlora estimate`, for rows as long as `context_length` or full bins.
"Measured" is the recipe itself, or the nearest row of [benchmarks/results](../benchmarks/results) under its
name there. Run `fsdp-qlora bench --config RECIPE --random_weights` to measure a recipe on your machine."""


def pages() -> dict[Path, str]:
    """Each generated file and its text."""
    return {
        ROOT / "docs/flags.md": flags_page(own_options()),
        ROOT / "docs/recipes.md": recipes_page(),
        ROOT / "docs/guide.md": guide_page(),
        ROOT / "docs/migrating.md": migrating_page(),
        ROOT / "docs/messages.md": messages_page(),
        ROOT / "docs/nodes.md": with_tables((ROOT / "docs/nodes.md").read_text()),
        ROOT / "docs/api.md": api_page(),
        ROOT / "fsdp_qlora/__init__.pyi": public_types(),
        ROOT / "examples/recipes/schema.json": json.dumps(schema(), indent=1) + "\n",
    }


def own_options() -> list[type]:
    """The dataclasses of settings that commands add to those of a run."""
    found = [
        RecipeOptions,
        *(
            value
            for module in (planning, cli, report, bench, calibrate, export)
            for value in vars(module).values()
            if is_dataclass(value)
        ),
    ]
    return [
        g
        for g in dict.fromkeys(found)
        if isinstance(g, type) and g.__name__.endswith("Options") and g not in (*GROUPS, RunConfig)
    ]


def recipe_files() -> list[Path]:
    """All recipes."""
    return sorted((ROOT / "examples/recipes").glob("*.yaml"))


def header(path: Path) -> dict[str, str]:
    """What a recipe's comment says: title, machine, run, expects."""
    comments = [
        line.removeprefix("# ") for line in path.read_text().splitlines() if line[:1] == "#"
    ]
    said = dict(re.match(r"(\w+): +(.*)", line).groups() for line in comments[2:])
    return dict(title=comments[1], **said)


def estimated(path: Path) -> Estimate:
    """The estimate of a recipe on the machine of its header."""
    flags = shlex.split(header(path)["machine"])
    config, options = parse(argv := ["--config", str(path), *flags], MachineOptions)
    shape, machine = model_shape(config.model_name), machine_from_options(options)
    if config.is_auto:
        config = planning.planned(shape, machine, config, argv)
    return estimate(shape, machine, config)


def expects(found: Estimate) -> str:
    """An estimate in a line."""
    batches, cost = plan_batches(found.config, found.machine.world_size), found.run(ROWS)
    unit = "bins" if found.config.packing else "rows"
    offloads = found.config.use_cpu_offload or found.config.use_activation_cpu_offload
    host = f", {found.memory.host:.0f} of the host" if offloads else ""
    dollars = "" if cost.dollars is None else f", ${cost.dollars / found.config.num_epochs:.2f}"
    return (
        f"{found.memory.total:.1f} of {found.machine.memory_gib:g} GiB per GPU{host}; "
        f"{found.step.total:.1f} s a step of {batches.per_step} {unit}; {ROWS:,} {unit} in "
        f"{duration(cost.hours)}{dollars}"
    )


def measured(path: Path) -> str:
    """The newest row of a recipe, measured as `recipe NAME`, or the nearest to it, in a line."""
    found = {
        row["name"]: row
        for file in sorted(RESULTS.glob("*.jsonl"), key=lambda f: f.stem[-10:])
        for row in map(json.loads, file.read_text().splitlines())
        if "name" in row and row.get("status") == "ok" and not row.get("peer")
    }
    own, near = f"recipe {path.stem}", NEAREST.get(path.stem)
    if not (row := found.get(own) or found.get(near)):
        return "estimated only"
    how = "as written" if own in found else f"near it, {near}"
    # Rows of benchmarks/recipes.py, or those of `fsdp-qlora bench`, each as long as a bin.
    how += ", real rows," if "data" in row else ", full random rows,"
    speed = row.get("tokens_per_second_per_gpu") or row["tokens_per_second"]
    return (
        f"{how} on {row['gpus']} x {row['gpu']}: {speed:,.0f} tokens/s per GPU, "
        f"{row['peak_allocated_gib']:.1f} GiB"
    )


def migrating_page() -> str:
    """The page with its tables, and its list of names that are taken, made anew."""
    text = (ROOT / "docs/migrating.md").read_text()
    for trainer in TABLES:
        begin = f"<!-- made by scripts/make_reference.py: {trainer} -->\n"
        before, _, rest = text.partition(begin)
        text = before + begin + flag_table(trainer) + "\n<!-- end -->\n"
        text += rest.partition("<!-- end -->\n")[2]
    same = ", ".join(f"`--{name}`" for name in SAME)
    return re.sub(
        r"<!-- same -->.*<!-- end same -->", f"<!-- same -->{same}<!-- end same -->", text
    )


def recipes_page() -> str:
    """The table of recipes."""
    rows = []
    for path in recipe_files():
        said = header(path)
        rows.append(
            f"| [{path.stem}](../examples/recipes/{path.name}) | {said['title']} | "
            f"`{said['machine']}` | {said['expects']} | {measured(path)} |"
        )
    head = ["| recipe | what | machine | expects | measured |", "|---|---|---|---|---|"]
    return "\n".join([INTRO, "", *head, *rows, ""])


if __name__ == "__main__":
    for path in recipe_files():
        lines = f"# expects: {expects(estimated(path))}\n# measured: {measured(path)}"
        path.write_text(
            re.sub(r"^# expects:.*\n# measured:.*$", lines, path.read_text(), flags=re.M)
        )
    for path, text in pages().items():
        path.write_text(text)
