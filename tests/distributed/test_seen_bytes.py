"""The packed bytes and scales that a forward uses are those that are stored, under every strategy.

bf16 carries the bytes, and some of them are NaN patterns: a cast, or a copy through arithmetic, would
change them. `tests/gpu` runs the same over NCCL.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fsdp_qlora.quantization.quantize import QuantLinear
from tests.ranks import run_ranks
from tests.tiny import padded_batch, save_tiny, tiny_rows

STEPS = tiny_rows(steps=5, rows_per_step=4)
SHAPE = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=97)
LINEARS = 28


def train_watched(folder: str, cases: list[dict], device_type: str) -> list[dict]:
    """Losses of each case, and whether the first step's forwards saw the bytes that are stored."""
    import torch.distributed as dist

    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import rank_device
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    results, device = [], rank_device(device_type)
    for case in cases:
        config = RunConfig(
            **dict(model_name=folder, lora_rank=4, lora_dropout=0.0, lora_alpha=8, seed=7) | case
        )
        model = build_model(config, device)
        equal = watch(model)
        optimizer = build_optimizer(model, "adamw", 1e-3, 0.1)
        losses = []
        for rows in STEPS:
            mine = rows[dist.get_rank() :: dist.get_world_size()]
            losses.append(
                float(
                    train_step(
                        model, optimizer, [padded_batch([r]) for r in mine], max_grad_norm=1.0
                    ).loss
                )
            )
        results.append(dict(losses=losses, seen=len(equal), bytes_equal=all(equal.values())))
    return results


def watch(model) -> dict[int, bool]:
    """Fills, in each forward of a block, whether its layers' bytes and scales are the stored ones."""
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.model.blocks import decoder_blocks

    equal: dict[int, bool] = {}
    stored = {
        id(m): packed_bits(full_tensor(m.weight), full_tensor(m.absmax))
        for m in model.modules()
        if isinstance(m, QuantLinear)
    }
    # After FSDP's own pre-forward hook the parameters are whole.
    for block in decoder_blocks(model):
        block.register_forward_pre_hook(partial(compare, stored, equal))
    return equal


def packed_bits(weight, absmax) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.detach().cpu().view(torch.int16).clone(), absmax.detach().cpu().clone()


def compare(stored: dict, equal: dict, block, _):
    for m in block.modules():
        if isinstance(m, QuantLinear):
            now = packed_bits(m.weight, m.absmax)
            equal[id(m)] = all(map(torch.equal, now, stored[id(m)])) and equal.get(id(m), True)


@pytest.mark.slow
def test_every_forward_sees_the_stored_bytes(tmp_path):
    folder = save_tiny(tmp_path, **SHAPE)
    cases = [dict(sharding_strategy=s) for s in ("ddp", "shard_grad_op", "full_shard")]
    cases += [
        dict(sharding_strategy="full_shard", use_cpu_offload=True),
        dict(sharding_strategy="full_shard", precision="fp32"),
    ]
    for results in run_ranks(train_watched, 2, folder, cases, "cpu"):
        for case, result in zip(cases, results, strict=True):
            assert result["seen"] == LINEARS and result["bytes_equal"], case
