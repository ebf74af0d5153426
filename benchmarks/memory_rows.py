"""The rows of docs/memory.md: large models on limited memory, each measured by `fsdp-qlora bench`.

    python benchmarks/memory_rows.py benchmarks/results/memory_h100_2026-11-28.jsonl [--only 70b]

Random weights of the named shapes, all layers unless a cut is named; r=64 on seven projections, fp32
adapters and AdamW unless said. A card's size is a limit on torch's allocator: 24 GB = 22.5 GiB, 8 GB
= 6.75 GiB. Rows for more GPUs than there are, and rows without --only's text, are left out.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from fsdp_qlora.known_models import known_config  # noqa: E402

GB24, GB8 = "--gpu_memory_limit_gib 22.5", "--gpu_memory_limit_gib 6.75"
SMALL = "--absmax_dtype int8 --optimizer adamw_8bit"
HOST = "--use_cpu_offload true --use_trained_cpu_offload true"
INPUTS = "--use_activation_cpu_offload true"
SHARDED = "--sharding_strategy full_shard"
NO_P2P = {"NCCL_P2P_DISABLE": "1"}  # consumer cards have no direct path

# name, model, layers (None: all), GPUs, B x T, settings, environment
ROWS = [
    ("70b offload", "Llama-2-70b-hf", None, 2, "2x2048", f"{SHARDED} {HOST} {GB24}", {}),
    ("70b offload int8 absmax 8-bit Adam", "Llama-2-70b-hf", None, 2, "2x2048",
     f"{SHARDED} {HOST} {SMALL} {GB24}", {}),
    ("70b both offloads on 8 GB cards", "Llama-2-70b-hf", None, 2, "2x2048",
     f"{SHARDED} {HOST} {INPUTS} {GB8}", {}),
    ("70b both offloads on one 24 GB card", "Llama-2-70b-hf", None, 1, "1x2048",
     f"{SHARDED} {HOST} {INPUTS} {GB24}", {}),
    ("70b without offload of weights r=16", "Llama-2-70b-hf", None, 2, "1x2048",
     f"{SHARDED} {INPUTS} --lora_rank 16 --absmax_dtype int8 {GB24}", {}),
    ("34b", "Yi-34B", None, 2, "2x2048", f"{SHARDED} {GB24}", {}),
    ("34b offload", "Yi-34B", None, 2, "2x2048", f"{SHARDED} {HOST} {GB24}", {}),
    *[(f"7b {shape}{name}", "Llama-2-7b-hf", None, 2, shape, f"{SHARDED} {more} {GB8}", {})
      for shape in ("1x512", "1x2048") for name, more in (("", ""), (" int8 absmax 8-bit Adam", SMALL))],
    ("8b 16k recompute_all", "Llama-3.1-8B", None, 1, "2x8192", "--sharding_strategy ddp", {}),
    ("8b 16k inputs offloaded", "Llama-3.1-8B", None, 1, "2x8192", f"--sharding_strategy ddp {INPUTS}",
     {}),
    ("8b 16k inputs and vocabulary offloaded", "Llama-3.1-8B", None, 1, "2x8192",
     f"--sharding_strategy ddp {INPUTS} --use_vocabulary_cpu_offload true", {}),
    *[(f"70b width 16 layers {name}", "Llama-2-70b-hf", 16, 2, "4x2048", f"{SHARDED} {more}", {})
      for name, more in (
          ("no offload", ""), ("inputs offloaded", INPUTS),
          ("frozen offloaded", "--use_cpu_offload true --use_trained_cpu_offload false"),
          ("all offloaded", HOST))],
    ("7b no P2P", "Llama-2-7b-hf", None, 2, "1x2048", SHARDED, NO_P2P),
    ("70b width 16 layers no P2P", "Llama-2-70b-hf", 16, 2, "4x2048", SHARDED, NO_P2P),
    ("70b bf16 base offload", "Llama-3.1-70B", None, 2, "2x8192",
     f"{SHARDED} --train_type lora {HOST} {INPUTS}", {}),
]


def model_folder(model: str, layers: int | None, folder: Path) -> Path:
    """A folder with a model's config.json and nothing else."""
    config = known_config(model)
    if layers: config["num_hidden_layers"] = layers
    made = folder / model
    made.mkdir(exist_ok=True)
    (made / "config.json").write_text(json.dumps(config))
    return made


def command(row: tuple, folder: Path, options) -> list[str]:
    """The benchmark of one row."""
    name, model, layers, gpus, shape, settings, _ = row
    rows, tokens = shape.split("x")
    return [sys.executable, "-m", "fsdp_qlora.cli", "bench", "--world_size", str(gpus),
            "--model_name", str(model_folder(model, layers, folder)), "--random_weights", "true",
            "--batch_size", rows, "--context_length", tokens, "--lora_dropout", "0", *settings.split(),
            "--steps", str(options.steps), "--warmup", "2", "--results", options.results,
            "--row_name", f"{name} {shape}" if shape not in name else name]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--list", action="store_true", help="print the commands and run nothing")
    options = parser.parse_args()
    folder = Path(mkdtemp())
    for row in ROWS:
        name, gpus, extra = row[0], row[3], row[6]
        if options.only not in name: continue
        if options.list: print(" ".join(command(row, folder, options)))
        elif torch.cuda.device_count() >= gpus:
            subprocess.run(command(row, folder, options), cwd=ROOT, env=os.environ | extra)
        else: print(f"{name}: left out, it needs {gpus} GPUs")


if __name__ == "__main__":
    main()
