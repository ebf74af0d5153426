"""Settings: the old names, the shorthand, and refusals in one line that name flag and remedy."""

import runpy
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_qlora.choices import STRATEGIES
from fsdp_qlora.config import RunConfig, plan_batches
from fsdp_qlora.config.checks import check_choices
from fsdp_qlora.config.flags import parse
from fsdp_qlora.config.run import GROUPS, with_bins_of
from fsdp_qlora.config.settings import AUTO, changed_settings, opt
from fsdp_qlora.config.without_effect import (
    batch_above_data,
    lost_updates,
    odd_rates,
    settings_without_effect,
)

# Every flag of the original train.py.
OLD_FLAGS = """
world_size train_type llama_pro_path batch_size context_length gradient_accumulation_steps
num_epochs dataset dataset_samples sharding_strategy use_gradient_checkpointing
reentrant_checkpointing use_cpu_offload use_activation_cpu_offload low_memory no_sync precision
model_name save_model output_dir lora_rank lora_alpha lora_dropout lora_target_modules verbose lr
apply_gradient_clipping grad_norm wd profile_memory optimizer lr_scheduler loading_workers log_to
master_addr master_port seed project_name name group entity n_bits profile profiling_output
with_stack with_shapes export_trace export_memory_timeline wait_steps warmup_steps active_steps
repeat profiling_frequency max_steps
""".split()

OLD_CHOICES = {
    "train_type": "full lora qlora custom_qlora custom_lora hqq_lora hqq_dora bnb_dora "
    "bnb_llama_pro hqq_llama_pro",
    "sharding_strategy": "full_shard shard_grad_op ddp hybrid_full_shard hybrid_shard_grad_op",
    "precision": "fp32 bf16 fp16_autocast bf16_autocast bf16_buffers_autocast",
    "dataset": "alpaca alpaca_sample dummy guanaco sql orca_math",
    "lora_target_modules": "all default",
    "optimizer": "adamw adam sgd adadelta",
    "lr_scheduler": "constant linear cosine",
    "log_to": "tqdm wandb stdout",
}

BOOLEANS = [f.name for f in fields(RunConfig) if type(f.default) is bool]
PURE = (
    "config",
    "config.flags",
    "catalog.shapes",
    "catalog.hardware",
    "estimate",
    "planner",
    "cli",
)


def refusal(**settings) -> str:
    """The one line with which these settings are refused."""
    with pytest.raises(ValueError) as caught:
        RunConfig(**settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- names and values of the original script ---------------------------------------------------


@pytest.mark.parametrize("name", OLD_FLAGS)
def test_every_flag_of_the_original_script_is_a_setting(name):
    assert name in {f.name for f in fields(RunConfig)}


@pytest.mark.parametrize(
    "name, value", [(n, v) for n, vs in OLD_CHOICES.items() for v in vs.split()]
)
def test_every_choice_of_the_original_script_works_or_is_refused_by_name(name, value):
    try:
        RunConfig(**{name: value})
    except ValueError as error:
        assert f"--{name} {value} is not available in this version" in str(error)


def test_every_setting_is_in_one_group_and_has_help():
    names = [f.name for group in GROUPS for f in fields(group)]
    assert sorted(names) == sorted({f.name for f in fields(RunConfig)})
    assert all(f.metadata["help"] for f in fields(RunConfig))


def test_files_made_from_the_settings_are_current():
    """docs/flags.md and the schema of recipes follow every change of a setting."""
    made = runpy.run_path(str(Path(__file__).parents[1] / "scripts/make_reference.py"))["pages"]()
    for path, text in made.items():
        assert path.read_text() == text, (
            f"{path.name} is old; run: python scripts/make_reference.py"
        )


# ---- the shorthand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "train_type, quant, adapter",
    [
        ("full", "none", "none"),
        ("lora", "none", "lora"),
        ("custom_lora", "none", "lora"),
        ("qlora", "nf4", "lora"),
        ("custom_qlora", "nf4", "lora"),
        ("hqq_lora", "hqq", "lora"),
    ],
)
def test_train_type_stands_for_quant_and_adapter(train_type, quant, adapter):
    config = RunConfig(train_type=train_type)
    assert (config.quant, config.adapter) == (quant, adapter)


def test_quant_and_adapter_win_over_the_shorthand():
    assert RunConfig(train_type="qlora", quant="fp4").quant == "fp4"
    assert RunConfig(train_type="qlora", quant="none", adapter="none").adapter == "none"


@pytest.mark.parametrize(
    "given_names, targets",
    [
        ("all-linear", "all-linear"),
        ("default", None),
        (" q_proj, v_proj,", ["q_proj", "v_proj"]),
        ("all", ["k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"]),
    ],
)
def test_lora_target_modules_as_peft_takes_them(given_names, targets):
    assert RunConfig(lora_target_modules=given_names).target_modules == targets


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, parts",
    [
        (dict(batch_size=0), ["--batch_size", "1 or more", "0"]),
        (dict(lora_rank=0), ["--lora_rank", "1 or more"]),
        (dict(context_length=-5), ["--context_length", "1 or more", "-5"]),
        (dict(gradient_accumulation_steps=0), ["--gradient_accumulation_steps", "-1 or above 0"]),
        (dict(num_epochs=0), ["--num_epochs", "above 0"]),
        (dict(global_batch_size=0), ["--global_batch_size", "-1 or above 0"]),
        (dict(max_steps=0), ["--max_steps", "-1 or above 0"]),
        (dict(world_size=-2), ["--world_size", "-1 or above 0"]),
        (dict(lr=-1e-5), ["--lr", "0 or more"]),
        (dict(lr=float("nan")), ["--lr", "0 or more"]),
        (dict(grad_norm=0.0), ["--grad_norm", "above 0"]),
        (dict(lora_dropout=1.0), ["--lora_dropout", "below 1"]),
        (dict(warmup_share=1.5), ["--warmup_share", "below 1"]),
        (dict(lr_warmup_steps=-3), ["--lr_warmup_steps", "-1 or above", "-3"]),
        (
            dict(lr_warmup_steps=5, warmup_share=0.2),
            ["--lr_warmup_steps 5", "--warmup_share 0.2", "one"],
        ),
        (dict(timeout_minutes=0), ["--timeout_minutes", "from 0.01"]),
        (dict(lr="fast"), ["--lr", "a number", "'fast'"]),
        (dict(batch_size=1.5), ["--batch_size", "a whole number", "1.5"]),
        (dict(batch_size=True), ["--batch_size", "a whole number", "True"]),
        (dict(save_model="yes"), ["--save_model", "true or false", "'yes'"]),
        (dict(model_name=None), ["--model_name", "text"]),
        (dict(train_type="qdora"), ["--train_type qdora", "qlora"]),
        (dict(lora_rank_pattern="q_proj"), ["--lora_rank_pattern q_proj", "q_proj=16"]),
        (dict(lora_rank_pattern="(q_proj=2"), ["--lora_rank_pattern (q_proj=2", "ends of modules"]),
        (dict(lora_alpha_pattern="*q_proj=2"), ["'*q_proj' is not a regular expression"]),
        (dict(lora_alpha_pattern="q_proj=0"), ["--lora_alpha_pattern q_proj=0", "q_proj=16"]),
        (dict(loraplus_lr_ratio=0), ["--loraplus_lr_ratio", "above 0"]),
        (dict(quant="int4"), ["--quant int4", "nf4", "none"]),
        (dict(sharding_strategy="zero3"), ["--sharding_strategy zero3", *STRATEGIES]),
        (dict(optimizer="lion"), ["--optimizer lion", "adamw", "sgd"]),
        (dict(precision="mp_bf16_autocast"), ["--precision mp_bf16_autocast", "bf16", "fp32"]),
        (dict(train_type="full", quant="nf4"), ["--quant nf4", "--adapter lora", "--quant none"]),
        (
            dict(lora_target_parameters="experts", lora_dropout=0.1),
            ["--lora_target_parameters experts", "--lora_dropout 0"],
        ),
        (
            dict(lora_target_parameters="experts", adapter="dora", lora_dropout=0.0),
            ["--lora_target_parameters experts", "--adapter dora", "--adapter lora"],
        ),
        (dict(lora_target_modules=" , "), ["--lora_target_modules", "all-linear"]),
        (
            dict(train_type="full", use_cpu_offload=True, use_trained_cpu_offload=False),
            ["--use_trained_cpu_offload false", "full", "leave one"],
        ),
        (
            dict(use_cpu_offload=True, gather_once=True),
            ["--gather_once", "--use_cpu_offload", "leave one"],
        ),
        (
            dict(train_type="full", use_vocabulary_cpu_offload=True),
            ["--use_vocabulary_cpu_offload", "full", "--use_cpu_offload"],
        ),
        (dict(num_epochs=1.5, stream=True), ["--num_epochs 1.5", "--max_steps"]),
        (
            dict(early_stopping_patience=3, eval_share=0.1),
            ["--early_stopping_patience 3", "--eval_every"],
        ),
        (
            dict(profile=True, profile_memory=True),
            ["--profile_memory", "--profile", "give only one"],
        ),
        (
            dict(use_activation_cpu_offload=True, use_gradient_checkpointing=False),
            ["--use_activation_cpu_offload", "keep_all", "--activation_policy"],
        ),
        (
            dict(sharding_strategy="ddp", use_cpu_offload=True),
            ["--use_cpu_offload", "ddp", "full_shard"],
        ),
        (
            dict(mlp_tiles=2, wrap_policy="min_params"),
            ["--mlp_tiles 2", "min_params", "--wrap_policy block"],
        ),
    ],
    ids=lambda v: "+".join(v) if isinstance(v, dict) else "",
)
def test_a_mistake_is_one_line_with_the_flag_and_what_would_work(settings, parts):
    message = refusal(**settings)
    assert all(part in message for part in parts), message


@dataclass
class WithLater:
    """Settings, of which some values are still to come."""

    kind: str = opt("a", "help", choices=("a", "b"), later=("b",))
    path: str | None = opt(None, "help", later=("*",))


@pytest.mark.parametrize(
    "name, value, usable", [("kind", "b", "choose a"), ("path", "x", "leave it at None")]
)
def test_a_later_feature_is_refused_by_name_and_value(name, value, usable):
    with pytest.raises(ValueError) as caught:
        check_choices(WithLater(**{name: value}))
    assert str(caught.value) == f"--{name} {value} is not available in this version; {usable}"


def test_bits_are_hqqs_and_fp8_products_those_of_other_formats():
    assert RunConfig(train_type="hqq_lora", n_bits=3).quant_type == "hqq3"
    assert RunConfig(quant="hqq").quant_type == "hqq4" and RunConfig().quant_type == "nf4"
    assert "--n_bits 3 needs --quant hqq" in refusal(n_bits=3)
    for quant in ("int8", "hqq"):
        message = refusal(compute_dtype="fp8", quant=quant)
        assert f"--quant {quant}" in message and "nf4" in message


@pytest.mark.parametrize("bits", [1, 5, 16])
def test_bits_that_no_version_has_are_refused(bits):
    assert "--n_bits" in refusal(n_bits=bits)


@pytest.mark.parametrize("name", BOOLEANS)
def test_a_switch_takes_no_number(name):
    assert f"--{name}" in refusal(**{name: 1})


def test_a_whole_number_is_a_number():
    config = RunConfig(lr=1, grad_norm=2)
    assert (config.lr, type(config.lr), config.grad_norm) == (1.0, float, 2.0)


def test_changed_settings_are_those_that_differ_from_the_default():
    changed = changed_settings(RunConfig(lora_rank=8, train_type="lora"))
    assert changed == {
        "lora_rank": 8,
        "train_type": "lora",
        "quant": "none",
        "adapter": "lora",
        "activation_policy": "recompute_all",
    }


# ---- batches -----------------------------------------------------------------------------------

SIZES = dict(micro=st.integers(1, 64), world=st.integers(1, 300))


@given(rows=st.integers(1, 5000), **SIZES)
def test_global_batch_size_is_kept_for_any_world_size(rows, micro, world):
    """No rank needs one micro-batch more than the rows ask for, and none can hold too few."""
    plan = plan_batches(RunConfig(global_batch_size=rows, batch_size=micro), world)
    assert plan.per_step == rows
    assert 1 <= plan.micro_batch_size <= micro
    assert plan.micro_batch_size * plan.accumulation * world >= rows
    assert plan.micro_batch_size * (plan.accumulation - 1) * world < rows


@given(accumulation=st.integers(1, 64), **SIZES)
def test_without_global_batch_size_rows_are_the_product(micro, accumulation, world):
    config = RunConfig(batch_size=micro, gradient_accumulation_steps=accumulation)
    assert config.global_batch_size == AUTO
    plan = plan_batches(config, world)
    assert plan.per_step == micro * accumulation * world
    assert (plan.micro_batch_size, plan.accumulation) == (micro, accumulation)


@pytest.mark.parametrize(
    "settings, world, rows",
    [
        (dict(), 1, 8),
        (dict(), 4, 8),
        (dict(batch_size=3), 1, 9),
        (dict(batch_size=16), 1, 16),
        (dict(batch_size=2), 8, 16),
        (dict(sequence_parallel=2), 2, 8),
        (dict(packing=True, batch_size=2), 2, 8),  # bins
        (dict(gradient_accumulation_steps=1), 1, 1),
        (dict(gradient_accumulation_steps=3, batch_size=2), 2, 12),
    ],
)
def test_a_step_has_as_few_micro_batches_as_make_eight_rows(settings, world, rows):
    assert plan_batches(RunConfig(**settings), world).per_step == rows


@pytest.mark.parametrize(
    "settings, mean_length, world, bins",
    [
        (dict(), 4096, 1, 8),  # a row fills a bin
        (dict(), 1024, 1, 8),  # 8 bins hold 32 rows
        (dict(), 250, 1, 2),  # 2 bins hold 33
        (dict(), 250, 4, 4),  # each GPU has one
        (dict(), 250, 8, 8),
        (dict(), 10, 1, 1),
        (dict(batch_size=4), 250, 1, 4),  # a micro-batch stays as it is
        (dict(batch_size=2), 700, 1, 6),
        (dict(sequence_parallel=2), 250, 4, 2),
        (dict(gradient_accumulation_steps=3), 250, 1, 3),  # as given
        (dict(), 0, 1, 8),  # nothing is known
    ],
)
def test_a_step_has_as_few_bins_as_hold_about_32_rows_and_8_at_most(
    settings, mean_length, world, bins
):
    given = RunConfig(packing=True, context_length=4096, **settings)
    decided = with_bins_of(given, mean_length, world)
    assert plan_batches(decided, world).per_step == bins
    assert decided.batch_size == given.batch_size
    assert decided is given or with_bins_of(decided, 1, world) is decided  # decided once


@pytest.mark.parametrize(
    "settings",
    [dict(packing=False), dict(global_batch_size=64), dict(batch_size=AUTO)],
    ids=str,
)
def test_lengths_of_rows_change_no_step_of_rows(settings):
    given = RunConfig(**dict(packing=True, context_length=4096) | settings)
    assert with_bins_of(given, 250, 1) is given


@pytest.mark.parametrize(
    "settings, schedule",
    [
        (dict(), "cosine"),
        (dict(stream=True), "constant"),
        (dict(stream=True, max_steps=5), "cosine"),
        (dict(lr_scheduler="linear"), "linear"),
    ],
)
def test_the_rate_decays_over_a_run_whose_length_is_known(settings, schedule):
    assert RunConfig(**settings).schedule == schedule


# ---- the pure layer ----------------------------------------------------------------------------


@pytest.mark.parametrize("module", PURE)
def test_the_pure_layer_imports_no_torch(module):
    code = (
        f"import sys, fsdp_qlora.{module}; "
        "print(*({'torch', 'transformers', 'bitsandbytes', 'peft'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_a_changed_setting_that_does_nothing_warns_and_says_why():
    warnings = settings_without_effect(
        RunConfig(low_memory=False, global_batch_size=8, gradient_accumulation_steps=2, name="a")
    )
    assert len(warnings) == 3
    assert any("loading always streams" in w for w in warnings)
    assert any("--gradient_accumulation_steps" in w for w in warnings)
    assert not settings_without_effect(RunConfig())
    assert settings_without_effect(RunConfig(train_type="lora", absmax_dtype="int8")) == [
        "--absmax_dtype has no effect: it needs quantized weights"
    ]
    full = settings_without_effect(RunConfig(train_type="full", lora_rank=8, use_rslora=True))
    assert [w.split()[0] for w in full] == ["--lora_rank", "--use_rslora"]
    assert settings_without_effect(RunConfig(mlp_tiles=4, activation_policy="keep_linears")) == [
        "--mlp_tiles has no effect: under keep_linears no MLP is recomputed"
    ]


@pytest.mark.parametrize(
    "name, value, turned_on_by",
    [
        ("shuffle_buffer", 9, dict(stream=True)),
        ("min_wrap_params", 9, dict(wrap_policy="min_params")),
        ("loftq_iter", 2, dict(init_lora_weights="loftq")),
        ("shard_group_size", 2, dict(sharding_strategy="hybrid_full_shard")),
        ("dataset_samples", 9, dict(dataset="dummy")),
        ("dataset_samples", 9, dict(dataset="orca_math")),
        ("keep_checkpoints", 5, dict(checkpoint_every=4)),
    ],
)
def test_a_detail_of_something_that_is_off_warns(name, value, turned_on_by):
    off = dict(dataset="rows.jsonl", checkpoint_minutes=0.0, **{name: value})
    (warning,) = settings_without_effect(RunConfig(**off))
    assert warning.startswith(f"--{name} has no effect: it needs ")
    assert not settings_without_effect(RunConfig(**off | turned_on_by))


def warned(**settings) -> list[str]:
    """The flags that a run says have no effect."""
    return [w.split()[0] for w in settings_without_effect(RunConfig(**settings))]


@pytest.mark.parametrize(
    "flag, without, with_it",
    [
        (
            "no_sync",
            dict(no_sync=True, gradient_accumulation_steps=1),
            dict(gradient_accumulation_steps=2),
        ),
        (
            "grad_norm",
            dict(grad_norm=0.5, apply_gradient_clipping=False),
            dict(apply_gradient_clipping=True),
        ),
        ("warmup_share", dict(warmup_share=0.2, lr_scheduler="constant"), dict(lr_scheduler=None)),
        (
            "no_sync",
            dict(no_sync=True, global_batch_size=2, batch_size=2),
            dict(global_batch_size=8),
        ),
        (
            "no_sync",
            dict(no_sync=True, gradient_accumulation_steps=2, sharding_strategy="ddp"),
            dict(sharding_strategy="full_shard"),
        ),
        (
            "gather_once",
            dict(gather_once=True, sharding_strategy="shard_grad_op", batch_size=8),
            dict(batch_size=4),
        ),
        (
            "use_gradient_checkpointing",
            dict(use_gradient_checkpointing=False, activation_policy="keep_linears"),
            dict(activation_policy="auto"),
        ),
        (
            "wrap_policy",
            dict(wrap_policy="attention_mlp", sharding_strategy="ddp"),
            dict(sharding_strategy="full_shard"),
        ),
        ("wd", dict(wd=0.2, optimizer="sgd"), dict(optimizer="adamw_8bit")),
        ("data_cache", dict(data_cache="cache", stream=True, max_steps=1), dict(stream=False)),
        (
            "dataset_split",
            dict(dataset_split="validation", dataset="dummy"),
            dict(dataset="me/rows"),
        ),
        (
            "eval_split",
            dict(eval_split="validation", dataset="dummy"),
            dict(eval_dataset="me/rows"),
        ),
        (
            "loading_workers",
            dict(loading_workers=2, random_weights=True),
            dict(random_weights=False),
        ),
        ("log_every", dict(log_every=2, log_to="jsonl"), dict(log_to="jsonl,wandb")),
        (
            "max_bad_steps",
            dict(max_bad_steps=5, on_bad_steps="skip"),
            dict(on_bad_steps="rollback"),
        ),
        (
            "verify_frozen_minutes",
            dict(verify_frozen_minutes=5.0, train_type="full", optimizer="adamw_8bit"),
            dict(trained_modules="lm_head"),
        ),
        (
            "reentrant_checkpointing",
            dict(reentrant_checkpointing=True, use_gradient_checkpointing=False),
            dict(use_gradient_checkpointing=True),
        ),
        ("deterministic", dict(deterministic=True, device="cpu"), dict(device="auto")),
        ("master_port", dict(master_port="29500", world_size=1), dict(world_size=2)),
    ],
)
def test_every_setting_warns_in_a_run_in_which_it_does_nothing(flag, without, with_it):
    assert warned(**without) == [f"--{flag}"]
    assert f"--{flag}" not in warned(**without | with_it)


def test_a_revision_of_a_folder_warns(tmp_path):
    assert warned(revision="main", model_name=str(tmp_path)) == ["--revision"]
    assert not warned(revision="main", model_name="me/model")


@pytest.mark.parametrize(
    "flag, value",
    [
        ("grad_norm", 1.0),
        ("warmup_share", 0.03),
        ("lora_rank", 64),
        ("backward_prefetch", "backward_pre"),
    ],
)
def test_a_setting_without_effect_is_said_too_where_it_was_typed_at_its_default(flag, value):
    others = {
        "grad_norm": ["--apply_gradient_clipping", "false"],
        "warmup_share": ["--lr_scheduler", "constant"],
        "lora_rank": ["--train_type", "full"],
        "backward_prefetch": ["--sharding_strategy", "ddp"],
    }
    (config,) = parse([f"--{flag}", str(value), *others.get(flag, [])])
    assert [w.split()[0] for w in settings_without_effect(config)] == [f"--{flag}"]
    (config,) = parse(others.get(flag, []))
    assert not settings_without_effect(config)


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(lr=0.02), "--lr 0.02 is above 1e-2"),
        (
            dict(lr=1e-3, loraplus_lr_ratio=16.0),
            "--lr 0.001 x --loraplus_lr_ratio 16 is above 1e-2",
        ),
        (dict(lr=0.02, train_type="bnb_dora"), "--lr 0.02"),
        (dict(lr=0.0), "--lr 0 changes no weight"),
        (dict(lr=0.0, train_type="full"), "--lr 0 changes no weight"),
        (dict(lr=0.01), None),
        (dict(lr=0.02, optimizer="sgd"), None),
        (dict(lr=0.02, train_type="full"), None),
    ],
)
def test_a_learning_rate_at_which_nothing_is_learnt_or_adapters_diverge_warns(settings, words):
    found = odd_rates(RunConfig(**settings))
    assert (words in found[0]) if words else not found


def test_a_batch_larger_than_the_data_warns():
    plan = plan_batches(RunConfig(batch_size=8, gradient_accumulation_steps=4), world_size=2)
    (warning,) = batch_above_data(plan, 63)
    assert warning.startswith(
        "a step takes 64 rows, but the data have only 63 rows, so each step is a whole"
    )
    assert not batch_above_data(plan, 64) and not batch_above_data(plan, None)


def test_settings_of_the_profile_and_of_gathering_warn_where_there_is_neither():
    assert warned(with_stack=True, active_steps=3) == ["--with_stack", "--active_steps"]
    assert not warned(profile=True, with_stack=True, active_steps=3)
    assert warned(sharding_strategy="ddp", gather_once=True, backward_prefetch="none") == [
        "--backward_prefetch",
        "--gather_once",
    ]
    assert not warned(gather_once=True, backward_prefetch="none")


@pytest.mark.parametrize(
    "settings, warns",
    [
        (dict(train_type="full"), True),
        (dict(train_type="full", optimizer="sgd"), True),
        (dict(train_type="full", optimizer="adamw_8bit"), False),
        (dict(), False),
        (dict(train_type="full", precision="fp32"), False),
        (dict(adapter_dtype="bf16"), True),
    ],
)
def test_bf16_weights_under_an_optimizer_that_loses_small_updates_warn(settings, warns):
    warnings = lost_updates(RunConfig(**settings))
    assert bool(warnings) == warns
    assert not warns or "adamw_8bit" in warnings[0]
