"""Seconds and GB/s to load a model's true shape on N ranks: 16-bit, quantized, and from the cache.

    python benchmarks/loading.py meta-llama/Llama-2-70b-hf --layers 16 --ranks 4 \\
        --results benchmarks/results/loading_h100_2026-11-28.jsonl

The checkpoint is made of random weights in --folder (by default in memory, so that the files are as
in the page cache) and kept for the next time. Every case is a start of its own: `lora` reads all in
bf16, `qlora` quantizes, `cache made` writes --quantized_cache as well, `cache read` reads it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch.distributed as dist

from fsdp_qlora.bench.measure import describe_run, record_memory, synchronize
from fsdp_qlora.bench.row import append_row
from fsdp_qlora.build import build_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import launched, process_group, rank_device, ranks_from_env
from fsdp_qlora.run_plan import plan_run

CASES = ("lora", "qlora", "cache made", "cache read")


def main():
    options = parse()
    if launched():
        return measure(options)
    folder = options.folder / f"{Path(options.model).name}-{options.layers or 'all'}"
    if not (folder / "model.safetensors.index.json").is_file():
        layers = ["--layers", str(options.layers)] if options.layers else []
        run("benchmarks/random_checkpoint.py", options.model, str(folder), *layers)
    for case in options.cases.split(","):
        given = [
            a
            for name in ("quant", "absmax_dtype", "strategy", "workers", "device", "results")
            if (value := getattr(options, name))
            for a in (f"--{name}", str(value))
        ]
        run(
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(options.ranks),
            __file__,
            str(folder),
            "--cases",
            case,
            "--folder",
            str(options.folder),
            *given,
        )


def run(*arguments: str):
    """Run Python with these arguments; stop if it fails."""
    subprocess.run([sys.executable, *arguments], check=True)


def measure(options):
    """Load once on this rank, and print what it took on rank 0."""
    case = options.cases
    config = RunConfig(
        model_name=options.model,
        train_type="lora" if case == "lora" else "qlora",
        quant="none" if case == "lora" else options.quant,
        device=options.device,
        absmax_dtype="fp32" if case == "lora" else options.absmax_dtype,
        sharding_strategy=options.strategy,
        loading_workers=options.workers,
        quantized_cache=str(options.folder / "cache") if "cache" in case else None,
    )
    if case == "cache made" and ranks_from_env().is_main:
        for path in (options.folder / "cache").glob("*.safetensors"):
            path.unlink()
    device = rank_device(config.device)
    with process_group(device):
        dist.barrier()
        start = perf_counter()
        plan = plan_run(config, device)
        model = build_model(config, device, plan=plan)
        synchronize(device)
        dist.barrier()
        row = describe_run(config, plan, f"load, {case}", model.config.num_hidden_layers, device)
        row.load_seconds, row.status = perf_counter() - start, "ok"
        record_memory(row, device)
    if not ranks_from_env().is_main:
        return
    print(json.dumps({k: v for k, v in asdict(row).items() if v is not None}))
    if options.results:
        append_row(row, options.results)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a known hub name; inside a rank, the checkpoint's folder")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--quant", default="nf4")
    parser.add_argument("--absmax_dtype", default="fp32")
    parser.add_argument("--strategy", default="full_shard")
    parser.add_argument("--workers", type=int, default=-1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--results", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
