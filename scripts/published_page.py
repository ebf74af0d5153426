"""docs/references.md: what others published, what is estimated for the same, and what was measured here.

    python scripts/published_page.py

Published figures are those of benchmarks/published/*.yaml, with their sources; estimates are today's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from fsdp_qlora.bench.accuracy import compare
from fsdp_qlora.bench.row import BenchRow, plan_of, read_rows, row_files
from fsdp_qlora.bench.tables import markdown, number, percent
from fsdp_qlora.catalog.arch import ModelShape
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.known_models import bare_name
from fsdp_qlora.catalog.machine import MachineOptions, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.defaults import CLASSIC
from fsdp_qlora.estimate import Estimate, estimate, memory, owned_cost, run_cost
from fsdp_qlora.estimate.report import duration
from fsdp_qlora.plan import Plan
from fsdp_qlora.plan_draft import draft_plan
from fsdp_qlora.planner import free_settings, propose

ROOT = Path(__file__).parents[1]
INTRO = """# Published, estimated, measured

Made by `python scripts/published_page.py` from [benchmarks/published](../benchmarks/published); do not
edit.

Compare the tables of five widely read documents with what `fsdp-qlora estimate` predicts for the same
settings on the same card, and with rows that this project measured on H100s or H200s with those settings,
if there are any. Estimates are of this code, which does the same work in other ways than the published
code, so it may be faster or smaller. Cards that this project never measured are uncalibrated. Errors are
those of today's estimate for a measured row and its own card: of reserved memory, then of a step's seconds;
older code took a little more of either. If a document leaves a setting open, a note under its table says
which value was assumed.
Each estimate is what `fsdp-qlora estimate --defaults classic` prints for the same flags; rows that
are "beyond positions" are longer than their model has positions, and the command takes them with
`--beyond_positions`."""
UNMEASURED = "unmeasured"


def page() -> str:
    """The whole page."""
    rows = [row for path in row_files(ROOT / "benchmarks/results") for row in read_rows(path)]
    rows = [c.row for c in sorted(compare(rows), key=lambda c: not c.old_code)]  # today's code last
    parts = [INTRO]
    for path in sorted((ROOT / "benchmarks/published").glob("*.yaml")):
        document = yaml.safe_load(path.read_text())
        parts.append(f"## {document['title']}\n\nSource: {document['source']}.")
        for table in document["tables"]:
            parts.append(
                f"### {table['title']}\n\n{body(table, rows)}"
                + (f"\n\n{table['taken']}" if "taken" in table else "")
            )
    return "\n\n".join(parts) + "\n"


def body(table: dict, rows: list[BenchRow]) -> str:
    """One table, by its kind."""
    made = dict(
        runs=runs_table, sizes=sizes_table, hours=hours_table, costs=costs_table, facts=facts_table
    )
    return made[table["kind"]](table, rows)


# ---- runs: seconds, speed and memory of one configuration a row --------------------------------


def runs_table(table: dict, rows: list[BenchRow]) -> str:
    """Memory and speed: published, estimated on that card, estimated on H100s, measured."""
    head = [
        "",
        "published GiB",
        "tok/s per GPU",
        "estimated GiB",
        "tok/s per GPU",
        "on H100s tok/s",
        "measured GiB",
        "tok/s per GPU",
        "errors",
    ]
    defaults = table.get("defaults", {})
    return markdown(head, [run_line(defaults | run, rows) for run in table["runs"]])


def run_line(run: dict, rows: list[BenchRow]) -> list[str]:
    """One configuration."""
    found, there = asked(run, run["gpu"]), asked(run, "h100")
    measured = same_settings(there, rows)
    line = [
        run["name"] + " (beyond positions)" * _beyond(run),
        said(run, "gib", 1),
        number(published_speed(run), 0) or said(run, "speed"),
        number(found.memory.peak_reserved, 1),
        speed(found),
        speed(there),
    ]
    if measured is None:
        return [*line, UNMEASURED, "", ""]
    (c,) = compare([measured])
    return [
        *line,
        number(measured.peak_reserved_gib, 1),
        number(measured.tokens_per_second_per_gpu, 0),
        f"{percent(c.reserved_error)}, {percent(c.time_error)}",
    ]


def said(run: dict, name: str, places: int = 0) -> str:
    """A published figure; text such as OOM as it is."""
    value = run.get(name)
    return value if isinstance(value, str) else number(value, places)


def published_speed(run: dict) -> float | None:
    """Tokens per second and GPU: as published, or from the time of a step or of a whole run."""
    gpus = run.get("gpus", 1)
    if "tokens_per_second" in run:
        return run["tokens_per_second"] / gpus
    length = run["context_length"]
    if "seconds_per_step" in run:
        return run.get("batch_size", 1) * length / run["seconds_per_step"]
    if "seconds" in run:
        return run["rows"] * length / run["seconds"] / gpus
    return None


def asked(run: dict, card: str) -> Estimate:
    """The estimate of a published configuration on a card."""
    link = run.get("interconnect") if card != "h100" else None
    machine = machine_from_options(
        MachineOptions(gpu=card, gpus=run.get("gpus", 1), interconnect=link)
    )
    own = dict(
        model_name=run["model"],
        batch_size=run.get("batch_size", 1),
        context_length=run["context_length"],
    )
    config = RunConfig(**CLASSIC | run.get("settings", {}) | own)
    shape = model_shape(run["model"])
    return estimate(replace(shape, max_positions=None) if _beyond(run) else shape, machine, config)


def _beyond(run: dict) -> bool:
    """Whether a configuration's rows are longer than its model has positions."""
    positions = model_shape(run["model"]).max_positions
    return bool(positions) and run["context_length"] > positions


def speed(found: Estimate) -> str:
    """Tokens per second and GPU; what does not fit says so."""
    text = number(found.step.tokens_per_second_per_gpu, 0)
    return text if found.fits_gpu else f"{text} (too large)"


def same_settings(wanted: Estimate, rows: list[BenchRow]) -> BenchRow | None:
    """The last row of the same model, settings and number of GPUs."""
    plan, shape = wanted.plan, wanted.shape
    for row in reversed(rows):
        if row.status != "ok" or row.peer or bare_name(row.model) != bare_name(shape.name):
            continue
        if row.num_hidden_layers == shape.layers and alike(plan_of(row), plan, shape):
            return row
    return None


def alike(row: Plan, plan: Plan, shape: ModelShape) -> bool:
    """Whether two plans are the same in what a table tells."""
    same = (
        "world_size",
        "quant",
        "adapter",
        "lora_rank",
        "cpu_offload",
        "activation_offload",
        "absmax_dtype",
        "micro_batch_size",
        "context_length",
        "compile",
    )

    def told(p: Plan):
        return [p.value(name) for name in same] + [
            p.quantization.compute_dtype == "fp8",
            p.sharding.strategy if p.sharding.world_size > 1 else "",
            p.memory.policies(shape),
        ]

    return told(row) == told(plan)


# ---- sizes: memory of models by method ---------------------------------------------------------


def sizes_table(table: dict, rows: list[BenchRow]) -> str:
    """GB by model and method: published / estimated; no row of these settings was measured."""
    methods = table["methods"]
    head = [
        "model",
        *[f"{name}, {kind}" for name in methods for kind in ("published", "estimated")],
        "measured",
    ]
    lines = []
    for entry in table["models"]:
        cells = [
            text
            for name, settings in methods.items()
            for text in (str(entry.get(name, "")), size(entry.get("model"), settings, table))
        ]
        lines.append([entry["name"], *cells, UNMEASURED])
    return markdown(head, lines)


def size(model: str | None, settings: dict, table: dict) -> str:
    """GiB reserved by one method, or nothing where the model is not known."""
    if model is None:
        return ""
    given = CLASSIC | table.get("defaults", {}) | settings
    config = RunConfig(**given, model_name=model)
    plan = draft_plan(config, 1)
    return number(memory(replace(model_shape(model), max_positions=None), plan).peak_reserved, 1)


# ---- hours: a number of examples on a card -----------------------------------------------------


def hours_table(table: dict, rows: list[BenchRow]) -> str:
    """Wall time of so many rows: published, and estimated for the fastest settings that fit."""
    head = ["", "published", "estimated", "tok/s", "measured"]
    lines, known = [], {}
    for entry in table["runs"]:
        card = entry["gpu"]
        if card not in known:
            config = RunConfig(**CLASSIC | table["settings"])
            shape = model_shape(config.model_name)
            machine = machine_from_options(MachineOptions(gpu=card))
            known[card] = propose(
                shape,
                machine,
                config,
                free_settings(config, set(table["settings"]), everything=True),
            ).choice
        cost = known[card].run(entry["examples"])
        lines.append(
            [
                entry["name"],
                entry["published"],
                duration(cost.hours),
                number(known[card].step.tokens_per_second_per_gpu, 0),
                UNMEASURED,
            ]
        )
    return markdown(head, lines)


# ---- costs: dollars of a run, on rented cards and on cards of one's own ------------------------


def costs_table(table: dict, rows: list[BenchRow]) -> str:
    """Hours and dollars: published, and estimated at the published price or the catalogue's."""
    runs = [table.get("defaults", {}) | run for run in table["runs"]]
    head = ["", "published h", "published $", "estimated h", "estimated $", "$ per GPU and hour"]
    if any("owned" in run for run in runs):
        head += ["owned, published $", "owned, estimated $"]
    return markdown(head, [cost_line(run) for run in runs])


def cost_line(run: dict) -> list[str]:
    """One run."""
    found = asked(run, run["gpu"])
    machine = found.machine
    cost = run_cost(
        found.step,
        machine.gpu,
        gpus=machine.world_size,
        examples=run["examples"],
        length=run["context_length"],
        epochs=run.get("epochs", 1),
        price_per_hour=run.get("price"),
    )
    line = [
        run["name"],
        number(run.get("hours"), 1),
        str(run["dollars"]),
        number(cost.hours, 1),
        number(cost.dollars, 2),
        number(cost.price, 2),
    ]
    if "owned" not in run:
        return line
    owned = owned_cost(cost, machine.gpu, machine.world_size, run["card_price"], 3.0, 0.15).owned
    return [*line, str(run["owned"]), number(owned and owned.dollars, 2)]


# ---- facts: figures of cards and prices, beside the catalogue's --------------------------------


def facts_table(table: dict, rows: list[BenchRow]) -> str:
    """What is said of cards, beside this project's catalogue, which is a datasheet's too."""
    head = ["", *table["columns"]]
    if any("gpu" in entry for entry in table["rows"]):
        head += ["catalogue GiB", "GB/s", "bf16 TFLOP/s", "$ per hour", "calibrated"]
    return markdown(head, [fact_line(entry, table["columns"]) for entry in table["rows"]])


def fact_line(entry: dict, columns: list[str]) -> list[str]:
    """One card, or one setting."""
    line = [entry["name"], *[str(entry.get(column, "")) for column in columns]]
    if "gpu" not in entry:
        return line
    gpu = find_gpu(entry["gpu"])
    return [
        *line,
        f"{gpu.memory_gib:g}",
        f"{gpu.bandwidth_gb_s:,.0f}",
        f"{gpu.bf16_tflops:g}",
        number(gpu.price_per_hour),
        "yes" if gpu.calibrated else "no",
    ]


if __name__ == "__main__":
    (ROOT / "docs/references.md").write_text(page())
