"""Warnings about settings that do nothing in this run, or lose something. Pure: no torch."""

from __future__ import annotations

from pathlib import Path

from ..choices import OPTIMIZERS, POLICIES
from ..choices.optimizers import names_where
from .lists import TERMINAL_FORMS, policy_names
from .settings import AUTO, changed_settings, counted, one_of, parts_of

# Settings of the original script that change nothing here, with what does.
_WITHOUT_EFFECT = {
    "low_memory": "loading always streams",
    "export_trace": "--profile decides",
    "export_memory_timeline": "--profile decides",
}
_OF_ADAPTERS = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "modules_to_save",
    "layers_to_transform",
    "init_lora_weights",
    "use_rslora",
    "lora_rank_pattern",
    "lora_alpha_pattern",
    "loraplus_lr_ratio",
    "lora_target_parameters",
    "bias",
)
_OF_GATHERING = (
    "wrap_policy",
    "min_wrap_params",
    "backward_prefetch",
    "forward_prefetch",
    "gather_once",
)
_OF_THE_PROFILE = (
    "profiling_output",
    "with_stack",
    "with_shapes",
    "wait_steps",
    "warmup_steps",
    "active_steps",
    "repeat",
    "profiling_frequency",
)


def warnings_of(config) -> list[str]:
    """All that a run says of its settings before it begins."""
    return settings_without_effect(config) + lost_updates(config) + high_rates(config)


def settings_without_effect(config) -> list[str]:
    """A warning for each setting that does nothing in this run: changed, or typed as it is anyway."""
    changed = changed_settings(config).keys() | config.typed
    warnings = [
        f"--{name} has no effect: {why}" for name, why in _WITHOUT_EFFECT.items() if name in changed
    ]
    if not config.has_lora:
        kind = "llama_pro has no LoRA" if config.adapter == "llama_pro" else "full has no adapters"
        warnings += [
            f"--{name} has no effect: --train_type {kind}"
            for name in _OF_ADAPTERS
            if name in changed
        ]
    if not config.profile:
        rate = {"warmup_steps": "; for the learning rate, use --lr_warmup_steps"}
        warnings += [
            f"--{name} has no effect: it belongs to --profile{rate.get(name, '')}"
            for name in _OF_THE_PROFILE
            if name in changed
        ]
    warnings += [
        f"--{name} has no effect: it belongs to {other}"
        for name, other in _unused_details(config).items()
        if name in changed
    ]
    if "absmax_dtype" in changed and config.quant == "none":
        warnings.append("--absmax_dtype has no effect: no weight is quantized")
    if config.keep_fp8_weights is False and config.compute_dtype != "fp8":
        warnings.append("--keep_fp8_weights has no effect: it belongs to --compute_dtype fp8")
    if config.use_trained_cpu_offload is not None and not config.use_cpu_offload:
        warnings.append("--use_trained_cpu_offload has no effect: it belongs to --use_cpu_offload")
    whole = {name for name, policy in POLICIES.items() if not policy.reruns_mlp}
    if config.mlp_tiles != 1 and policy_names(config) <= whole:
        warnings.append(
            f"--mlp_tiles has no effect: under {' and '.join(sorted(policy_names(config)))} no MLP "
            "is recomputed"
        )
    if not config.strategy.shards:
        warnings += [
            f"--{name} has no effect: {config.sharding_strategy} gathers nothing"
            for name in _OF_GATHERING
            if name in changed and name not in _unused_details(config)
        ]
    warnings += [
        f"--{name} has no effect: {why}"
        for name, why in one_at_a_time(config).items()
        if name in changed
    ]
    if config.quantized_cache and (config.quant == "none" or config.random_weights):
        why = "the weights are random" if config.random_weights else "no weight is quantized"
        warnings.append(f"--quantized_cache has no effect: {why}")
    if "global_batch_size" in changed and "gradient_accumulation_steps" in changed:
        warnings.append(
            "--gradient_accumulation_steps has no effect: it follows from --global_batch_size"
        )
    return warnings


def _unused_details(config) -> dict[str, str]:
    """Settings that say how another one works which is off in this run, with that other one."""
    others = {
        "warmup_share": ("--lr_scheduler linear or cosine", config.lr_scheduler != "constant"),
        "wd": (
            f"--optimizer {one_of(names_where('decays'))}",
            OPTIMIZERS[config.optimizer].decays,
        ),
        "dataset_samples": (
            "--dataset alpaca_sample, dummy or orca_math",
            {config.dataset, config.eval_dataset} & {"alpaca_sample", "dummy", "orca_math"},
        ),
        "dataset_split": ("a dataset with splits", config.dataset != "dummy"),
        "eval_split": (
            "a dataset with splits",
            (config.eval_dataset or config.dataset) != "dummy",
        ),
        "revision": ("a --model_name on the hub", not Path(config.model_name).exists()),
        "data_cache": ("data read without --stream", not config.stream),
        "loading_workers": (
            "weights read from files, without --random_weights",
            not config.random_weights,
        ),
        "log_every": ("outputs of --log_to that show averages", _log_shows_means(config)),
        "keep_checkpoints": (
            "--checkpoint_every or --checkpoint_minutes",
            config.checkpoint_every != AUTO or config.checkpoint_minutes,
        ),
        "max_bad_steps": ("--on_bad_steps stop or rollback", config.on_bad_steps != "skip"),
        "verify_frozen_minutes": (
            "frozen weights, and --train_type full has none",
            config.adapter != "none" or config.only_modules,
        ),
        "reentrant_checkpointing": (
            "blocks that are recomputed",
            policy_names(config) != {"keep_all"},
        ),
        "deterministic": ("a GPU", config.device != "cpu"),
        **dict.fromkeys(("master_addr", "master_port"), ("several ranks", config.world_size != 1)),
        "grad_norm": ("--apply_gradient_clipping", config.apply_gradient_clipping),
        "loftq_iter": ("--init_lora_weights loftq", config.init_lora_weights == "loftq"),
        "shuffle_buffer": ("--stream", config.stream),
        "llama_pro_blocks": ("--adapter llama_pro", config.adapter == "llama_pro"),
        "llama_pro_path": ("--adapter llama_pro", config.adapter == "llama_pro"),
        **dict.fromkeys(
            ("project_name", "name"),
            ("--log_to wandb or mlflow", {"wandb", "mlflow"} & set(config.trackers)),
        ),
        **dict.fromkeys(("group", "entity"), ("--log_to wandb", "wandb" in config.trackers)),
        "min_wrap_params": ("--wrap_policy min_params", config.wrap_policy == "min_params"),
        "sample_tokens": ("--samples", config.samples or config.sample_prompts),
        "shard_group_size": (
            "the hybrid strategies",
            config.strategy.is_hybrid,
        ),
    }
    return {name: other for name, (other, is_on) in others.items() if not is_on}


def one_at_a_time(config) -> dict[str, str]:
    """Settings that are about several of a thing of which this run has one, with why they do nothing."""
    single = (
        config.gradient_accumulation_steps
        if config.global_batch_size == AUTO
        else config.global_batch_size // config.batch_size
    ) <= 1
    found = {}
    if not config.strategy.shards:
        found["no_sync"] = f"{config.sharding_strategy} always reduces once per step"
    elif single:
        found["no_sync"] = "a step has one micro-batch; add --gradient_accumulation_steps"
    if single and config.strategy.reshard_after_forward is False:
        found["gather_once"] = "a step has one micro-batch, and shard_grad_op gathers once for it"
    ends = {True: {"recompute_all"}, False: {"keep_all"}}[config.use_gradient_checkpointing]
    if policy_names(config) not in (ends, {"auto"}):
        found["use_gradient_checkpointing"] = (
            f"--activation_policy {config.activation_policy} decides"
        )
    return found


def _log_shows_means(config) -> bool:
    """Whether something of --log_to takes a mean of several steps: JSON lines have each step."""
    return config.trackers or set(parts_of(config.log_to)) & set(TERMINAL_FORMS) != {"jsonl"}


def high_rates(config) -> list[str]:
    """A warning for a learning rate at which adapters are known to diverge."""
    highest = config.lr * max(1.0, config.loraplus_lr_ratio)
    if not config.has_lora or highest <= 1e-2 or not OPTIMIZERS[config.optimizer].scales_steps:
        return []
    of_b = f" x --loraplus_lr_ratio {config.loraplus_lr_ratio:g}" if config.lr <= 1e-2 else ""
    return [
        f"--lr {config.lr:g}{of_b} is above 1e-2, where adapters diverge; 1e-4 to 5e-4 is usual"
    ]


def batch_above_data(batches, rows: int | None) -> list[str]:
    """A warning if a step of a BatchPlan asks for more than there is; None is not known."""
    if rows is None or batches.per_step <= rows:
        return []
    return [
        f"a step takes {counted(batches.per_step, batches.unit)}, but the data have only "
        f"{counted(rows, 'row')}, so each step is a whole epoch; lower --global_batch_size, or "
        "--batch_size and --gradient_accumulation_steps"
    ]


def lost_updates(config) -> list[str]:
    """A warning if bf16 weights are trained by an optimizer that rounds to the nearest."""
    trained = config.stored_dtype if config.adapter == "none" else config.adapter_dtype
    if trained != "bf16" or OPTIMIZERS[config.optimizer].rounds_stochastically:
        return []
    return [
        f"--optimizer {config.optimizer} on bf16 weights: updates below 1/512 of a weight are "
        f"rounded away; use {', '.join(names_where('rounds_stochastically'))}, which round "
        "stochastically"
    ]
