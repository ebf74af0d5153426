"""How far one step's loss and gradients are from fp32: bf16 and fp8 products of dense and NF4 weights.

    python benchmarks/one_step_error.py --results benchmarks/results/quality_step_h200_DATE.jsonl

The same checkpoint, the same adapter and the same rows of a step of each of quality.py's tasks. B is
drawn with a deviation of 0.01, about what training makes of it: at zero, A would have no gradient. The
error of gradients is the norm of the difference over the norm, over all trained weights together; that
of the loss is relative too. Other rows, in fp32, say how large the noise of a batch is beside it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from quality import Job, about, config_of, make_data
from quality_table import error_tables
from torch import Tensor

from fsdp_qlora.adapters import trainable_parameters
from fsdp_qlora.build import build_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import StepLoader, StepSampler, on_device
from fsdp_qlora.dist import process_group, rank_device
from fsdp_qlora.preflight.run_data import load_data, run_tokenizer

CASES = {
    "fp32": dict(train_type="lora", precision="fp32"),
    "bf16": dict(train_type="lora"),
    "bf16, fp8 products": dict(train_type="lora", compute_dtype="fp8"),
    "nf4, fp32 products": dict(train_type="qlora", precision="fp32"),
    "nf4": dict(train_type="qlora"),
    "nf4, fp8 products": dict(train_type="qlora", compute_dtype="fp8"),
}
B_DEVIATION = 0.01


def batches(config: RunConfig) -> list[dict]:
    """The rows of two steps."""
    tokenizer = run_tokenizer(config)
    rows = load_data(config, tokenizer).rows
    sampler = StepSampler(len(rows), config.batch_size, seed=0, max_steps=2)
    loader = StepLoader(
        rows, sampler, micro_batch_size=config.batch_size, pad_token_id=tokenizer.pad_token_id
    )
    return [
        step.micro_batches[0] | dict(num_items_in_batch=step.num_trained_tokens) for step in loader
    ]


def loss_and_gradient(
    model: torch.nn.Module, batch: dict, device: torch.device
) -> tuple[float, Tensor]:
    """The loss of a batch, and all gradients as one vector in float64 on the host."""
    loss = model(**on_device(batch, device)).loss
    loss.backward()
    weights = trainable_parameters(model)
    gradient = torch.cat([weights[name].grad.flatten().double().cpu() for name in sorted(weights)])
    model.zero_grad()
    return loss.item(), gradient


@torch.no_grad()
def draw_b(model: torch.nn.Module):
    """The same B for every case."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in sorted(trainable_parameters(model).items()):
        if "lora_B" in name:
            weight.copy_(B_DEVIATION * torch.randn(weight.shape, generator=generator))


def measured(task: str, options: argparse.Namespace, device: torch.device) -> dict[str, tuple]:
    """Loss and gradient of each case; of fp32 also on other rows."""
    found = {}
    for case, settings in CASES.items():
        config = config_of(
            Job(task, "bf16", 0),
            options.folder,
            model_name=options.model_name,
            device=options.device,
            **settings,
        )
        first, other = batches(config)
        model = build_model(config, device)
        draw_b(model)
        found[case] = loss_and_gradient(model, first, device)
        if case == "fp32":
            found["fp32, other rows"] = loss_and_gradient(model, other, device)
    return found


def errors(found: dict[str, tuple]) -> list[dict]:
    """Each case against fp32 on the checkpoint's weights, and on its own."""

    def distance(case: str, other: str) -> dict:
        (loss, gradient), (true_loss, true_gradient) = found[case], found[other]
        return dict(
            loss=abs(loss / true_loss - 1),
            gradient=((gradient - true_gradient).norm() / true_gradient.norm()).item(),
        )

    return [
        dict(
            case=case,
            loss=found[case][0],
            error=distance(case, "fp32"),
            own_error=distance(case, "nf4, fp32 products" if case.startswith("nf4") else "fp32"),
        )
        for case in found
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; grows")
    parser.add_argument("--model_name", default=".cache/SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--tasks", nargs="+", default=["text_to_sql", "stdlib"])
    parser.add_argument("--folder", type=Path, default=Path(".cache/one_step"), help="data")
    options = parser.parse_args()
    options.processes = 1
    started, device = time.perf_counter(), rank_device(options.device)
    make_data(options.folder, most=16)
    lines = []
    with process_group(device):
        for task in options.tasks:
            lines += [
                dict(task=task, status="ok") | line | about(options)
                for line in errors(measured(task, options, device))
            ]
    with open(options.results, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    print(f"{error_tables(lines)}\n\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
