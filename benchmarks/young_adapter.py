"""How much of what a young adapter gives is left in a 16-bit output, by the way it is added.

    python benchmarks/young_adapter.py

B after so many steps of Adam at the default learning rate, a dense bf16 base. 1 is all of it, on the
average over the outputs; 0 is none: it was below half a step of bf16 and rounded away. Runs on a GPU if
there is one, for what an epilogue rounds first is the library's choice.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

import torch

N, I, O, R, SCALING, LR = 4096, 4096, 4096, 64, 16 / 64, 1e-5  # noqa: E741  the letters of adapted layers


def added_after(x, w, xa, b):
    """As PEFT does: both products rounded, then their sum."""
    return x @ w.t() + xa @ b.t()


def added_by_the_large_product(x, w, xa, b):
    """As lora_ops.py does for a dense base: the small product first, the large one adds to it."""
    return (xa @ b.t()).addmm_(x, w.t())


def added_in_full_precision(x, w, xa, b):
    """The same, where cuBLAS may not reduce in bf16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    y = added_by_the_large_product(x, w, xa, b)
    matmul.allow_bf16_reduced_precision_reduction = before
    return y


def as_further_columns(x, w, xa, b):
    """One product of R more columns; it costs a copy of W."""
    return torch.cat([x, xa], 1) @ torch.cat([w, b], 1).t()


WAYS = (added_after, added_by_the_large_product, added_in_full_precision, as_further_columns)


def shares(steps: int, device: torch.device) -> list[float]:
    """For each way, the part of the adapter's output that is left."""
    torch.manual_seed(0)
    n, i, o = (size if device.type == "cuda" else size // 8 for size in (N, I, O))
    x, w = (torch.randn(rows, i, device=device) for rows in (n, o))
    x, w = x.bfloat16(), (w * i**-0.5).bfloat16()
    xa = (x.float() @ (torch.randn(i, R, device=device) * i**-0.5)).bfloat16()
    b = (SCALING * LR * steps * torch.randn(o, R, device=device).sign()).bfloat16()
    part = xa.double() @ b.double().t()
    found = [
        way(x, w, xa, b).double() - way(x, w, xa, torch.zeros_like(b)).double() for way in WAYS
    ]
    return [((y * part).sum() / part.square().sum()).item() for y in found]


if __name__ == "__main__":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| steps | " + " | ".join(way.__name__.replace("_", " ") for way in WAYS) + " |")
    print("|---|" + "---|" * len(WAYS))
    for steps in (1, 3, 10, 30, 100, 300):
        print(
            f"| {steps} | " + " | ".join(f"{share:.2f}" for share in shares(steps, device)) + " |"
        )
