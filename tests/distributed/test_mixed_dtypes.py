"""Frozen bf16 linears, fp32 norms and fp32 adapters in one model: every strategy trains it.

FSDP wants one dtype, and one answer to requires_grad, of the weights that it gathers together; a
model prepared for k-bit training has several of both.
"""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.choices import STRATEGIES
from tests.distributed.test_parity import relative
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import (
    CLIP,
    LR,
    RANK,
    SEED,
    padded_batch,
    reference_model,
    reference_run,
    save_tiny,
    tiny_rows,
)

TRAIN_TYPES = ("lora", "qlora", "dora", "bnb_dora")
STEPS = tiny_rows(steps=2, rows_per_step=4)


def is_wide(name: str) -> bool:
    """True for what is in fp32: everything but the weights of linear layers."""
    return any(part in name for part in ("norm", "embed_tokens", "lm_head", ".lora_", "absmax"))


def mixed_model(folder: str, train_type: str, strategy: str):
    """The order of `build_model`, with all but the linear layers in fp32, as PEFT's
    `prepare_model_for_kbit_training` leaves it."""
    import fsdp_qlora as fq

    device = torch.device("cpu")
    model = fq.meta_model(fq.read_config(folder), torch.bfloat16)
    if train_type in ("qlora", "bnb_dora"):
        fq.quantize_linears(model, "nf4")
    model = fq.apply_adapters(
        model, fq.lora_config(rank=RANK, alpha=8, use_dora="dora" in train_type)
    )
    for name, p in model.named_parameters():
        if is_wide(name):
            p.data = p.data.float()
    fq.apply_activation_policy(model, "recompute_all")
    fq.apply_sharding(model, strategy, fq.make_mesh(strategy, device))
    fq.materialize(model, device, device)
    fq.load_weights(model, fq.Checkpoint(folder), device)
    fq.init_adapters(model, SEED)
    return model


def train_mixed(folder: str, cases) -> list[dict]:
    """Losses, and after one backward which parameters hold a gradient, and the stored dtypes."""
    import torch.distributed as dist

    import fsdp_qlora as fq

    results = []
    for train_type, strategy in cases:
        model = mixed_model(folder, train_type, strategy)
        optimizer = fq.build_optimizer(model, "adamw", LR, 0.1)
        losses = []
        for rows in STEPS:
            batch = padded_batch(rows[dist.get_rank() :: dist.get_world_size()])
            losses.append(fq.train_step(model, optimizer, [batch], max_grad_norm=CLIP).loss)
        model(**batch).loss.backward()
        results.append(
            dict(
                losses=losses,
                with_grad={n for n, p in model.named_parameters() if p.grad is not None},
                dtypes={n: p.dtype for n, p in model.named_parameters()},
            )
        )
    return results


def reference_losses(folder: str, train_type: str) -> list[float]:
    """Of one fp32 process whose linear weights have the values that bf16, or NF4, keeps."""
    model = reference_model(folder, train_type)
    for name, p in model.named_parameters():
        if train_type in ("qlora", "bnb_dora") or ".base_layer." not in name:
            continue
        p.data = p.data.bfloat16().float()
        if train_type == "dora":
            layer = model.get_submodule(name.removesuffix(".base_layer.weight"))
            layer.lora_magnitude_vector["default"].weight.data = p.norm(dim=1).detach()
    return reference_run(model, STEPS)[0]


@pytest.mark.parametrize(
    "world_size, cases",
    [
        (2, [("qlora", "full_shard"), ("dora", "ddp")]),
        rest(4, [(t, s) for t in TRAIN_TYPES for s in STRATEGIES]),
    ],
)
def test_every_strategy_trains_only_the_adapters_of_a_model_of_two_dtypes(
    tmp_path, world_size, cases
):
    folder = save_tiny(tmp_path)
    results = run_ranks(train_mixed, world_size, folder, cases)[0]
    expected = {t: reference_losses(folder, t) for t, _ in cases}
    for (train_type, strategy), result in zip(cases, results, strict=True):
        assert relative(result["losses"], expected[train_type]) < 1e-5, (train_type, strategy)
        for name, dtype in result["dtypes"].items():
            assert dtype == (torch.float32 if is_wide(name) else torch.bfloat16), name
            assert (name in result["with_grad"]) == (".lora_" in name), name
