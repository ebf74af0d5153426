"""Micro-batches replayed from CUDA graphs train as they do one launch at a time."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.test_command_line import call
from tests.families import save_family
from tests.ranks import run_ranks
from tests.tiny import save_tiny, tiny_rows
from tests.tokenizers import save_chat_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
ROOT = Path(__file__).parents[2]
CASES = {
    "shapes": dict(lora_dropout=0.1),
    "recomputed": dict(use_gradient_checkpointing=True, lora_dropout=0.1),
    "fp8": dict(compute_dtype="fp8", keep_fp8_weights=False),
    "fp8 kept": dict(compute_dtype="fp8", keep_fp8_weights=True),
    "fp8 kept, bf16 base": dict(
        compute_dtype="fp8",
        keep_fp8_weights=True,
        train_type="lora",
        lora_target_modules="q_proj,k_proj,up_proj",
    ),
    "lora": dict(train_type="lora"),
    "full": dict(train_type="full", optimizer="adamw_8bit"),
    "fp16": dict(precision="fp16_autocast"),
    "packed": dict(packing=True),
}

MIXTURES = {
    "experts": dict(lora_target_parameters="experts"),
    "experts, recomputed": dict(lora_target_parameters="experts", use_gradient_checkpointing=True),
    "experts, fp8": dict(lora_target_parameters="experts", compute_dtype="fp8"),
    "frozen experts, packed": dict(packing=True),
}


def batches_of(config) -> list[list[dict]]:
    """Micro-batches of six steps, two a step: of one shape, of three, or packed rows of any number."""
    from fsdp_qlora.data import collate, collate_packed

    steps = []
    for i, rows in enumerate(tiny_rows(steps=6, rows_per_step=6)):
        rows = [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in rows]
        if config.packing:
            steps.append(
                [
                    collate_packed([rows[: 2 + i % 2]], 0, pad_to=128),
                    collate_packed([rows[3:]], 0, pad_to=128),
                ]
            )
        else:
            count = 1 + i % 3 if config.lora_dropout else 3  # each further shape is compiled too
            steps.append([collate(part, 0, 32) for part in (rows[:count], rows[3:])])
    return steps


SHARDED = {
    "full_shard": dict(lora_dropout=0.1),
    "full_shard, recomputed": dict(use_gradient_checkpointing=True),
    "full_shard, fp8": dict(compute_dtype="fp8"),
    "full_shard, packed": dict(packing=True),
    "full_shard, lora": dict(train_type="lora"),
    "full_shard, full": dict(train_type="full"),
    "shard_grad_op": dict(sharding_strategy="shard_grad_op", lora_dropout=0.1),
    "backward_post": dict(backward_prefetch="backward_post", forward_prefetch=True),
}
HYBRIDS = {  # which need groups of two or more
    "hybrid_full_shard": dict(sharding_strategy="hybrid_full_shard"),
    "hybrid_shard_grad_op": dict(sharding_strategy="hybrid_shard_grad_op", lora_dropout=0.1),
}


def train_sharded_both_ways(folder: str, alone: bool, settings: dict) -> dict:
    """`train_both_ways` for sharded models, on these ranks, or on one rank of four that is `alone`."""
    cases = {name: dict(sharding_strategy="full_shard") | case for name, case in settings.items()}
    if not alone:
        return train_both_ways(folder, cases)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from one_rank import rank_zero_of

    with rank_zero_of(4, torch.device("cuda", 0)):
        return train_both_ways(folder, cases)


def train_both_ways(folder: str, cases: dict = CASES) -> dict:
    """Per case: losses and trained weights, launched and replayed, and how many graphs there were."""
    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor, rank_device
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.run_plan import plan_run
    from fsdp_qlora.training.cuda_graphs import micro_batch_runner
    from fsdp_qlora.training.loss_scaler import LossScaler
    from fsdp_qlora.training.step import seed_everything, train_step

    device, found = rank_device("cuda"), {}
    for name, settings in cases.items():
        torch._dynamo.reset()
        for cuda_graphs in (False, True):
            config = RunConfig(
                model_name=folder,
                cuda_graphs=cuda_graphs,
                lora_rank=8,
                **dict(lora_dropout=0.0, use_gradient_checkpointing=False, sharding_strategy="ddp")
                | settings,
            )
            began = time.monotonic()
            seed_everything(0, 0)
            plan = plan_run(config, device)
            model = build_model(config, device, plan=plan).train()
            optimizer = build_optimizer(model, config.optimizer, 1e-3)
            runner = micro_batch_runner(config, plan, model, device)
            scaler = LossScaler(device) if config.scales_loss else None
            losses = [
                train_step(
                    model,
                    optimizer,
                    batches,
                    max_grad_norm=1.0,
                    scaler=scaler,
                    forward_backward=runner,
                ).loss
                for batches in batches_of(config)
            ]
            weights = {
                n: full_tensor(p.detach()).cpu() for n, p in trainable_parameters(model).items()
            }
            found[name, cuda_graphs] = losses, weights, len(getattr(runner, "graphs", ()))
            took = time.monotonic() - began
            print(f"{name}, {'replayed' if cuda_graphs else 'launched'}: {took:.0f} s", flush=True)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), hidden_size=128, intermediate_size=256)
    return run_ranks(train_both_ways, 1, folder, device="cuda")[0]


@pytest.fixture(scope="module")
def of_mixtures(tmp_path_factory):
    folder = save_family(
        tmp_path_factory.mktemp("tiny"), "Qwen3-MoE", hidden_size=128, moe_intermediate_size=128
    )
    return run_ranks(train_both_ways, 1, folder, MIXTURES, device="cuda")[0]


@pytest.fixture(scope="module")
def one_of_four(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), hidden_size=128, intermediate_size=256)
    return run_ranks(
        train_sharded_both_ways, 1, folder, True, SHARDED | HYBRIDS, device="cuda", grouped=False
    )[0]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), hidden_size=128, intermediate_size=256)
    return run_ranks(train_sharded_both_ways, 2, folder, False, SHARDED, device="cuda")[0]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), hidden_size=128, intermediate_size=256)
    return run_ranks(train_sharded_both_ways, 4, folder, False, HYBRIDS, device="cuda")[0]


@pytest.fixture(scope="module")
def mixtures_of_two_ranks(tmp_path_factory):
    folder = save_family(
        tmp_path_factory.mktemp("tiny"), "Qwen3-MoE", hidden_size=128, moe_intermediate_size=128
    )
    return run_ranks(train_sharded_both_ways, 2, folder, False, MIXTURES, device="cuda")[0]


@pytest.mark.parametrize("case", SHARDED | HYBRIDS)
def test_replayed_steps_of_one_rank_of_four(one_of_four, case):
    compare(one_of_four, case)


@pytest.mark.parametrize("case", SHARDED)
def test_replayed_steps_of_two_ranks(two_ranks, case):
    """Other than one rank alone, these replay NCCL's collectives."""
    compare(two_ranks, case)


@pytest.mark.parametrize("case", HYBRIDS)
def test_replayed_steps_of_four_ranks(four_ranks, case):
    """Gathers within two groups, and sums of gradients over both."""
    compare(four_ranks, case)


@pytest.mark.parametrize("case", MIXTURES)
def test_replayed_steps_of_mixtures_of_two_ranks(mixtures_of_two_ranks, case):
    compare(mixtures_of_two_ranks, case)


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_are_those_of_the_host(results, case):
    compare(results, case)


@pytest.mark.parametrize("case", MIXTURES)
def test_replayed_steps_of_mixtures(of_mixtures, case):
    """Experts get other numbers of rows in each micro-batch, all from one graph."""
    compare(of_mixtures, case)


def compare(results, case):
    """Sums may be taken in another order by kernels that add atomically; nothing else may differ."""
    losses, weights, _ = results[case, False]
    replayed, same_weights, graphs = results[case, True]
    assert graphs >= 1
    torch.testing.assert_close(replayed, losses, rtol=1e-3, atol=0)
    for name, weight in weights.items():
        torch.testing.assert_close(same_weights[name], weight, rtol=1e-2, atol=1e-4, msg=name)


def test_weights_kept_in_fp8_change_nothing(results):
    for cuda_graphs in (False, True):
        (losses, weights, _), (kept, same_weights, _) = (
            results[case, cuda_graphs] for case in ("fp8", "fp8 kept")
        )
        torch.testing.assert_close(kept, losses, rtol=1e-3, atol=0)
        for name, weight in weights.items():
            torch.testing.assert_close(same_weights[name], weight, rtol=1e-2, atol=1e-4, msg=name)


class Waits(torch.nn.Module):
    """Drops some of its inputs and asks the GPU for a number, which no graph can hold."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8, device="cuda")

    def forward(self, input_ids, num_items_in_batch):
        y = torch.nn.functional.dropout(self.linear(input_ids), 0.5)
        return SimpleNamespace(loss=y.square().sum() / (num_items_in_batch + 0 * y.sum().item()))


def test_a_model_that_no_graph_can_hold_goes_on_without(capsys):
    from fsdp_qlora.training.cuda_graphs import GraphedMicroBatches
    from fsdp_qlora.training.step import run_micro_batch

    batch = dict(input_ids=torch.randn(4, 8, device="cuda"))

    def gradient(replayed: bool):
        torch.manual_seed(0)
        model = Waits()
        runner = GraphedMicroBatches(model, may_fail=True) if replayed else run_micro_batch
        for _ in range(3):
            runner(model, batch, 4.0, None)
        return model.linear.weight.grad

    torch.testing.assert_close(gradient(True), gradient(False))
    assert "without CUDA graphs" in capsys.readouterr().out


@pytest.mark.parametrize("ranks, strategy", [(1, "ddp"), (2, "full_shard")])
def test_a_run_with_evaluations_and_checkpoints_is_the_same_replayed(ranks, strategy, tmp_path):
    """Padded to the same widths or not: what is read, saved and evaluated beside the graphs stays.

    Without dropout: in batches of other widths it drops other places. With it, and what else a run does
    if it is not told otherwise, a run is replayed too, to its end.
    """
    folder, rows = save_chat_model(tmp_path / "tiny"), tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(
            json.dumps(dict(prompt=f"{i}?", completion="a" * (1 + i % 5))) + "\n" for i in range(30)
        )
    )
    argv = [
        "train",
        "--model_name",
        folder,
        "--dataset",
        str(rows),
        "--sharding_strategy",
        strategy,
        "--batch_size",
        "2",
        "--gradient_accumulation_steps",
        "1",
        "--log_every",
        "1",
        "--num_epochs",
        str(2 * ranks),
        "--lr",
        "2e-3",
        "--eval_share",
        "0.2",
        "--eval_every",
        "10",
        "--checkpoint_every",
        "8",
        "--lora_rank",
        "4",
    ]
    cases = {
        "launched": ["--lora_dropout", "0", "--cuda_graphs", "false"],
        "replayed": ["--lora_dropout", "0", "--cuda_graphs", "true"],
        "by default": [],
    }
    runs = run_ranks(
        call,
        ranks,
        [[*argv, *more, "--output_dir", str(tmp_path / name)] for name, more in cases.items()],
        grouped=False,
        device="cuda",
    )[0]
    losses = {}
    for name, (code, text, errors) in zip(cases, runs, strict=True):
        assert code == 0, errors
        assert ("CUDA graphs replay" in text) == (name != "launched")
        assert "without CUDA graphs" not in text
        records = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        losses[name] = [
            r.get("loss", r.get("eval_loss")) for r in records if "loss" in r or "eval_loss" in r
        ]
        assert (tmp_path / name / "adapter" / "adapter_model.safetensors").exists()
    assert len(losses["replayed"]) > 24
    torch.testing.assert_close(losses["replayed"], losses["launched"], rtol=1e-2, atol=0)
    first, last = losses["by default"][:5], losses["by default"][-5:]
    assert sum(last) < 0.9 * sum(first)
