"""Adapters that begin from their weights, on a GPU: LoftQ beside PEFT's own, which needs one."""

from __future__ import annotations

import pytest
import torch
from peft.utils.loftq_utils import loftq_init

from fsdp_qlora.lora_init.from_weights import LoraInit, first_values, low_rank_rows
from fsdp_qlora.quantization.formats import dequantize_rows, quantize_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
RANK = 16


def in_nf4(weight: torch.Tensor) -> torch.Tensor:
    return dequantize_rows(*quantize_rows(weight), weight.shape[1], "nf4", torch.float32)


@pytest.mark.parametrize("rounds", [1, 3])
def test_loftq_is_pefts(rounds):
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(384, 512, device="cuda", generator=generator)
    base, a, b = loftq_init(weight, num_bits=4, reduced_rank=RANK, num_iter=rounds)
    ours = first_values(weight, LoraInit("loftq", rounds), RANK, 1.0, torch.float32, in_nf4)
    rest = weight
    if ours.taken:
        rest = weight - low_rank_rows(ours.taken.a, ours.taken.b, 1.0, 0, len(weight))
    tolerance = 1e-4 if rounds == 1 else 0.05  # a value rounded another way moves the next round
    assert ((in_nf4(rest) - base).abs() > 1e-4).float().mean() < 2e-3
    assert (ours.b @ ours.a - b @ a).norm() < tolerance * (b @ a).norm()


@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_16", "olora"])
def test_a_part_is_the_same_on_the_gpu_as_on_the_host(kind):
    weight = torch.randn(384, 512, generator=torch.Generator().manual_seed(0))
    weight[:, :RANK] *= 10  # so that the directions that are taken are far apart from the rest
    found = [
        first_values(w, LoraInit(kind), RANK, 0.5, torch.float32, in_nf4)
        for w in (weight, weight.cuda())
    ]
    here, there = (f.b.cpu() @ f.a.cpu() for f in found)
    assert (here - there).norm() < 1e-2 * here.norm()
    rows = low_rank_rows(found[1].a, found[1].b, 0.5, 100, 300)
    assert torch.equal(rows, low_rank_rows(found[1].a, found[1].b, 0.5, 0, 384)[100:300])
