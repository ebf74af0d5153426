r"""Ranks that share one GPU: what each rank of a run on several GPUs holds, measured on a machine of one.

    python benchmarks/shared_gpu.py 4 '8b_qlora_hybrid*' 8b_qlora_full_shard --layers 16 \
        --activation_policy recompute_all --results rows.jsonl

Settings of a run (`--activation_policy recompute_all`) replace those of the row, as in one_rank.py. NCCL
refuses two ranks on one GPU unless it takes them for ranks of two machines; then they talk over a socket,
and the GPU has a slice of time for each. So weights, hooks, collectives, losses and memory are those of as
many GPUs, and times mean nothing: a row has none. All ranks together must fit.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

import torch
from one_rank import settings_of
from speed_rows import CASES, chosen, config_folder, measured_row

from fsdp_qlora.bench.row import BenchRow, append_row
from fsdp_qlora.config import AUTO
from fsdp_qlora.dist import free_port, print_main, process_group, rank_device, ranks_from_env

SHARED = "one GPU shared"  # what a row's `peer` says
TIMES = ("seconds_per_step", "seconds_p10", "seconds_p90", "tokens_per_second_per_gpu")
OF_THE_WHOLE_GPU = ("model_tflops_per_gpu", "peak_driver_gib", "load_seconds")


def run_rank(rank: int, port: int, options: argparse.Namespace):
    """Measure all rows as one of the ranks."""
    os.environ |= dict(
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(options.ranks),
        LOCAL_WORLD_SIZE=str(options.ranks),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        NCCL_HOSTID=f"rank {rank}",
        NCCL_NET="Socket",
    )
    device = rank_device("auto")
    with process_group(device):
        for name in chosen(options.rows, options.ranks):
            run_row(name, options, device)


def run_row(name: str, options: argparse.Namespace, device: torch.device) -> BenchRow:
    """Measure one row of speed_rows.py; rank 0 prints its memory and its losses."""
    case, changes = CASES[name], settings_of(options.settings)
    if "gradient_accumulation_steps" in changes:
        changes["global_batch_size"] = AUTO
    model, layers = options.model or case.model, options.layers or case.layers
    config = case.config(config_folder(model, layers), **changes)
    what = options.model.rsplit("/", 1)[-1] if options.model else name
    row = measured_row(f"{what} on {options.ranks}, shared", config, options, device)
    row = replace(row, peer=SHARED, **dict.fromkeys((*TIMES, *OF_THE_WHOLE_GPU)))
    print_main(in_a_line(row))
    if options.results and ranks_from_env().is_main:
        append_row(row, options.results)
    return row


def in_a_line(row: BenchRow) -> str:
    """What a row measured that does not depend on time."""
    if row.status != "ok":
        return f"{row.name}: {row.status}"
    gib = dict(
        peak=row.peak_allocated_gib,
        estimated=row.estimate_peak_gib,
        reserved=row.peak_reserved_gib,
        host=row.peak_host_gib,
    )
    sizes = ", ".join(f"{what} {size:.2f}" for what, size in gib.items() if size)
    return f"{row.name}: GiB {sizes}; loss {row.loss_first:.4f} -> {row.loss_last:.4f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int, help="how many share the GPU")
    parser.add_argument(
        "rows", nargs="+", help="names or patterns in speed_rows.py, of as many GPUs"
    )
    parser.add_argument("--model", help="another known model, in place of the row's")
    parser.add_argument("--layers", type=int, help="cut the model to so many")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--results")
    options, options.settings = parser.parse_known_args()
    chosen(options.rows, options.ranks)
    torch.multiprocessing.spawn(run_rank, (free_port(), options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
