"""What each format of frozen weights costs and loses, as the table of docs/quantization.md.

    python benchmarks/quantization_error.py [--model_name ./SmolLM2-135M-Instruct] [--rows 256]

Without a model the weights are normal, and heavy-tailed (Student's t with 4 degrees of freedom). The
loss is the norm of the error over the norm of the weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_qlora.choices import FORMATS
from fsdp_qlora.loading import checkpoint_folder
from fsdp_qlora.loading.weight_files import Checkpoint
from fsdp_qlora.quantization.absmax import ABSMAX_DTYPES
from fsdp_qlora.quantization.formats import dequantize_rows, quantize_rows


def random_weights(rows: int) -> dict[str, list[Tensor]]:
    """A weight of each kind, 4,096 wide."""
    torch.manual_seed(0)
    return {
        "normal": [torch.randn(rows, 4096) * 0.02],
        "heavy tails": [torch.distributions.StudentT(4.0).sample((rows, 4096)) * 0.02],
    }


def linear_weights(model_name: str, rows: int) -> Iterator[Tensor]:
    """The first rows of every linear weight of a checkpoint's blocks."""
    checkpoint = Checkpoint(checkpoint_folder(model_name))
    for name, shape in checkpoint.shapes.items():
        if len(shape) == 2 and ".layers." in name:
            yield checkpoint.rows(name, 0, min(rows, shape[0])).float()


def measure(weights: list[Tensor], quant_type: str, absmax_dtype: str) -> tuple[float, float]:
    """Bytes per weight, and the relative error over all weights."""
    stored = values = wrong = whole = 0.0
    for weight in weights:
        packed, scales = quantize_rows(weight, quant_type, absmax_dtype)
        restored = dequantize_rows(packed, scales, weight.shape[1], quant_type, torch.float32)
        stored, values = stored + packed.nbytes + scales.nbytes, values + weight.numel()
        wrong += (restored - weight).square().sum().item()
        whole += weight.square().sum().item()
    return stored / values, (wrong / whole) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model_name")
    parser.add_argument("--rows", type=int, default=256, help="rows of each weight")
    options = parser.parse_args()
    kinds = random_weights(options.rows)
    if options.model_name:
        kinds = {options.model_name: list(linear_weights(options.model_name, options.rows))}
    print(
        "| format | scales | bytes per weight | " + " | ".join(f"loss, {k}" for k in kinds) + " |"
    )
    print("|---" * (3 + len(kinds)) + "|")
    for quant_type in FORMATS:
        for absmax_dtype in ABSMAX_DTYPES:
            found = [measure(weights, quant_type, absmax_dtype) for weights in kinds.values()]
            losses = " | ".join(f"{loss:.2%}" for _, loss in found)
            print(f"| {quant_type} | {absmax_dtype} | {found[0][0]:.3f} | {losses} |")


if __name__ == "__main__":
    main()
