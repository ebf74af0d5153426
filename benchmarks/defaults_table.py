"""What defaults.py compares, and the tables of what it wrote; no torch."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from fsdp_qlora.bench.tables import markdown
from fsdp_qlora.config.defaults import CLASSIC

TASKS = {
    "text_to_sql": dict(context_length=256),
    "stdlib": dict(context_length=384, train_on="all"),
    "signatures": dict(context_length=128),
}
TITLES = {
    "text_to_sql": "text to SQL",
    "stdlib": "standard library",
    "signatures": "function heads",
}
FACTORS = (0.25, 0.5, 1, 2, 4)  # of a rate from a paper, around which the default was looked for


def rate(width: int) -> float:
    """What "LoRA Without Regret" gives adapters (https://thinkingmachines.ai/blog/lora/)."""
    return 5e-4 * (2000 / width) ** 0.775


def _with(**given) -> Callable[[int], dict]:
    """The defaults but for what is given, for a base of any width."""
    return lambda width: given


def _times(factor: float, **given) -> Callable[[int], dict]:
    """The paper's learning rate times a factor."""
    return lambda width: given | dict(lr=factor * rate(width))


FULL = dict(train_type="full", verify_frozen_minutes=0.0)
# The settings of each by the base's width; what the default sweep needs comes first.
VARIANTS: dict[str, Callable[[int], dict]] = {
    "default": _with(),
    "full default": _with(**FULL),
    **{f"lr x{factor:g}": _times(factor) for factor in FACTORS},
    **{f"full lr x{factor:g}": _times(factor / 10, **FULL) for factor in FACTORS},
    "classic": _with(**CLASSIC, batch_size=1),
    "schedule linear": _with(lr_scheduler="linear"),
    "schedule constant": _with(lr_scheduler="constant"),
    **{f"rows {rows}": _with(batch_size=rows) for rows in (1, 2, 4, 16, 32)},
    "alpha 16": _with(lora_alpha=16),
    "alpha 64": _with(lora_alpha=64),
    "dropout 0.1": _with(lora_dropout=0.1),
    "decay 0.1": _with(wd=0.1),
    "no clipping": _with(apply_gradient_clipping=False),
}


def tables(rows: list[dict]) -> str:
    """One table for each width of the base."""
    found = [row for row in rows if row["status"] == "ok"]
    widths = sorted({row["hidden_size"] for row in found})
    return "\n\n".join(
        f"Hidden size {width}\n\n{table([r for r in found if r['hidden_size'] == width])}"
        for width in widths
    )


def table(rows: list[dict]) -> str:
    """Each variant's loss by task, mean of its seeds, and its distance from the best of the sweep."""
    losses = {task: _means([row for row in rows if row["task"] == task]) for task in TASKS}
    present = [v for v in VARIANTS if any(v in losses[task] for task in TASKS)]
    return markdown(
        ["variant", *TITLES.values(), "seeds"],
        [
            [
                variant,
                *(_cell(losses[task], variant) for task in TASKS),
                str(len({row["seed"] for row in rows if row["variant"] == variant})),
            ]
            for variant in present
        ],
    )


def _means(rows: list[dict]) -> dict[str, float]:
    """The mean loss of each variant's seeds."""
    found = {v: [r["held_out_loss"] for r in rows if r["variant"] == v] for v in VARIANTS}
    return {variant: mean(losses) for variant, losses in found.items() if losses}


def _cell(losses: dict[str, float], variant: str) -> str:
    """A loss, and how far it is above the best learning rate of the same kind of training."""
    kind = "full lr" if variant.startswith("full") else "lr"
    sweep = [loss for name, loss in losses.items() if name.startswith(kind)]
    if variant not in losses:
        return ""
    above = f" ({losses[variant] / min(sweep) - 1:+.1%})" if sweep else ""
    return f"{losses[variant]:.4f}{above}"
