"""The tables of docs/scale.md: what a rank holds and moves, simulated on 8 to 1,024 ranks.

`python scripts/scale_page.py` makes them anew; some minutes on a laptop.
"""

from __future__ import annotations

from pathlib import Path

from fsdp_qlora.config import RunConfig
from fsdp_qlora.simulation import Simulated, simulate

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
BEGIN, END = "<!-- made by scripts/scale_page.py -->\n", "<!-- end -->\n"
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-235b-a22b")
GPUS, TOKENS = 8, 4096  # of a machine; of a rank's micro-batch
CASES = [("full_shard", ranks) for ranks in (8, 64, 256, 1024)] + [
    ("hybrid_full_shard", ranks) for ranks in (64, 1024)
]
GIB = 2**30


def main():
    """Write the page with its tables made anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    tables = "\n".join(map(table, MODELS))
    PAGE.write_text(before + BEGIN + tables + END + rest.partition(END)[2])


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
