"""The plan of a run: filled from the settings by name, changed by name, decided once."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace

import pytest

import fsdp_qlora.plan_draft as plan_module
from fsdp_qlora.bench.row import empty_row, of_plan, plan_of
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.machine import MachineOptions, cpu_machine, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.options import TRAIN_TYPES
from fsdp_qlora.config.settings import opt
from fsdp_qlora.estimate import host_memory, memory, resolve
from fsdp_qlora.estimate.policies import SPARE_SHARE
from fsdp_qlora.plan import LoopPlan, Plan
from fsdp_qlora.plan_draft import draft_plan, with_learning_rate

from .estimates import LLAMA_8B

H100 = machine_from_options(MachineOptions(gpu="h100", gpus=1))


def test_no_two_sections_have_a_field_of_one_name():
    names = [
        f.name
        for section in fields(Plan())
        if section.name != "choices"
        for f in fields(getattr(Plan(), section.name))
    ]
    assert len(names) == len(set(names))


def test_a_changed_field_is_in_its_section_and_the_others_stay():
    plan = Plan().change(mlp_tiles=4, world_size=2, optimizer="sgd")
    assert (plan.memory.mlp_tiles, plan.sharding.world_size) == (4, 2)
    assert plan.optimizer.optimizer == "sgd" and plan.adapter is Plan().adapter
    with pytest.raises(TypeError, match="mlp_tile$"):
        Plan().change(mlp_tile=4)


def test_a_setting_reaches_the_plan_by_a_field_of_its_name_alone(monkeypatch):
    """A new setting is a field in options/ and of a section: nothing between them knows it."""

    @dataclass(kw_only=True)
    class WithToy(RunConfig):
        toy_ratio: float = opt(0.5, "a setting that a test adds")

    @dataclass(frozen=True, kw_only=True)
    class LoopWithToy(LoopPlan):
        toy_ratio: float = 0.5

    @dataclass(frozen=True, kw_only=True)
    class PlanWithToy(Plan):
        loop: LoopWithToy = LoopWithToy()

    sections = plan_module.SECTIONS | dict(loop=LoopWithToy)
    monkeypatch.setattr(plan_module, "Plan", PlanWithToy)
    monkeypatch.setattr(plan_module, "SECTIONS", sections)
    assert draft_plan(WithToy(toy_ratio=0.25), 1).loop.toy_ratio == 0.25


LONG = dict(
    context_length=131_072, activation_policy="keep_attention", use_activation_cpu_offload=True
)
OPEN = [
    dict(activation_budget_gib=40, batch_size=2, context_length=2048),
    dict(mlp_tiles=-1, context_length=8192),
    dict(compute_dtype="fp8", sharding_strategy="ddp", lora_dropout=0.0),
    dict(use_cpu_offload=True, lora_rank=8),
    dict(use_cpu_offload=True, lora_rank=1024),
    dict(sharding_strategy="hybrid_full_shard"),
]


@pytest.mark.parametrize("settings", OPEN, ids=lambda s: next(iter(s)))
def test_nothing_is_open_in_a_resolved_plan_and_each_choice_says_why(settings):
    machine = replace(H100, gpus=4) if "hybrid" in str(settings) else H100
    plan = resolve(RunConfig(**settings), LLAMA_8B, machine)
    for section in asdict(plan).values():
        if isinstance(section, dict):
            assert not {n for n in section if "offload" in n and section[n] is None}
    assert plan.sharding.shard_group_size == (2 if "hybrid" in str(settings) else -1)
    flags = [line.split()[0].removeprefix("--") for line in plan.choices]
    asked = ("activation_policy", "mlp_tiles", "keep_fp8_weights", "use_trained_cpu_offload")
    assert set(flags) <= set(asked) and len(flags) == ("hybrid" not in str(settings))
    for line, flag in zip(plan.choices, flags, strict=True):
        value = plan.setting(flag)
        assert line.split()[1].rstrip(":") == (
            str(value).lower() if isinstance(value, bool) else str(value)
        )


def test_a_policy_that_fills_a_budget_needs_no_more_than_it():
    plan = resolve(RunConfig(activation_budget_gib=40, context_length=8192), LLAMA_8B, H100)
    assert 35 < memory(LLAMA_8B, plan).peak_allocated <= 40


def test_what_keeps_everything_offloads_nothing():
    config = RunConfig(activation_budget_gib=70, use_activation_cpu_offload=True)
    plan = resolve(config, LLAMA_8B, H100)
    assert plan.memory.activation_policy == "keep_all" and not plan.memory.activation_offload


def test_attentions_outputs_are_offloaded_where_blocks_do_not_wait_and_the_host_holds_them():
    """A B200 has run a short block of a 1B model before its output is copied."""

    def moves(shape=LLAMA_8B, machine=H100, **settings):
        offload = dict(use_activation_cpu_offload=True, activation_policy="keep_attention")
        plan = resolve(RunConfig(**offload | settings), shape, machine)
        said = [line for line in plan.choices if "attention's outputs" in line]
        assert bool(said) == (plan.memory.attention_offload is False)
        return plan.memory.attention_offload, *said

    small, fast = model_shape("llama-3.2-1b"), replace(H100, gpu=find_gpu("b200"))
    assert moves() == moves(context_length=131_072) == moves(machine=cpu_machine(1)) == (True,)
    stays, said = moves(small, fast, context_length=4096, batch_size=8)
    assert not stays and "wait" in said
    assert moves(small, fast, context_length=131_072) == (True,)
    needed = host_memory(
        LLAMA_8B, resolve(RunConfig(**LONG), LLAMA_8B, H100).change(attention_offload=True)
    )
    for spare, expected in ((1, True), (-1, False)):
        host = replace(H100, host_memory_gib=sum(needed.values()) + spare)
        assert moves(machine=host, **LONG)[0] is expected


def test_only_what_keeps_attention_has_outputs_to_offload():
    for settings in (
        dict(activation_policy="recompute_all"),
        dict(activation_policy="keep_linears"),
    ):
        plan = resolve(RunConfig(use_activation_cpu_offload=True, **settings), LLAMA_8B, H100)
        assert not plan.memory.attention_offload and not plan.choices
    plan = resolve(RunConfig(activation_policy="keep_attention"), LLAMA_8B, H100)
    assert not plan.memory.attention_offload


def test_trained_weights_follow_the_others_where_they_take_an_eighth_of_the_card():
    """Weights, gradients and two states in fp32: 16 bytes a weight."""
    shape = model_shape("llama-2-7b")
    for rank in (8, 64, 512, 1024):
        plan = resolve(RunConfig(use_cpu_offload=True, lora_rank=rank), shape, H100)
        share = 16 * shape.lora_params(rank) / 2**30 / H100.gpu.memory_gib
        assert plan.memory.trained_offload is (share > 1 / 8)
    cpu = cpu_machine(1)
    assert resolve(RunConfig(use_cpu_offload=True), shape, cpu).memory.trained_offload


def test_tiles_that_come_to_one_are_replayed_as_one_that_is_given():
    chosen, given = (
        resolve(RunConfig(mlp_tiles=n, context_length=512), LLAMA_8B, H100) for n in (-1, 1)
    )
    assert chosen == given and chosen.loop.cuda_graphs


def test_sharded_micro_batches_are_replayed_where_the_card_holds_their_graphs():
    """Gradients of adapters stay there; launched one by one they come as what blocks kept goes."""
    settings = dict(context_length=512, lora_rank=256, gradient_accumulation_steps=1)
    config, shape = RunConfig(**settings), model_shape("llama-2-7b")

    def resolved(gib: float, shape=shape, **settings) -> Plan:
        card = machine_from_options(MachineOptions(gpu="h100", gpus=2, gpu_memory_gib=gib))
        return resolve(replace(config, **settings), shape, card)

    needs = {on: memory(shape, resolved(80, cuda_graphs=on)).total for on in (True, False)}
    between = (needs[True] + needs[False]) / 2 / (1 - SPARE_SHARE)
    assert resolved(80).loop.cuda_graphs and resolved(between - 4).loop.cuda_graphs
    tight = resolved(between)
    assert not tight.loop.cuda_graphs and "--cuda_graphs false" in tight.choices[-1]
    assert resolved(between, cuda_graphs=True).loop.cuda_graphs

    slow = machine_from_options(MachineOptions(gpu="rtx 3090", gpus=2))
    long = replace(config, context_length=2048)  # for which the host is fast enough
    assert (
        not resolve(long, shape, slow).loop.cuda_graphs
        and resolved(80, context_length=2048).loop.cuda_graphs
    )
    mixture = model_shape("qwen3-30b-a3b")
    for strategy in ("full_shard", "ddp"):
        assert resolved(79, mixture, sharding_strategy=strategy).loop.cuda_graphs
    full = RunConfig(train_type="full", context_length=512)  # which gains nothing
    card = machine_from_options(MachineOptions(gpu="h100", gpus=2))
    assert not resolve(full, shape, card).loop.cuda_graphs


def test_long_rows_take_attention_in_tiles_that_keep_a_gpu_busy():
    """2^17 tokens of each key-value head: all 8 heads of one row of 131,072, none apart at 8,192 x 2."""

    def tiles(**settings):
        plan = resolve(RunConfig(**settings), LLAMA_8B, H100)
        return plan.memory.attention_tiles

    assert tiles(mlp_tiles=8, context_length=131_072) == 8
    assert tiles(mlp_tiles=8, context_length=65_536) == 4
    assert tiles(mlp_tiles=2, context_length=8_192, batch_size=2) == 1
    assert tiles(context_length=131_072) == 1  # the MLP takes more


@pytest.mark.parametrize("policy", ["attention_mlp", "min_params"])
def test_blocks_that_are_gathered_in_parts_are_compiled_only_if_asked_for(policy):
    """FSDP's hooks inside of a block break its graph."""

    def compiled(world_size: int, **settings) -> bool:
        config = RunConfig(model_name="m", sharding_strategy="full_shard", **settings)
        return draft_plan(config, world_size).loop.compile

    assert compiled(2) and compiled(1, wrap_policy=policy)
    assert not compiled(2, wrap_policy=policy)
    assert not compiled(1, wrap_policy=policy, use_cpu_offload=True)
    assert compiled(2, wrap_policy=policy, compile=True)


def test_on_the_cpu_nothing_is_compiled_replayed_or_kept_in_fp8_unless_asked():
    config = RunConfig(compute_dtype="fp8", sharding_strategy="ddp", lora_dropout=0.0)
    plan = resolve(config, LLAMA_8B, cpu_machine(1))
    assert not (plan.loop.compile or plan.loop.cuda_graphs or plan.quantization.keep_fp8_weights)
    assert resolve(replace(config, compile=True), LLAMA_8B, cpu_machine(1)).loop.compile


# ---- rows of measurements ----------------------------------------------------------------------


SETTINGS = [dict(train_type=name) for name in TRAIN_TYPES if name != "custom_qlora"] + [
    dict(train_type="qlora", adapter="dora", lora_target_modules="q_proj,v_proj"),
    dict(train_type="hqq_lora", n_bits=2, lora_target_modules="all", absmax_dtype="int8"),
    dict(lora_target_modules="default", optimizer="adamw_8bit", adapter_dtype="bf16"),
    dict(use_cpu_offload=True, use_trained_cpu_offload=False, use_activation_cpu_offload=True),
    dict(global_batch_size=64, batch_size=4, context_length=1024, activation_policy="keep_linears"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_row_gives_back_the_plan_that_it_was_measured_with(settings):
    config = RunConfig(**settings)
    plan = draft_plan(config, 2, 2)
    row = replace(empty_row("x"), train_type=config.train_type, nodes=1, **of_plan(plan))
    again = plan_of(row)
    assert of_plan(again) == of_plan(plan)
    assert memory(LLAMA_8B, again) == memory(LLAMA_8B, plan)


def test_a_row_of_a_mixture_gives_back_the_adapters_on_its_experts():
    plan = draft_plan(RunConfig(lora_target_parameters="experts", lora_rank=16), 2, 2)
    row = replace(empty_row("x"), train_type="qlora", nodes=1, **of_plan(plan))
    mixture = model_shape("qwen3-30b-a3b")
    assert memory(mixture, plan_of(row)) == memory(mixture, plan)
    assert memory(mixture, plan_of(replace(row, expert_targets=None))) != memory(mixture, plan)


def test_a_row_from_before_rows_named_the_adapter_has_that_of_its_train_type():
    def older(**fields):
        return plan_of(replace(empty_row("x"), gpus=1, **fields)).adapter.adapter

    assert older(train_type="bnb_dora", lora_rank=64) == "dora"
    assert older(train_type="hqq_llama_pro") == "llama_pro"
    assert older(train_type="full") == "none"
    assert older(train_type="of another tool", lora_rank=8) == "lora"


@pytest.mark.parametrize(
    "width, settings, rate",
    [
        (2000, dict(), 7e-4),
        (4096, dict(train_type="bnb_dora"), 3.4e-4),
        (8192, dict(lora_rank=8), 1.7e-4),
        (576, dict(), 2.4e-3),
        (64, dict(), 5e-3),
        (4096, dict(train_type="full"), 3.4e-5),
        (4096, dict(train_type="bnb_llama_pro"), 3.4e-5),
        (4096, dict(lr=1e-5), 1e-5),
        (4096, dict(lr=0.0), 0.0),
    ],
)
def test_the_learning_rate_follows_the_width_unless_it_is_given(width, settings, rate):
    draft = draft_plan(RunConfig(**settings), 1)
    assert with_learning_rate(draft, width).optimizer.lr == rate


def test_a_resolved_plan_has_the_rate_of_its_models_width():
    plan = resolve(RunConfig(model_name="llama-2-70b"), model_shape("llama-2-70b"), H100)
    assert plan.optimizer.lr == 1.7e-4
