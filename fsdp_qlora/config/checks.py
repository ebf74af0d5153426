"""The checks of single settings: each mistake is a ValueError that names the flag and the remedy.

They take the configuration as it is being made (`config.RunConfig`), before anything else runs; what
settings say together is checked in `combinations.py`. Pure: no torch, so that every mistake answers at once.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from typing import get_type_hints

from fastcore.basics import listify

from .settings import AUTO, parts_of, shown, type_name

_types_of = cache(get_type_hints)  # a plan makes hundreds of configurations


def check_types(config):
    """A wrong type in a script would surface far away; say it here."""
    hints = _types_of(type(config))
    for f in fields(config):
        value, hint = getattr(config, f.name), hints[f.name]
        if hint in (float, float | None) and type(value) is int:
            setattr(config, f.name, float(value))
        elif hint is int and type(value) is bool or not isinstance(value, hint):
            raise ValueError(f"--{f.name} takes {type_name(hint)}, got {value!r}")


def check_choices(config):
    """Refuse values outside a setting's choices, and those of the original script still to come.

    `config` is a RunConfig or a command's own settings.
    """
    for f in fields(config):
        value, later = getattr(config, f.name), f.metadata["later"]
        choices = tuple(c for c in listify(f.metadata["choices"]) if c not in later)
        listed = ", ".join(map(str, choices))
        if value in later or "*" in later and value is not None:
            usable = f"choose {listed}" if choices else f"leave it at {shown(f.default)}"
            raise ValueError(
                f"--{f.name} {shown(value)} is not available in this version; {usable}"
            )
        given = parts_of(value) if f.metadata["several"] else [value]
        if value is not None and choices and not set(given) <= set(choices):
            raise ValueError(f"--{f.name} {shown(value)}: choose {listed}")


def check_numbers(config):
    """Ranges of single settings."""

    def refuse(name, wanted):
        given = getattr(config, name)
        if not str(given).strip():
            given = repr(given)
        raise ValueError(f"--{name} must be {wanted}, got {given}")

    for f in fields(config):
        _check_least(f, getattr(config, f.name), refuse)
    if not config.loraplus_lr_ratio > 0:
        refuse("loraplus_lr_ratio", "above 0")
    if not config.grad_norm > 0:
        raise ValueError(
            f"--grad_norm must be above 0, got {config.grad_norm:g}; to clip nothing use "
            "--apply_gradient_clipping false"
        )
    if not config.num_epochs > 0:
        refuse("num_epochs", "above 0")
    if not 0.01 <= config.timeout_minutes <= 1e5:
        refuse("timeout_minutes", "from 0.01 to 100000")
    if not 1 <= config.stop_grace_seconds <= 1e5:
        refuse("stop_grace_seconds", "from 1 to 100000")
    budget = config.activation_budget_gib
    if budget is not None and budget != AUTO and not budget > 0:
        refuse("activation_budget_gib", "auto or above 0")
    if not 0 <= config.lora_dropout < 1:
        refuse("lora_dropout", "from 0 to below 1")
    if not 0 <= config.warmup_share < 1:
        refuse("warmup_share", "from 0 to below 1")
    if config.lr_warmup_steps < AUTO:
        refuse("lr_warmup_steps", "-1 or above")
    if not 0 <= config.eval_share < 1:
        refuse("eval_share", "from 0 to below 1")
    if not 0 <= config.seed < 2**32:
        refuse("seed", "from 0 to 4294967295")
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            refuse(f.name, "a finite number")
        if isinstance(value, str) and not value.strip():
            refuse(f.name, "left out or have a value")


def _check_least(f, value, refuse):
    """Refuse a number below the setting's least one."""
    least, or_auto = f.metadata["least"], f.metadata["or_auto"]
    if least is None or value is None or value >= least or (or_auto and value == AUTO):
        return
    if not or_auto:
        refuse(f.name, f"{least} or more")
    refuse(f.name, "1 or more, or auto" if f.name == "batch_size" else "-1 or above 0")
