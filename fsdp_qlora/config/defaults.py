"""Sets of defaults that `--defaults` names: they lie below a recipe and the flags. Pure: no torch."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from .settings import shown

# Of the original fsdp_qlora script: one row a step, at a low and constant rate.
CLASSIC: dict[str, Any] = dict(
    lr=1e-5,
    lr_scheduler="constant",
    warmup_share=0.1,
    wd=0.1,
    lora_alpha=16,
    lora_dropout=0.1,
    gradient_accumulation_steps=1,
    apply_gradient_clipping=False,
    grad_norm=0.3,
)
DEFAULTS = {"classic": CLASSIC}


def default_flags(name: str | None, given: Container[str]) -> tuple[str, ...]:
    """A set as flags, without those that would undo what was `given`: --grad_norm alone clips."""
    settings = DEFAULTS[name] if name else {}
    undone = {"apply_gradient_clipping"} if "grad_norm" in given else set()
    return tuple(f"--{key}={shown(value)}" for key, value in settings.items() if key not in undone)
