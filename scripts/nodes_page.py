"""The tables of docs/nodes.md: what each strategy asks of the link between machines, as estimated."""

from __future__ import annotations

from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.machine import Machine
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.choices import STRATEGIES
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import estimate

BEGIN, END = "<!-- made by scripts/make_reference.py -->\n", "<!-- end -->\n"
MODELS = {"meta-llama/Llama-3.1-8B": 8192, "meta-llama/Llama-3.1-70B": 4096}  # and their context
GPU, GPUS, NODES, ROWS = "H100 SXM", 8, 2, 64
SLOWER = 1.1  # the step may take so much longer than with a link that costs nothing
NO_COST = 1e6  # GB/s
SHOWN = (25.0, 3.125, 1.25)  # GB/s per GPU: 200, 25 and 10 Gbit/s


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n".join(map(table, MODELS)) + END + rest.partition(END)[2]


def table(model: str) -> str:
    """One model's strategies."""
    rates = " | ".join(f"s/step at {rate:g}" for rate in SHOWN)
    lines = [
        f"**{model.partition('/')[2]}**, rows of {MODELS[model]:,} tokens, {ROWS} rows a step, "
        f"{NODES} machines of {GPUS} {GPU}, every block recomputed:",
        "",
        f"| strategy | GiB per GPU | s/step, free link | GB/s needed | {rates} |",
        "|---|---|---|---|" + "---|" * len(SHOWN),
    ]
    for name in STRATEGIES:
        free = asked(model, name, NO_COST)
        steps = " | ".join(f"{asked(model, name, rate).step.total:.1f}" for rate in SHOWN)
        lines.append(
            f"| {name} | {free.memory.total:.1f} | {free.step.total:.1f} | "
            f"{needed(model, name):.2g} | {steps} |"
        )
    return "\n".join([*lines, ""])


def asked(model: str, strategy: str, internode_gb_s: float):
    """The estimate over a link of so many GB/s per GPU."""
    gpu = find_gpu(GPU)
    machine = Machine(
        gpu=gpu, gpus=GPUS, nodes=NODES, internode_gb_s=internode_gb_s, memory_gib=gpu.memory_gib
    )
    config = RunConfig(
        model_name=model,
        context_length=MODELS[model],
        global_batch_size=ROWS,
        sharding_strategy=strategy,
    )
    return estimate(model_shape(model), machine, config)


def needed(model: str, strategy: str) -> float:
    """The slowest link, in GB/s per GPU, over which a step is at most `SLOWER` times as long."""
    most, low, high = SLOWER * asked(model, strategy, NO_COST).step.total, 1e-3, NO_COST
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        if asked(model, strategy, middle).step.total > most:
            low = middle
        else:
            high = middle
    return high
