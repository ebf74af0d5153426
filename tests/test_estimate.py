"""Estimates against closed forms: settings, stored weights, cost, and what is shown of them."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fsdp_qlora.adapters import trainable_parameters
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.machine import MachineOptions, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import (
    estimate,
    memory,
    optimizer_bytes,
    resident_bytes,
    run_cost,
    step_seconds,
)
from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.plan import Plan
from fsdp_qlora.plan_draft import draft_plan

from .estimates import H100, LLAMA_8B, LLAMA_70B, SMALL, TRIAL, built, tiny
from .families import BUILT, family_config


@pytest.mark.parametrize(
    "known,changes",
    [
        ("llama-2-7b", {}),
        ("qwen2.5-0.5b", dict(quant="fp4")),
        ("qwen3-8b", dict(quant="none")),
        ("phi-3-mini-4k", {}),
        ("llama-2-7b", dict(targets=("q_proj", "lm_head"))),
        ("qwen2.5-0.5b", dict(adapter="dora")),
        ("qwen2.5-0.5b", dict(bias="all")),
        ("qwen2.5-0.5b", dict(bias="lora_only", targets=("q_proj",))),
        ("qwen3-30b-a3b", dict(expert_targets=("experts",))),
        (
            "mixtral-8x7b-v0.1",
            dict(expert_targets=("down_proj",), rank_pattern=(("down_proj", 3),)),
        ),
        ("qwen2.5-0.5b", dict(rank_pattern=(("q_proj", 2), ("down_proj", 16)))),
        (
            "qwen3-8b",
            dict(rank_pattern=(("self_attn.q_proj", 2), ("(k|v)_proj", 3), (".*up_proj", 16))),
        ),
        ("qwen3-8b", dict(rank_pattern=((".*q_proj", 2), ("q_proj", 16)))),
    ],
)
def test_stored_weights_are_those_of_the_built_model(known, changes):
    plan = SMALL.change(**changes)
    model, shape = tiny(known, plan)
    stored = sum(p.nbytes for p in model.parameters())
    assert sum(resident_bytes(shape, plan).values()) == stored
    trained = sum(p.nbytes for p in trainable_parameters(model).values())
    assert resident_bytes(shape, plan)["adapters"] == trained
    assert optimizer_bytes(shape, plan) == 2 * trained


@pytest.mark.parametrize("family", BUILT)
def test_stored_weights_of_each_build_of_blocks_are_those_of_the_built_model(family):
    experts = ("experts",) if "MoE" in family else ()
    plan = SMALL.change(attention="eager", expert_targets=experts)
    model, shape = built(family_config(family), plan)
    found = resident_bytes(shape, plan)
    stored = sum(p.nbytes for p in model.parameters())
    # In a model of 16 bits ERNIE keeps its routers in fp32, and OLMo Hybrid a number of each head; estimates
    # leave that out.
    kept = [
        p
        for n, p in model.named_parameters()
        if (".mlp.gate." in n or n.endswith(".A_log")) and p.dtype == torch.float32
    ]
    assert sum(found.values()) == stored - sum(p.nbytes for p in kept) / 2
    assert sum(p.nbytes for p in kept) < 0.01 * stored
    assert found["adapters"] == sum(p.nbytes for p in trainable_parameters(model).values())
    step = memory(shape, plan, activation_policy="recompute_all")
    assert (
        0 < step.peak_allocated < memory(shape, plan, activation_policy="keep_all").peak_allocated
    )
    assert step_seconds(shape, H100, plan).total > 0


def test_shards_add_up_and_are_padded_to_whole_rows():
    whole, half = (resident_bytes(LLAMA_8B, Plan().change(world_size=n)) for n in (1, 2))
    assert half == {part: size / 2 for part, size in whole.items()}
    odd = resident_bytes(LLAMA_8B.cut(1), Plan().change(world_size=3, quant="none"))
    assert odd["head"] == 128256 / 3 * 4096 * 2
    assert odd["linears"] > LLAMA_8B.block_params()["linears"] * 2 / 3


def test_cost_of_a_run():
    step = step_seconds(LLAMA_8B, H100, TRIAL, world_size=2)
    cost = run_cost(step, H100, gpus=2, examples=1000, length=8192, epochs=3)
    assert cost.hours == pytest.approx(3 * 1000 / 2 / 2 * step.total / 3600)
    assert cost.dollars == pytest.approx(cost.hours * 2 * H100.price_per_hour)
    without_price = replace(find_gpu("a5000"), price_per_hour=None)
    assert run_cost(step, without_price, gpus=2, examples=1, length=1).dollars is None
    with pytest.raises(ValueError, match="examples must be above 0, got -1"):
        run_cost(step, H100, gpus=2, examples=-1, length=1)


def test_settings_of_a_run_become_a_plan():
    config = RunConfig(
        train_type="qlora",
        sharding_strategy="shard_grad_op",
        lora_rank=16,
        lora_target_modules="q_proj,v_proj",
        global_batch_size=32,
        batch_size=4,
        use_gradient_checkpointing=False,
        adapter_dtype="bf16",
    )
    plan = draft_plan(config, 2)
    assert plan == Plan().change(
        world_size=2,
        strategy="shard_grad_op",
        lora_rank=16,
        targets=("q_proj", "v_proj"),
        micro_batch_size=4,
        accumulation=4,
        per_step=32,
        activation_policy="keep_all",
        adapter_dtype="bf16",
        compile=True,
        cuda_graphs=True,
    )
    assert draft_plan(RunConfig(compile=False, gradient_accumulation_steps=1), 1) == Plan()


def test_a_runs_activation_policy_is_the_plans():
    text = "keep_linears:8,recompute_all:24"
    plan = draft_plan(RunConfig(activation_policy=text), 1)
    assert plan.memory.policies(LLAMA_8B) == ["keep_linears"] * 8 + ["recompute_all"] * 24
    still_to_choose = draft_plan(RunConfig(activation_budget_gib=20), 1)
    assert still_to_choose.memory.activation_policy == "recompute_all"


def test_table_shows_every_part_and_the_moment():
    found = memory(LLAMA_8B, TRIAL, world_size=2)
    table = found.table()
    for word in ("linears", "absmax", "activations", "slack", "total", "peak at: last block"):
        assert word in table
    assert found.largest == "activations"
    assert found.total > found.peak_reserved > found.peak_allocated
    assert found.fits(80) and not found.fits(found.total - 0.1)
    assert max(found.moments.values()) == pytest.approx(found.peak_allocated)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(micro_batch_size=0), "micro_batch_size must be 1 or more, got 0"),
        (dict(optimizer="lion"), "optimizer lion: choose adamw"),
        (dict(targets=("qq",)), "qq: no such module"),
    ],
)
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        memory(LLAMA_8B, **changes)


def test_context_beyond_the_models_positions_is_refused():
    config = RunConfig(context_length=8192)
    with pytest.raises(ValueError, match="--context_length 8192: .* 4096 positions"):
        estimate(LLAMA_70B, machine_from_options(MachineOptions(gpu="h100")), config)


def test_estimates_need_no_torch():
    code = (
        "import sys, json, fsdp_qlora.estimate, fsdp_qlora.catalog.shapes;"
        "import fsdp_qlora.catalog.hardware;"
        "print(json.dumps('torch' in sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) is False


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_bf16", "adamw_8bit", "sgd"])
def test_optimizer_states_are_those_that_are_made(optimizer):
    """But for vectors, which keep float32 states under adamw_8bit, and blocks of rows this narrow."""
    plan = SMALL.change(quant="none", adapter="none", optimizer=optimizer)
    model, shape = tiny("llama-2-7b", plan)
    made = build_optimizer(model, optimizer, 1e-3)
    found = sum(v.nbytes for state in made.state.values() for v in state.values() if v.dim())
    assert found == pytest.approx(optimizer_bytes(shape, plan), rel=0.03)


@pytest.mark.parametrize(
    "name, card_gib, changes",
    [
        ("qwen3-30b-a3b", 8, {}),
        ("qwen3-30b-a3b", 8, dict(expert_targets=("experts",), lora_rank=8, trained_offload=True)),
        ("gpt-oss-120b", 24, {}),
        ("qwen3-235b-a22b", 24, dict(strategy="full_shard", world_size=4)),
    ],
)
def test_mixtures_whose_experts_stream_from_the_host_fit_small_cards(name, card_gib, changes):
    """Two blocks are on the card at a time; all experts are on the host, with scales in 8 bits."""
    plan = Plan().change(
        strategy="ddp", context_length=2048, micro_batch_size=1, lora_rank=16, lora_dropout=0.0,
        activation_policy="recompute_all", absmax_dtype="int8",
    )  # fmt: skip
    shape = model_shape(name)
    resident = memory(shape, plan.change(**changes))
    streamed = memory(shape, plan.change(cpu_offload=True, vocabulary_offload=True, **changes))
    assert streamed.fits(card_gib) and not resident.fits(card_gib)
    experts = shape.layers * shape.experts * sum(o * i for o, i in shape.expert_linears().values())
    assert streamed.host > experts / 2 / 2**30
