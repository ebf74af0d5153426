"""docs/guide.md: the escalation guide, one section a rung of the planner's ladder, from the estimates.

`python scripts/make_reference.py` writes it; tests/test_guide.py says when that is needed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fsdp_qlora.bench.tables import markdown
from fsdp_qlora.catalog.machine import Machine, MachineOptions, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.flags import parse
from fsdp_qlora.config.recipe import read_recipe
from fsdp_qlora.estimate import Estimate, estimate
from fsdp_qlora.estimate.report import duration
from fsdp_qlora.planner import BEYOND, Rung, flags_of, rungs

ROOT = Path(__file__).parents[1]
MODELS = {
    "7B": "meta-llama/Llama-2-7b-hf",
    "13B": "meta-llama/Llama-2-13b-hf",
    "34B": "01-ai/Yi-34B",
    "70B": "meta-llama/Llama-2-70b-hf",
}
CARDS = {24: "RTX 3090", 48: "RTX A6000", 80: "H100 SXM"}
GPUS, NODES = 2, 2  # of each machine; machines of the hybrids
ROWS, LENGTH = 1024, 2048
BASE = dict(context_length=LENGTH, batch_size=1, lora_rank=64, gradient_accumulation_steps=1)
BEFORE = rungs()[5][1]  # full_shard + gradient checkpointing, on which the steps beyond build
INTRO = f"""# The escalation guide

Made by `python scripts/make_reference.py` from the planner's ladder and the estimates; do not edit.

Climb this ladder when a model does not fit your GPUs: start at the first rung, and take the next one after
an out-of-memory error. Each rung saves memory on top of those before it, and costs speed. `fsdp-qlora plan`
climbs it for your model and machine in a second, without a GPU, and prints the flags of every rung;
`--sharding_strategy auto` trains with the fastest settings that fit, which often lie between two rungs.

```bash
fsdp-qlora plan --model_name llama-2-70b --gpu "RTX 3090" --gpus 2 --context_length {LENGTH}
```

The tables give the memory that each GPU needs (and the host, where something is offloaded) and the time of
{ROWS:,} rows of {LENGTH:,} tokens, for QLoRA of rank 64 on all linear layers without dropout, one row at a
time, on {GPUS} cards of {", ".join(f"{gib} GB ({card})" for gib, card in CARDS.items())}. All figures are
estimated; of speeds only the H100's are measured, and [here](planner.md#how-near-the-estimates-come) is
how near estimates come. The models are
{", ".join(f"{name.rsplit('/', 1)[-1]} ({size})" for size, name in MODELS.items())}.
"""


def guide_page() -> str:
    """The whole page."""
    parts = [INTRO, "## Where to start\n\n" + start_table()]
    parts += [section(f"{n}. {r.name}", r, changes) for n, (r, changes) in enumerate(rungs(), 1)]
    parts.append(
        "## After the ladder\n\nIf nothing fits, take shorter rows or more GPUs. Once something fits, "
        "try a larger batch, and compare with the rungs above at that batch too: checkpointing "
        "with a larger batch can beat keeping all activations with a small one."
    )
    parts += [section(sentence(rung.name), rung, after(rung), "###") for rung in BEYOND]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def sentence(text: str) -> str:
    """A text with a capital, unless it begins with a setting's value."""
    return text if "_" in text.split()[0] else text[0].upper() + text[1:]


def after(rung: Rung) -> dict:
    """What is typed for a step beyond the ladder: on full_shard with gradient checkpointing."""
    return BEFORE | rung.changes if rung.changes else {}


def section(title: str, rung: Rung, changes: dict, level: str = "##") -> str:
    """One rung: why, its command, its figures and its recipes."""
    parts = [f"{level} {title}", sentence(rung.why) + "."]
    if changes:
        same = changes != BEFORE and figures(changes) == figures(BEFORE)
        told = "The estimates are those of rung 6." if same else figures(changes)
        parts += [f"```bash\n{command(changes)}\n```", told]
        if found := recipes_of(changes):
            links = ", ".join(f"[{p.stem}](../examples/recipes/{p.name})" for p in found)
            parts.append(f"Recipes: {links}.")
    return "\n\n".join(parts)


def command(changes: dict) -> str:
    """A rung as it is typed, for the 70B model."""
    nodes = f"--nnodes {NODES} " if is_hybrid(changes) else ""
    rendezvous = "--rdzv_backend c10d --rdzv_endpoint HOST:29500 " if nodes else ""
    given = dict(context_length=LENGTH, batch_size=1) | changes
    own = [f"--{name} {given.pop(name)}" for name in ("context_length", "batch_size")]
    return (
        f"torchrun {nodes}--nproc_per_node {GPUS} {rendezvous}train.py --dataset rows.jsonl \\\n"
        f"    --model_name {MODELS['70B']} {' '.join(own)} \\\n    {flags_of(given)}"
    )


def is_hybrid(changes: dict) -> bool:
    """Whether a rung is for several machines."""
    return changes["sharding_strategy"].startswith("hybrid")


@cache
def machine(gib: int, nodes: int) -> Machine:
    """Two cards of a size, in each of so many machines."""
    return machine_from_options(MachineOptions(gpu=CARDS[gib], gpus=GPUS, nodes=nodes))


def answer(size: str, gib: int, changes: dict) -> Estimate:
    """The estimate of one cell."""
    return _estimated(size, gib, NODES if is_hybrid(changes) else 1, frozenset(changes.items()))


@cache
def _estimated(size: str, gib: int, nodes: int, changes: frozenset) -> Estimate:
    config = RunConfig(**{**BASE, **dict(changes), "model_name": MODELS[size]})
    return estimate(model_shape(MODELS[size]), machine(gib, nodes), config)


def figures(changes: dict) -> str:
    """Memory and time of each model on each card."""
    head = ["", *(f"{GPUS} x {gib} GB" for gib in CARDS)]
    lines = [[size, *(cell(answer(size, gib, changes)) for gib in CARDS)] for size in MODELS]
    return markdown(head, lines)


def cell(found: Estimate) -> str:
    """Memory, and time if it fits."""
    need = f"{found.memory.total:.1f} GiB"
    if found.plan.memory.cpu_offload or found.plan.memory.activation_offload:
        need += f" + {found.memory.host:.0f} of the host"
    if not found.fits:
        return f"{need}: too large"
    hours = ROWS * LENGTH / (found.step.tokens_per_second_per_gpu * found.machine.world_size) / 3600
    return f"{need}, {duration(hours)}"


def start_table() -> str:
    """The first rung that fits each model on each card."""
    head = ["", *(f"{GPUS} x {gib} GB" for gib in CARDS)]
    lines = []
    for size in MODELS:
        firsts = []
        for gib in CARDS:
            fitting = (
                f"{n}. {rung.name}"
                for n, (rung, changes) in enumerate(rungs(), 1)
                if answer(size, gib, changes).fits
            )
            firsts.append(next(fitting, "none"))
        lines.append([size, *firsts])
    return "The first rung that fits:\n\n" + markdown(head, lines)


def recipes_of(changes: dict) -> list[Path]:
    """The recipes that stand on a rung: the same strategy, offloads and whether all is kept."""
    return [
        path for path in sorted((ROOT / "examples/recipes").glob("*.yaml")) if stands(path, changes)
    ]


@cache
def _config_of(path: Path) -> RunConfig:
    (config,) = parse([*read_recipe(str(path)).flags])
    return config


def stands(path: Path, changes: dict) -> bool:
    """Whether a recipe has a rung's settings; some blocks recomputed is checkpointing too."""
    config = _config_of(path)
    has = {name: getattr(config, name) for name in changes}
    if has.get("activation_policy", "keep_all") != "keep_all":
        has["activation_policy"] = "recompute_all"
    return has == changes
