"""Scales of fp8 weights are kept in runs and in other trainers where weights stay, and only there."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_other_trainers import curve, trainer
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import padded_batch, save_tiny, tiny_rows
from tests.tokenizers import save_tokenizer

CASES = [  # strategy, further settings of a trainer, ranks on which weights stay
    ("ddp", dict(), (1, 2)),
    ("full_shard", dict(), (1,)),
    ("shard_grad_op", dict(), (1,)),
    ("full_shard", dict(use_cpu_offload=True), ()),
]


def both_ways(folder: str, output: str, cases: list[tuple]) -> list[tuple]:
    """By case: bytes kept by a run and by a DPO trainer, and losses of both, scales kept and made anew."""
    from fsdp_qlora import build, integrations

    kept = train_cases(folder, output, cases)
    build.keep_fp8_weights = lambda model, forms: None
    integrations.streamed.keep_fp8_weights = lambda model, forms: None
    anew = train_cases(folder, output, cases)
    return [(*ours, *theirs) for ours, theirs in zip(kept, anew, strict=True)]


def train_cases(folder: str, output: str, cases: list[tuple]) -> list[tuple[int, int, list]]:
    from fsdp_qlora.adapters.fp8_layers import cached_fp8_tensors
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.integrations import trl
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    found = []
    for strategy, more, _ in cases:
        config = RunConfig(
            model_name=folder, precision="fp32", compute_dtype="fp8", compile=False, lora_rank=4,
            lora_dropout=0.0, sharding_strategy=strategy, **more,
        )  # fmt: skip
        model = build_model(config, torch.device("cpu"))
        optimizer = build_optimizer(model, "adamw", 1e-2)
        losses = [
            train_step(model, optimizer, [padded_batch(rows)]).loss for rows in tiny_rows(2, 2)
        ]
        given = dict(sharding_strategy=strategy, compute_dtype="fp8", mlp_tiles=2) | more
        given |= dict(activation_policy="recompute_all")
        dpo = trainer(trl, "DPO", folder, folder, output, dict(max_steps=2), **given)
        dpo.train()
        of_run, of_trainer = (
            sum(t.nbytes for t in cached_fp8_tensors(each)) for each in (model, dpo.model)
        )
        found.append((of_run, of_trainer, losses + curve(dpo)))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "world_size, cases", [(1, CASES[1:2]), rest(1, [CASES[0], *CASES[2:]]), rest(2, CASES)]
)
def test_runs_and_trainers_keep_scales_where_weights_stay_and_train_as_without(
    tmp_path, world_size, cases
):
    folder = save_tiny(tmp_path, vocab_size=300)
    save_tokenizer(tmp_path)
    rows = 2 * (64 + 2 * 32 + 64 + 2 * 128 + 64)  # q, k and v, o, gate and up, down of two blocks
    for results in run_ranks(both_ways, world_size, folder, str(tmp_path / "out"), cases):
        for (strategy, more, stay), found in zip(cases, results, strict=True):
            of_run, of_trainer, losses, run_anew, trainer_anew, same = found
            expected = 2 * 4 * rows if world_size in stay else 0
            assert of_run == of_trainer == expected, (strategy, more)
            assert losses == same and run_anew == trainer_anew == 0
