"""A model that a script lets go of leaves memory, on one rank and on several: the next one needs it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.families import save_family
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import padded_batch, save_tiny, tiny_rows

KEPT = dict(activation_policy="keep_attention", use_activation_cpu_offload=True)
CASES = [
    dict(sharding_strategy="ddp"),
    dict(sharding_strategy="full_shard"),
    dict(sharding_strategy="ddp", train_type="full", optimizer="adamw_8bit"),
    dict(sharding_strategy="ddp", mlp_tiles=2) | KEPT,
    dict(sharding_strategy="full_shard", use_cpu_offload=True) | KEPT,
    dict(sharding_strategy="ddp", use_vocabulary_cpu_offload=True),
    dict(sharding_strategy="ddp", reentrant_checkpointing=True, use_gradient_checkpointing=True),
    dict(sharding_strategy="full_shard", wrap_policy="attention_mlp", forward_prefetch=True),
]
OF_EXPERTS = dict(lora_target_parameters="experts", router_aux_loss_coef=0.01)
OF_MIXTURES = [dict(sharding_strategy=s) | OF_EXPERTS for s in ("ddp", "full_shard")]


def weights_left(folder: str, cases: list[dict]) -> list[int]:
    """Of each case: how many weights live on after its model and optimizer are let go of."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    found = []
    for case in cases:
        config = RunConfig(model_name=folder, lora_rank=4, compile=False, **case)
        model = build_model(config, torch.device("cpu"))
        optimizer = build_optimizer(model, config.optimizer)
        for rows in tiny_rows(steps=2, rows_per_step=2):
            train_step(model, optimizer, [padded_batch(rows)])
        with torch.no_grad():
            model(**padded_batch(rows))
        weights = [weakref.ref(p) for p in model.parameters()]
        del model, optimizer
        gc.collect()
        found.append(sum(weight() is not None for weight in weights))
    return found


@pytest.mark.parametrize("ranks", [2, rest(1)])
def test_a_model_and_its_optimizer_are_freed_with_their_last_name(ranks, tmp_path):
    folder = save_tiny(tmp_path)
    for found in run_ranks(weights_left, ranks, folder, CASES):
        assert found == [0] * len(CASES)


@pytest.mark.parametrize("ranks", [rest(2)])
def test_a_mixture_is_freed_too(ranks, tmp_path):
    folder = save_family(tmp_path, "Qwen3-MoE")
    for found in run_ranks(weights_left, ranks, folder, OF_MIXTURES):
        assert found == [0] * len(OF_MIXTURES)
