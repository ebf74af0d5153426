"""Merge a random adapter into a random checkpoint of a model's true shape: memory, time, equality.

    python benchmarks/merge.py meta-llama/Llama-2-7b-hf NEW_FOLDER [--layers N]

Makes the checkpoint in NEW_FOLDER, merges in a process of its own, and prints one line of JSON.
Memory is that process's anonymous pages: what the kernel caches of files is given back when needed.
Logits are those of the first blocks, base + adapter in PEFT against the merged files. The folder
holds twice the model and is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from random_checkpoint import write
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.catalog.known_models import known_config
from fsdp_qlora.loading import meta_model

RANK, COMPARED_BLOCKS = 64, 4


def write_adapter(folder: Path, config, base: Path):
    """A random rank-64 adapter on every linear layer but the head, in fp32."""
    torch.manual_seed(0)
    linears = {
        n: m
        for n, m in meta_model(config, torch.bfloat16).named_modules()
        if isinstance(m, nn.Linear) and n != "lm_head"
    }
    state = {}
    for name, module in linears.items():
        out, wide = module.weight.shape
        state[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, wide) / wide**0.5
        state[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, RANK) * 0.01
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors", {"format": "pt"})
    LoraConfig(
        task_type="CAUSAL_LM",
        r=RANK,
        lora_alpha=16,
        base_model_name_or_path=str(base),
        target_modules=sorted({n.rpartition(".")[2] for n in linears}),
    ).save_pretrained(folder)


def anonymous_mib(pid: int) -> float:
    """Resident anonymous memory of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0.0


def measured(command: list[str]) -> tuple[float, float]:
    """Seconds of a command, and its peak of anonymous memory in GB, looked at 20 times a second."""
    started, peak = time.perf_counter(), 0.0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_mib(process.pid))
            time.sleep(0.05)
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")
    return time.perf_counter() - started, peak * 2**20 / 1e9


@torch.no_grad()
def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    """Logits of the first blocks, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, num_hidden_layers=COMPARED_BLOCKS
    )
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()(torch.arange(100, 132)[None]).logits


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--merge_base", default="original")
    options = parser.parse_args()
    settings = known_config(options.model)
    if options.layers:
        settings["num_hidden_layers"] = options.layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    options.scratch.mkdir(parents=True)  # new, because it is removed at the end
    base, adapter, merged = (options.scratch / name for name in ("base", "adapter", "merged"))
    try:
        write(base, config, torch.device("cpu"))
        write_adapter(adapter, config, base)
        seconds, peak = measured(
            [
                sys.executable,
                "-m",
                "fsdp_qlora.cli",
                "merge",
                "--adapter_folder",
                str(adapter),
                "--output_dir",
                str(merged),
                "--merge_base",
                options.merge_base,
                "--base_quant",
                "nf4",
            ]
        )
        size = sum(file.stat().st_size for file in merged.glob("*.safetensors"))
        row = dict(
            model=options.model,
            layers=config.num_hidden_layers,
            merge_base=options.merge_base,
            gigabytes=round(size / 1e9, 2),
            seconds=round(seconds, 1),
            peak_anonymous_gb=round(peak, 2),
        )
        if options.merge_base == "original":
            live, found = logits(base, adapter), logits(merged)
            row["logits_relative_difference"] = float((found - live).norm() / live.norm())
            row["adapter_relative_effect"] = float((logits(base) - live).norm() / live.norm())
        print(json.dumps(row))
    finally:
        shutil.rmtree(options.scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
