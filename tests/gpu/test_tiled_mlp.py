"""Tiles of an MLP as a GPU runs them: compiled, the masks, the memory. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_qlora.adapters import trainable_parameters
from fsdp_qlora.build import compile_blocks
from fsdp_qlora.memory.tiled_mlp import apply_tiled_mlp
from fsdp_qlora.model.blocks import decoder_blocks
from tests.test_checkpointing_policy import tiny_model
from tests.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

WIDE, TOKENS = 2048, 8192


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("wide"), num_hidden_layers=1, intermediate_size=WIDE)


def compiled_mlp(folder: str, tiles: int, dropout: float, device: str) -> torch.nn.Module:
    """The adapted MLP of a block, in tiles and compiled as a run does it."""
    torch._dynamo.reset()
    model = apply_tiled_mlp(tiny_model(folder, "lora", dropout=dropout), tiles, ["recompute_all"])
    compile_blocks(model.to(device))
    mlp = decoder_blocks(model)[0].mlp
    if tiles == 1:
        mlp.forward = torch.compile(mlp.forward)
    return mlp


def weighted(mlp: torch.nn.Module, x: Tensor) -> Tensor:
    """A sum over the output, each value with a weight of its own; masks are the same each time."""
    torch.manual_seed(0)
    y = mlp(x)
    return (y * torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)).sum()


def linear_in_last_b(folder: str, device: str) -> tuple[float, float]:
    """What the last layer's B adds to a sum over the output: by the gradient, and by leaving it out.

    Equal only if backward drops the same of that layer's input, and of gate's and up's, as forward.
    """
    mlp = compiled_mlp(folder, 4, 0.5, device)
    x = torch.randn(1, 100, 64, generator=torch.Generator().manual_seed(1)).to(device)
    (b,) = (p for name, p in trainable_parameters(mlp).items() if "down_proj.lora_B" in name)
    whole = weighted(mlp, x.requires_grad_())
    (gradient,) = torch.autograd.grad(whole, b)
    by_gradient = (gradient * b).sum().item()
    with torch.no_grad():
        b.zero_()
    return by_gradient, (whole - weighted(mlp, x)).item()


def test_compiled_tiles_drop_the_same_in_both_directions(folder):
    by_gradient, by_difference = linear_in_last_b(folder, "cuda")
    assert by_gradient == pytest.approx(by_difference, rel=1e-3) and abs(by_gradient) > 1


def test_tiles_hold_a_part_of_the_widest_tensors_in_both_directions(folder):
    """Without tiles at least gate, up and their product, or its gradient; in 8 about one of them."""
    x, peaks = torch.randn(1, TOKENS, 64, device="cuda", requires_grad=True), {}
    for tiles in (1, 8):
        mlp = compiled_mlp(folder, tiles, 0.0, "cuda")
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            weighted(mlp, x).backward()
        peaks[tiles] = torch.cuda.max_memory_allocated() - before
    one = TOKENS * WIDE * 4
    assert peaks[1] > 2.5 * one and peaks[8] < 1.5 * one, peaks
