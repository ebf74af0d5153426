"""Loss curves of full fine-tuning with bfloat16 weights under each optimizer, beside float32 AdamW.

    python benchmarks/optimizer_curves.py --output optimizer_curves.jsonl

A small Llama (1.1 million weights, bytes as tokens) first learns this project's Python files in float32.
From there each case goes on with its documentation, on the same rows in the same order. A constant,
small learning rate is what loses updates when bfloat16 weights are rounded to the nearest.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_qlora.optim import build_optimizer

ROOT = Path(__file__).parents[1]
CASES = {
    "float32 adamw": ("adamw", torch.float32),
    "bf16 adamw (nearest)": ("adamw", torch.bfloat16),
    "adamw_bf16": ("adamw_bf16", torch.bfloat16),
    "adamw_8bit": ("adamw_8bit", torch.bfloat16),
    "adafactor": ("adafactor", torch.bfloat16),
}


def tokens(pattern: str) -> torch.Tensor:
    """All files that match, as bytes."""
    text = "\n".join(path.read_text() for path in sorted(ROOT.glob(pattern)))
    return torch.tensor(list(text.encode()), dtype=torch.long)


def batches(data: torch.Tensor, steps: int, rows: int = 16, length: int = 128):
    """Random windows; the same ones for every case."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - length, (rows,), generator=generator)
        yield torch.stack([data[s : s + length] for s in starts.tolist()])


def losses(model, optimizer, data: torch.Tensor, steps: int) -> list[float]:
    """Train on `steps` batches; the loss of each before its update."""
    found = []
    for rows in batches(data, steps):
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def new_model(dtype: torch.dtype):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lrs", type=float, nargs="+", default=[2e-5, 2e-4])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    start = new_model(torch.float32)
    losses(start, build_optimizer(start, "adamw", 2e-3), tokens("fsdp_qlora/*.py"), options.steps)
    for lr in options.lrs:
        for case, (name, dtype) in CASES.items():
            model = new_model(dtype)
            model.load_state_dict(start.state_dict())
            rate = lr * (5 if name == "adafactor" else 1)  # its rate is relative to a weight's size
            curve = losses(
                model, build_optimizer(model, name, rate, 0.0), tokens("docs/*.md"), options.steps
            )
            last = sum(curve[-50:]) / 50
            print(
                f"lr {lr:g}  {case:<22} first {curve[0]:.4f}  mean of last 50 {last:.4f}",
                flush=True,
            )
            if options.output:
                row = dict(case=case, lr=rate, losses=curve, last_50=last)
                with open(options.output, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
