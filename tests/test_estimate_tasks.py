"""What DPO and GRPO take beside a supervised step: closed forms against models that run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_qlora.catalog.machine import MachineOptions, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape, shape_from_config
from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import GIB, Task, estimate, kept_by_block, resident_bytes
from fsdp_qlora.estimate.tasks import cache_bytes, forward_flops

EIGHT = model_shape("llama-3.1-8b")
SETTINGS = dict(context_length=2048, batch_size=4, activation_policy="recompute_all")
TINY = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=True,
)


def machine(gpus: int = 2, **options):
    return machine_from_options(MachineOptions(gpu="h100", gpus=gpus, **options))


def asked(task: Task, shape=EIGHT, gpus: int = 2, **settings):
    config = task.of_trainer(RunConfig(**SETTINGS | settings))
    return task.added_to(estimate(shape, machine(gpus), config))


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(TINY).eval(), shape_from_config(TINY.to_dict(), "tiny")


def test_the_cache_is_as_large_as_that_of_transformers(tiny):
    model, shape = tiny
    with torch.no_grad():
        cache = model(torch.zeros(5, 12, dtype=torch.long)).past_key_values
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    plan = estimate(shape, machine(), RunConfig(precision="fp32")).plan
    assert cache_bytes(shape, plan, 5, 12) == held == 5 * 12 * 4 * 3 * 2 * 2 * 16


def test_a_references_forward_has_the_products_that_torch_counts(tiny):
    """Without attention's, which torch counts as if it were not causal."""
    model, shape = tiny
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.zeros(2, 24, dtype=torch.long), use_cache=False)
    products = sum(
        flops
        for op, flops in counter.get_flop_counts()["Global"].items()
        if op in (torch.ops.aten.mm, torch.ops.aten.addmm)
    )
    plan = estimate(shape, machine(), RunConfig(context_length=24, batch_size=2)).plan
    attention = 3 * 24 * 2 * 4 * 16  # of 3 blocks: Q K^T and P V, half of each
    assert 2 * 24 * (forward_flops(shape, plan) - attention) == products


def test_a_pair_is_two_rows_and_the_reference_one_forward_of_each():
    launched = dict(compile=False, cuda_graphs=False)
    dpo, sft = asked(Task("dpo")), asked(Task(), batch_size=8, **launched)
    parts = dict(dpo.step.parts)
    reference = parts.pop("reference")
    assert parts == sft.step.parts and dpo.plan == sft.plan
    half = sft.step.parts["linears"] / 2  # no gradient of the inputs
    assert half < reference < sft.step.total / 2
    assert dpo.memory.total == sft.memory.total, "its forward holds less than a backward"
    alone = asked(Task("dpo", reference=False))
    assert alone.step.parts == sft.step.parts


def test_the_reference_is_asked_while_the_policys_activations_wait():
    found = asked(Task("dpo"), gpus=1, activation_policy="keep_all", batch_size=2)
    plan, static = found.plan, ("workspace", "optimizer", *resident_bytes(EIGHT, found.plan))
    held = sum(found.memory.parts[name] for name in static) * GIB
    held += found.memory.parts["adapters"] * GIB  # their gradients, which ddp keeps
    held += EIGHT.layers * kept_by_block(EIGHT, plan, "keep_all")
    tokens, d, i = 4 * 2048, EIGHT.hidden, EIGHT.intermediate
    held += (
        tokens * 2 * (2 * d + 3 * i) + 2 * d * i
    )  # of a block, and a weight as it is dequantized
    assert found.memory.moments["reference policy"] == pytest.approx(held / GIB)


def test_generation_takes_a_read_of_all_weights_for_each_token_and_gathers_where_they_are_sharded():
    short, long = (asked(Task("grpo", generated=g), gpus=1) for g in (256, 512))
    each = (long.step.parts["generation"] - short.step.parts["generation"]) / 256
    weights = EIGHT.total_params() - EIGHT.vocab * EIGHT.hidden
    gpu = machine().gpu
    assert each > 2 * weights / (gpu.reached_bandwidth_gb_s * 1e9)
    sharded = asked(Task("grpo", generated=512), sharding_strategy="full_shard")
    alone = asked(Task("grpo", generated=512), sharding_strategy="ddp")
    assert sharded.step.parts["generation"] > alone.step.parts["generation"]


def test_the_cache_is_the_peak_where_many_answers_are_generated_at_once():
    many = dict(gradient_accumulation_steps=64, batch_size=1)
    found = asked(Task("grpo", generated=2000), context_length=2048, **many)
    assert found.memory.moment == "generation"
    rows = 64 * 2048 * 2 * 32 * 2 * 8 * 128
    assert found.memory.parts["cache"] == pytest.approx(rows / 2**30)
    assert found.memory.parts["activations"] == found.memory.parts["gradients"] == 0
    few = asked(Task("grpo", generated=2000), context_length=2048, batch_size=1)
    assert few.memory.moment != "generation" and few.memory.total < found.memory.total


def test_the_command_takes_a_task(capsys):
    typed = "--model_name llama-3.1-8b --gpu h100 --context_length 2048 --json".split()

    def answer(*more: str) -> dict:
        assert main(["estimate", *typed, *more]) == 0
        return json.loads(capsys.readouterr().out)

    assert "reference" in answer("--task", "dpo")["step_seconds"]
    grpo = answer("--task", "grpo", "--reference", "false")["step_seconds"]
    assert "generation" in grpo and "reference" not in grpo
    assert main(["estimate", *typed, "--task", "grpo", "--completion_length", "2048"]) != 0
    assert "--completion_length 2048" in capsys.readouterr().err


def test_a_global_batch_of_pairs_stays_whole():
    config = Task("dpo").of_trainer(RunConfig(batch_size=3, global_batch_size=12))
    assert (config.batch_size, config.global_batch_size) == (6, 24)
    assert Task("dpo").of_trainer(RunConfig(batch_size=-1)).batch_size == -1
    given = dict(batch_size=3, global_batch_size=12)
    launched = RunConfig(**given, compile=False, cuda_graphs=False)
    assert replace(config, **given) == launched


@pytest.mark.parametrize("task", [Task("dpo"), Task("grpo", generated=64)])
def test_trainers_compile_what_they_are_told_to_and_replay_nothing(task):
    """As integrations/ does: so few tokens wait for the host, the reference's too."""
    few = dict(context_length=128, batch_size=1)
    plain, compiled = asked(task, **few), asked(task, compile=True, **few)
    for found in (plain, compiled):
        assert not found.plan.loop.cuda_graphs and found.step.parts["launches"] > 0.1
    assert compiled.plan.loop.compile and not plain.plan.loop.compile
    assert plain.step.parts["reference"] > compiled.step.parts["reference"] > 0.05
    with pytest.raises(ValueError, match=f"--cuda_graphs true with --task {task.name}"):
        asked(task, cuda_graphs=True)
    assert Task("dpo").rows(10) == 20 and Task("grpo").rows(10) == 10
