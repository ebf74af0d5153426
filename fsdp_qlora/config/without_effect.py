"""Warnings about settings that do nothing in this run, or lose something. Pure: no torch."""
from __future__ import annotations

from .lists import policy_names
from .options import ACTIVATION_POLICIES, TILED_POLICIES
from .settings import changed_settings

ROUNDED_STOCHASTICALLY = ("adamw_bf16", "adamw_8bit", "adafactor")

# Settings of the original script that change nothing here, with what does.
WITHOUT_EFFECT = {
    "low_memory": "the load is always streamed",
    "export_trace": "--profile decides",
    "export_memory_timeline": "--profile decides",
}
OF_ADAPTERS = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules", "modules_to_save",
               "layers_to_transform", "init_lora_weights", "use_rslora", "lora_rank_pattern",
               "lora_alpha_pattern", "loraplus_lr_ratio", "lora_target_parameters", "bias")
OF_THE_PROFILE = ("profiling_output", "with_stack", "with_shapes", "wait_steps", "warmup_steps",
                  "active_steps", "repeat", "profiling_frequency")


def warnings_of(config) -> list[str]:
    """All that a run says of its settings before it begins."""
    return settings_without_effect(config) + lost_updates(config)


def settings_without_effect(config) -> list[str]:
    """A warning for each changed setting that does nothing in this run."""
    changed = changed_settings(config)
    warnings = [f"--{name} has no effect: {why}" for name, why in WITHOUT_EFFECT.items()
                if name in changed]
    if not config.has_lora:
        kind = "llama_pro has no LoRA" if config.adapter == "llama_pro" else "full has no adapters"
        warnings += [f"--{name} has no effect: --train_type {kind}" for name in
                     OF_ADAPTERS if name in changed]
    if not config.profile:
        rate = {"warmup_steps": "; that of the learning rate is --lr_warmup_steps"}
        warnings += [f"--{name} has no effect: it belongs to --profile{rate.get(name, '')}"
                     for name in OF_THE_PROFILE if name in changed]
    warnings += [f"--{name} has no effect: it belongs to {other}"
                 for name, other in unused_details(config).items() if name in changed]
    if "absmax_dtype" in changed and config.quant == "none":
        warnings.append("--absmax_dtype has no effect: no weight is quantized")
    if config.keep_fp8_weights is False and config.compute_dtype != "fp8":
        warnings.append("--keep_fp8_weights has no effect: it belongs to --compute_dtype fp8")
    if config.use_trained_cpu_offload is not None and not config.use_cpu_offload:
        warnings.append("--use_trained_cpu_offload has no effect: it belongs to --use_cpu_offload")
    whole = set(ACTIVATION_POLICIES) - set(TILED_POLICIES)
    if config.mlp_tiles != 1 and policy_names(config) <= whole:
        warnings.append(f"--mlp_tiles has no effect: under {' and '.join(sorted(policy_names(config)))} "
                        "no MLP is computed again")
    if config.sharding_strategy == "ddp":
        warnings += [f"--{name} has no effect: ddp gathers nothing" for name in
                     ("backward_prefetch", "forward_prefetch", "gather_once") if name in changed]
    if config.quantized_cache and (config.quant == "none" or config.random_weights):
        why = "the weights are random" if config.random_weights else "no weight is quantized"
        warnings.append(f"--quantized_cache has no effect: {why}")
    if "global_batch_size" in changed and "gradient_accumulation_steps" in changed:
        warnings.append("--gradient_accumulation_steps has no effect: it follows from "
                        "--global_batch_size")
    return warnings


def unused_details(config) -> dict[str, str]:
    """Settings that say how another one works which is off in this run, with that other one."""
    others = {"grad_norm": ("--apply_gradient_clipping", config.apply_gradient_clipping),
              "loftq_iter": ("--init_lora_weights loftq", config.init_lora_weights == "loftq"),
              "shuffle_buffer": ("--stream", config.stream),
              "llama_pro_blocks": ("--adapter llama_pro", config.adapter == "llama_pro"),
              "llama_pro_path": ("--adapter llama_pro", config.adapter == "llama_pro"),
              **dict.fromkeys(("project_name", "name"), ("--log_to wandb or mlflow",
                                                         {"wandb", "mlflow"} & set(config.trackers))),
              **dict.fromkeys(("group", "entity"), ("--log_to wandb", "wandb" in config.trackers)),
              "min_wrap_params": ("--wrap_policy min_params", config.wrap_policy == "min_params"),
              "sample_tokens": ("--samples", config.samples or config.sample_prompts),
              "shard_group_size": ("the hybrid strategies",
                                   config.sharding_strategy.startswith("hybrid"))}
    return {name: other for name, (other, is_on) in others.items() if not is_on}


def lost_updates(config) -> list[str]:
    """A warning if bf16 weights are trained by an optimizer that rounds to the nearest."""
    trained = config.stored_dtype if config.adapter == "none" else config.adapter_dtype
    if trained != "bf16" or config.optimizer in ROUNDED_STOCHASTICALLY: return []
    return [f"--optimizer {config.optimizer} on bf16 weights: an update below 1/512 of a weight is "
            f"rounded to nothing; {', '.join(ROUNDED_STOCHASTICALLY)} round stochastically"]
