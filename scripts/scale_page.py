"""The tables of docs/scale.md: what a rank holds and moves, simulated on 8 to 1,024 ranks, and which group
size of a hybrid strategy is planned.

`make -C docs scale` makes them anew; some minutes on a laptop.
"""

from __future__ import annotations

from pathlib import Path

from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.machine import Machine
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.config import RunConfig
from fsdp_qlora.planner import propose
from fsdp_qlora.simulation import Simulated, simulate

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
BEGIN, GROUPS, END = (
    "<!-- made by scripts/scale_page.py -->\n",
    "<!-- groups, made by scripts/scale_page.py -->\n",
    "<!-- end -->\n",
)
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-235b-a22b")
GPUS, TOKENS = 8, 4096  # of a machine; of a rank's micro-batch
CASES = [("full_shard", ranks) for ranks in (8, 64, 256, 1024)] + [
    ("hybrid_full_shard", ranks) for ranks in (64, 1024)
]
GIB = 2**30
# Model, card, cards of a machine, machines.
MACHINES = (
    ("llama-3.1-8b", "RTX 4090", 8, 8),
    ("llama-3.1-70b", "RTX 4090", 2, 8),
    ("llama-3.1-70b", "H100 SXM", 8, 8),
    ("llama-3.1-405b", "H100 SXM", 8, 8),
)
NETWORKS = (50.0, 3.125)  # GB/s per GPU: 400 and 25 Gbit/s


def main():
    """Write the page with its tables made anew."""
    page = with_section(PAGE.read_text(), GROUPS, group_table())
    PAGE.write_text(with_section(page, BEGIN, "\n".join(map(table, MODELS))))


def with_section(page: str, begin: str, text: str) -> str:
    """The page with another text between a mark and the next end."""
    before, _, rest = page.partition(begin)
    return before + begin + text + END + rest.partition(END)[2]


def group_table() -> str:
    """Seconds of a step by group size, on machines with a fast and a slow network."""
    lines = [
        "| model | machines | GB/s between | planned | seconds of a step by `--shard_group_size` |",
        "|---|---|---|---|---|",
        *(group_row(*machines, rate) for machines in MACHINES for rate in NETWORKS),
    ]
    return "\n".join([*lines, ""])


def group_row(model: str, card: str, gpus: int, nodes: int, rate: float) -> str:
    """One kind of machines; the planner's choice, and every group that fits."""
    gpu = find_gpu(card)
    machine = Machine(
        gpu=gpu, gpus=gpus, nodes=nodes, internode_gb_s=rate, memory_gib=gpu.memory_gib
    )
    config = RunConfig(
        sharding_strategy="hybrid_full_shard",
        context_length=TOKENS,
        global_batch_size=machine.world_size,
        activation_policy="recompute_all",
    )
    found = propose(model_shape(model), machine, config, frozenset(["shard_group_size"])).fitting
    seconds = {e.config.shard_group_size: e.step.total for e in found}
    shown = ", ".join(f"{size}: {seconds[size]:.1f}" for size in sorted(seconds))
    planned = found[0].config.shard_group_size
    return f"| {model} | {nodes} x {gpus} {card} | {rate:g} | {planned} | {shown} |"


def table(model: str) -> str:
    """One model's strategies and ranks."""
    lines = [
        f"**{model}**",
        "",
        "| strategy | ranks | weights, GiB | trained, GiB | all-gather, GiB | reduce-scatter, GiB "
        "| all-reduce, GiB | calls |",
        "|---|---|---|---|---|---|---|---|",
        *(row(strategy, simulated(model, strategy, ranks)) for strategy, ranks in CASES),
    ]
    return "\n".join([*lines, ""])


def simulated(model: str, strategy: str, ranks: int) -> Simulated:
    """One step of a run with the default settings."""
    config = RunConfig(model_name=model, sharding_strategy=strategy, context_length=TOKENS)
    return simulate(config, ranks, nodes=ranks // GPUS)


def row(strategy: str, found: Simulated) -> str:
    """One line."""
    held, moved = found.memory, found.collectives
    weights = held["frozen"] + held["scales"]
    sizes = [weights, sum(held.values()) - weights]
    sizes += [
        moved[name].bytes if name in moved else 0
        for name in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    cells = [f"{size / GIB:.2f}" for size in sizes]
    calls = sum(m.calls for m in moved.values())
    return f"| {strategy} | {found.world_size:,} | {' | '.join(cells)} | {calls:,} |"


if __name__ == "__main__":
    main()
