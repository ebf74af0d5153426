"""Fill torch's compile cache for the cells of grids, several at a time, before they are measured.

    python benchmarks/compile_ahead.py benchmarks/grids/accuracy.yaml --only '1 GPU' --processes 5

Compiling takes most of a cell's time, and one CPU core or two. Blocks of a model are alike, so a step of
a model of two blocks is enough for each activation policy and shape; processes do it beside each other,
which they must not when something is timed. Then `fsdp-qlora bench` finds the graphs on disk. Each rank
has graphs of its own, as its device is part of them: cells of several GPUs are compiled on as many.
"""
from __future__ import annotations

import argparse
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from fsdp_qlora.bench.drive import How, job_of, run_batch
from fsdp_qlora.bench.grid import Cell, read_grid
from fsdp_qlora.bench.row import Row

# What a compiled block does not know of.
OUTSIDE = ("use_cpu_offload", "use_activation_cpu_offload", "use_vocabulary_cpu_offload", "optimizer",
           "gradient_accumulation_steps", "global_batch_size", "sharding_strategy", "cuda_graphs",
           "keep_fp8_weights")
BLOCKS = 2


def thin_cells(cells: list[Cell]) -> list[Cell]:
    """One cell of two blocks for each graph that compiled cells need."""
    found: dict[tuple, Cell] = {}
    for cell in cells:
        if cell.config.is_auto or cell.config.compile is False: continue
        strategy = "ddp" if cell.gpus == 1 else cell.config.sharding_strategy
        for part in cell.config.activation_policy.split(","):
            seen = {k: v for k, v in cell.settings.items() if k not in OUTSIDE}
            seen |= dict(activation_policy=part.split(":")[0], sharding_strategy=strategy)
            thin = replace(cell, name=f"{cell.name}: {part}", num_hidden_layers=BLOCKS,
                           gpu_memory_gib=None, settings=seen)
            graph = {**seen, "gpus": cell.gpus, "sharding_strategy": strategy == "ddp"}
            found.setdefault(tuple(sorted((k, str(v)) for k, v in graph.items())), thin)
    return list(found.values())


def compile_cells(cells: list[Cell], processes: int, minutes: float) -> list[Row]:
    """A step of each, in so many processes; what takes longer than `minutes` in all is left."""
    jobs = [job_of(cell) for cell in cells]
    shares = [jobs[first::processes] for first in range(min(processes, len(jobs)))]
    def share_rows(share): return run_batch(share, How(steps=1, warmup=0, minutes=minutes / len(share)))
    with ThreadPoolExecutor(processes) as pool:
        return [row for rows in pool.map(share_rows, shares) for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("grids", nargs="+")
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=3, help="to stop after")
    options = parser.parse_args()
    cells = [c for path in options.grids for c in read_grid(path).cells
             if re.search(options.only, c.name)]
    started, thin = time.perf_counter(), thin_cells(cells)
    rows = compile_cells(thin, options.processes, options.minutes)
    print(f"{sum(row.status == 'ok' for row in rows)} of {len(thin)} graphs for {len(cells)} cells "
          f"compiled in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
