"""Sizes that no block, rank or shard divides: hidden 72, MLP 100, adapters of rank 3, 2 and 3 ranks."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from fsdp_qlora.choices import STRATEGIES
from tests.distributed.test_parity import flat, relative
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import SEED, padded_batch, reference_model, reference_run, save_tiny, tiny_rows

SIZES = dict(hidden_size=72, intermediate_size=100)
SIMPLE = [s.name for s in STRATEGIES.values() if not s.is_hybrid]  # two ranks have no groups
STEPS = tiny_rows(steps=3, rows_per_step=6)


def train_ragged(folder: str, out: str, cases) -> list[dict]:
    """Losses, and trained weights, of each (strategy, settings); saves each adapter."""
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.export import save_trained
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    results, rank, world = [], dist.get_rank(), dist.get_world_size()
    for i, case in enumerate(cases):
        config = RunConfig(
            **dict(
                model_name=folder,
                precision="fp32",
                lora_rank=3,
                lora_alpha=8,
                lora_dropout=0.0,
                seed=SEED,
            )
            | case
        )
        model = build_model(config, torch.device("cpu"))
        optimizer = build_optimizer(model, "adamw", 1e-3, 0.1)
        losses = [
            train_step(model, optimizer, [padded_batch(rows[rank::world])]).loss for rows in STEPS
        ]
        save_trained(model, f"{out}/{i}")
        results.append(
            dict(
                losses=losses,
                weights={
                    n: full_tensor(p.detach()).clone()
                    for n, p in trainable_parameters(model).items()
                },
            )
        )
    return results


@pytest.mark.parametrize("worlds", [(1, 3), rest((1, 2))])
def test_sharded_runs_equal_the_unsharded_one_and_are_near_fp32(tmp_path, worlds):
    folder = save_tiny(tmp_path / "model", **SIZES)
    cases = [dict(sharding_strategy=s, train_type=t) for t in ("qlora", "lora") for s in SIMPLE]
    cases.append(dict(sharding_strategy="full_shard", quant="fp4"))
    by_world = {
        w: run_ranks(train_ragged, w, folder, str(tmp_path / f"out{w}"), cases)[0] for w in worlds
    }
    for world, results in by_world.items():
        for case, whole, result in zip(cases, by_world[1], results, strict=True):
            assert relative(result["losses"], whole["losses"]) < 1e-5, (world, case)
            order = list(whole["weights"])
            assert relative(flat(result["weights"], order), flat(whole["weights"], order)) < 1e-5
    # NF4 keeps a normal weight within about 10%, which moves the loss of a random model far less.
    exact = reference_run(reference_model(folder, "full"), STEPS)[0][0]
    for case, result in zip(cases, by_world[1], strict=True):
        assert relative(result["losses"][0], exact) < (
            0.02 if "lora" != case.get("train_type") else 1e-5
        ), case


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.slow
def test_a_saved_adapter_of_odd_rank_has_whole_tensors_at_every_world_size(tmp_path, world):
    folder = save_tiny(tmp_path / "model", **SIZES)
    cases = [dict(sharding_strategy="full_shard", lora_rank=rank) for rank in (1, 3, 5)]
    run_ranks(train_ragged, world, folder, str(tmp_path / "out"), cases)
    for i, case in enumerate(cases):
        saved = load_file(tmp_path / "out" / str(i) / "adapter_model.safetensors")
        shapes = {
            n.split(".mlp.")[1]: tuple(t.shape) for n, t in saved.items() if ".layers.1.mlp." in n
        }
        r = case["lora_rank"]
        assert shapes == {
            "gate_proj.lora_A.weight": (r, 72),
            "gate_proj.lora_B.weight": (100, r),
            "up_proj.lora_A.weight": (r, 72),
            "up_proj.lora_B.weight": (100, r),
            "down_proj.lora_A.weight": (r, 100),
            "down_proj.lora_B.weight": (72, r),
        }
