"""The pieces as users combine them: their own loop, their own model, their own wrapping."""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from tests.distributed.test_parity import relative
from tests.ranks import run_ranks
from tests.tiny import (
    CLIP,
    LR,
    padded_batch,
    reference_model,
    reference_run,
    save_tiny,
    tiny_rows,
)

ROOT = Path(__file__).parents[2]
STEPS = tiny_rows(steps=3, rows_per_step=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def example_run(folder: str, out: str) -> str:
    """What the example prints on this rank."""
    os.chdir(out)
    sys.argv = ["custom_loop.py", folder]
    with redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(ROOT / "examples/custom_loop.py"), run_name="__main__")
    return said.getvalue()


def test_the_example_loop_trains_on_two_ranks_and_its_adapter_loads(folder, tmp_path):
    said, nothing = run_ranks(example_run, 2, folder, str(tmp_path), grouped=False)
    assert not nothing
    losses = [float(line.split()[3]) for line in said.splitlines() if line.startswith("step")]
    assert len(losses) == 10 and losses[-1] < losses[0]
    model = AutoModelForCausalLM.from_pretrained(folder)
    PeftModel.from_pretrained(model, tmp_path / "custom_loop_output")


def shard_and_train(folder: str, strategies: list[str]) -> list[tuple]:
    """Shard a model that transformers, bitsandbytes and PEFT built, and train it.

    "apart": ranks meet after a backward and not in it, as with CUDA graphs.
    """
    import torch.distributed as dist
    from transformers import BitsAndBytesConfig

    from fsdp_qlora import apply_sharding, build_optimizer, make_mesh, train_step
    from fsdp_qlora.sharding import reduce_gradients, without_gradient_sync
    from fsdp_qlora.training.step import run_micro_batch

    results, device = [], torch.device("cpu")

    def run_apart(model, *args):
        with without_gradient_sync(model):
            loss = run_micro_batch(model, *args)
        reduce_gradients(model)
        return loss

    for name in strategies:
        strategy, _, apart = name.partition(", ")
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_quant_storage=torch.float32,
        )
        model = reference_model(folder, "qlora", quantization=quantization)
        units = apply_sharding(model, strategy, make_mesh(strategy, device))
        optimizer = build_optimizer(model, "adamw", LR, 0.1)
        losses = [
            train_step(
                model,
                optimizer,
                [padded_batch([row]) for row in rows[dist.get_rank() :: 2]],
                max_grad_norm=CLIP,
                forward_backward=run_apart if apart else None,
            ).loss
            for rows in STEPS
        ]
        results.append((units, losses))
    return results


def test_a_model_built_with_bitsandbytes_and_peft_shards_and_trains_alike(folder):
    losses, _, _ = reference_run(reference_model(folder, "qlora"), STEPS)
    results = run_ranks(
        shard_and_train, 2, folder, ["full_shard", "shard_grad_op", "ddp", "ddp, apart"]
    )[0]
    for _, sharded in results:
        assert relative(sharded, losses) < 1e-5
    assert any("layers.1" in unit for unit in results[0][0])


def units_of(folder: str) -> dict[str, list[str]]:
    """The units that each wrap policy makes."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    from fsdp_qlora import RunConfig, apply_sharding, make_mesh
    from fsdp_qlora.build import planned_model

    made = {}
    policies = dict(
        block="block",
        attention_mlp="attention_mlp",
        min_params="min_params",
        mine=lambda m: type(m).__name__ == "LlamaMLP",
        named="LlamaMLP",
        classes=(LlamaAttention, "LlamaMLP"),
        torchs=ModuleWrapPolicy({LlamaMLP}),
    )
    for name, policy in policies.items():
        model, _ = planned_model(
            RunConfig(model_name=folder, precision="fp32", lora_rank=2), torch.device("cpu")
        )
        mesh = make_mesh("full_shard", torch.device("cpu"))
        made[name] = apply_sharding(
            model, "full_shard", mesh, wrap_policy=policy, min_wrap_params=9000
        )
    return made


def test_wrap_policies_make_the_units_they_name(folder):
    units = {
        name: {u.removeprefix("base_model.model.model.") for u in made}
        for name, made in run_ranks(units_of, 2, folder)[0].items()
    }
    blocks = {"layers.0", "layers.1"}
    parts = {f"layers.{i}.{part}" for i in (0, 1) for part in ("self_attn", "mlp")}
    assert units["block"] == blocks
    assert units["attention_mlp"] == blocks | parts
    mlps = {"layers.0.mlp", "layers.1.mlp"}
    assert units["mine"] == units["named"] == units["torchs"] == mlps
    assert units["classes"] == parts
    assert units["min_params"] >= {"layers.0.mlp", "layers.1.mlp"}


class Plain(nn.Module):
    """Nothing of transformers: a stack of layers, one weight of which is at both ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def train_plain(ways: list[tuple]) -> list[list[float]]:
    """Losses of a plain module by (strategy, how its mesh is given, keyword arguments)."""
    import torch.distributed as dist
    from torch.distributed.fsdp import ShardingStrategy

    from fsdp_qlora import apply_sharding

    found = []
    for strategy, mesh, settings in ways:
        model = Plain()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        apply_sharding(
            model,
            getattr(ShardingStrategy, strategy, strategy),
            dist.group.WORLD if mesh == "group" else None,
            optimizer=optimizer,
            **settings,
        )
        found.append(plain_losses(model, optimizer, dist.get_rank(), dist.get_world_size()))
    return found


def plain_losses(model, optimizer, rank: int, world: int) -> list[float]:
    losses = []
    for step in range(3):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        loss = model(rows[rank::world]).pow(3).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_plain_module_trains_under_every_name_of_a_strategy_with_the_optimizer_it_had():
    ways = [
        ("ddp", None, {}),
        ("full_shard", None, {}),
        ("shard_grad_op", None, {}),
        ("FULL_SHARD", "group", dict(wrap_policy="Sequential")),
        ("SHARD_GRAD_OP", None, dict(wrap_policy=nn.Sequential)),
        ("NO_SHARD", None, {}),
        ("full_shard", None, dict(reshard_after_forward=False)),
    ]
    by_rank = run_ranks(train_plain, 2, ways)
    model = Plain()
    expected = plain_losses(model, torch.optim.Adam(model.parameters(), lr=1e-2), 0, 1)
    for way, *losses in zip(ways, *by_rank, strict=True):
        assert relative(torch.tensor(losses).mean(0), expected) < 1e-5, way


def integer_storage_error(folder: str) -> str:
    """What sharding says of bitsandbytes weights that are stored as integers."""
    from fsdp_qlora import apply_sharding, make_mesh

    model = reference_model(folder, "qlora")
    try:
        apply_sharding(model, "full_shard", make_mesh("full_shard", torch.device("cpu")))
    except ValueError as error:
        return str(error)
    return ""


def test_bitsandbytes_weights_in_integer_storage_are_refused_with_the_remedy(folder):
    for error in run_ranks(integer_storage_error, 2, folder):
        assert "bnb_4bit_quant_storage" in error
