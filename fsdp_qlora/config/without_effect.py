"""Warnings about settings that do nothing in this run, or lose something. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..choices import OPTIMIZERS, POLICIES
from ..choices.optimizers import names_where
from .lists import TERMINAL_FORMS, policy_names
from .settings import AUTO, changed_settings, counted, parts_of

# Why a setting does nothing in a configuration, or None: a field in options/ names its rule.
Rule = Callable[[Any], str | None]


def needs(what: str, is_met: Callable[[Any], Any]) -> Rule:
    """The rule of a setting that says how something works which may be off."""
    return lambda config: None if is_met(config) else f"it needs {what}"


def always(why: str) -> Rule:
    """The rule of a setting of the original script that changes nothing here."""
    return lambda config: why


LORA = needs("--adapter lora or dora", lambda c: c.has_lora)
LLAMA_PRO = needs("--adapter llama_pro", lambda c: c.adapter == "llama_pro")
PROFILE = needs("--profile", lambda c: c.profile)
SEVERAL_RANKS = needs("several ranks", lambda c: c.world_size != 1)
WANDB = needs("--log_to wandb", lambda c: "wandb" in c.trackers)
NAMED_TRACKERS = needs("--log_to wandb or mlflow", lambda c: {"wandb", "mlflow"} & {*c.trackers})


def of_gathering(config) -> str | None:
    """The rule of settings that say what is gathered, and when."""
    return None if config.strategy.shards else f"{config.sharding_strategy} gathers nothing"


def of_min_wrap_params(config) -> str | None:
    """It sizes the units of one policy."""
    if config.wrap_policy != "min_params":
        return "it needs --wrap_policy min_params"
    return of_gathering(config)


def of_gather_once(config) -> str | None:
    """It is about several micro-batches, each of which gathers."""
    if _has_one_micro_batch(config) and config.strategy.reshard_after_forward is False:
        return "a step has one micro-batch, and shard_grad_op gathers once for it"
    return of_gathering(config)


def of_no_sync(config) -> str | None:
    """It is about several micro-batches, each of which reduces."""
    if not config.strategy.shards:
        return f"{config.sharding_strategy} always reduces once per step"
    if _has_one_micro_batch(config):
        return "a step has one micro-batch; add --gradient_accumulation_steps"
    return None


def _has_one_micro_batch(config) -> bool:
    """Whether each step has only one."""
    if config.units_per_step == AUTO:
        return config.accumulation(max(1, config.world_size)) <= 1
    return config.units_per_step // config.batch_size <= 1


def of_gradient_accumulation(config) -> str | None:
    """Rows or bins of a step may be given instead."""
    if config.units_per_step == AUTO:
        return None
    flag = "bins_per_step" if config.has_full_bins else "global_batch_size"
    return f"it follows from --{flag}"


def of_gradient_checkpointing(config) -> str | None:
    """It is a short form of a policy."""
    meant = "recompute_all" if config.use_gradient_checkpointing else "keep_all"
    if policy_names(config) in ({meant}, {"auto"}):
        return None
    return f"--activation_policy {config.activation_policy} decides"


def of_mlp_tiles(config) -> str | None:
    """Only an MLP that is recomputed can be tiled."""
    policies, whole = policy_names(config), {n for n, p in POLICIES.items() if not p.reruns_mlp}
    if config.mlp_tiles == 1 or not policies <= whole:
        return None
    return f"under {' and '.join(sorted(policies))} no MLP is recomputed"


def of_quantized_cache(config) -> str | None:
    """It holds what is made of a checkpoint."""
    if config.random_weights:
        return "the weights are random"
    return "no weight is quantized" if config.quant == "none" else None


def shows_averages(config) -> bool:
    """Whether something of --log_to averages several steps: JSON lines have each step."""
    return config.trackers or set(parts_of(config.log_to)) & set(TERMINAL_FORMS) != {"jsonl"}


def warnings_of(config) -> list[str]:
    """All that a run says of its settings before it begins."""
    return settings_without_effect(config) + lost_updates(config) + odd_rates(config)


def settings_without_effect(config) -> list[str]:
    """A warning for each setting that does nothing in this run: changed, or typed as it is anyway."""
    given = changed_settings(config).keys() | config.typed
    rules = {f.name: f.metadata["no_effect"] for f in fields(config) if f.name in given}
    return [
        f"--{name} has no effect: {why}"
        for name, rule in rules.items()
        if rule is not None and (why := rule(config))
    ]


def odd_rates(config) -> list[str]:
    """A warning for a learning rate at which nothing is learnt, or adapters are known to diverge."""
    if config.lr is None:
        return []
    if not config.lr:
        return ["--lr 0 changes no weight, so nothing is learnt"]
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
        f"{counted(rows, 'row')}, so each step is a whole epoch; give a lower --global_batch_size or "
        "--bins_per_step, or --batch_size and --gradient_accumulation_steps"
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
