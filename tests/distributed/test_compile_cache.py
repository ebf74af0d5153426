"""A second start finds its compiled blocks in torch's cache: our ops do not keep them out of it."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny import RANK, padded_batch, save_tiny, tiny_rows


def cache_lookups(folder: str, policies) -> list[list[dict]]:
    """For each policy, what the graph cache said in a first and a second start."""
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    found, (rows,) = [], tiny_rows(steps=1, rows_per_step=1)
    for policy in policies:
        config = RunConfig(
            model_name=folder,
            precision="fp32",
            lora_rank=RANK,
            lora_dropout=0.0,
            compile=True,
            activation_policy=policy,
        )
        starts = []
        with fresh_cache():
            for _ in range(2):
                torch._dynamo.reset()
                counters.clear()
                model = build_model(config, torch.device("cpu"))
                train_step(model, build_optimizer(model), [padded_batch(rows)])
                starts.append(
                    {
                        name: counters["inductor"][name]
                        for name in (
                            "fxgraph_cache_hit",
                            "fxgraph_cache_miss",
                            "fxgraph_cache_bypass",
                        )
                    }
                )
        found.append(starts)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["keep_all", "keep_linears"])
def test_a_second_start_compiles_nothing_again(folder, policy):
    (((first, second),),) = run_ranks(cache_lookups, 1, folder, [policy])
    assert first["fxgraph_cache_miss"] > 0
    assert second["fxgraph_cache_hit"] >= first["fxgraph_cache_miss"]
    assert second["fxgraph_cache_miss"] == second["fxgraph_cache_bypass"] == 0
