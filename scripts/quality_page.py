"""The measured part of docs/quality.md, and its pictures.

    python scripts/quality_page.py

Made of the lines that benchmarks/quality.py and benchmarks/one_step_error.py wrote, between two marks.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import mean

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from quality_table import (  # noqa: E402
    BASE,
    FP8,
    TITLES,
    VARIANTS,
    WINDOW,
    differences,
    error_tables,
    final_losses,
    fp8_table,
    gaps,
    smooth,
    tables,
)

PAGE = ROOT / "docs/quality.md"
BEGIN, END = "<!-- made by scripts/quality_page.py -->", "<!-- end of what is made -->"
LOSSES, CURVES = "pictures/quality.png", "pictures/quality_fp8.png"
TICKS = (-0.01, -0.005, 0, 0.005, 0.01, 0.1)
NONE = "Not measured yet."
COLORS = {
    "bf16": "#1f5a99",
    "bf16, fp8 products": "#7fb2e5",
    "nf4": "#b34700",
    "nf4, fp8 products": "#f0a35e",
}


def read_rows() -> list[dict]:
    """All lines of the results, file by file."""
    files = sorted((ROOT / "benchmarks/results").glob("quality_*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def runs_of(rows: list[dict], task: str) -> list[dict]:
    """The lines of a task's runs that came to their end."""
    return [r for r in rows if r["task"] == task and "variant" in r and r["status"] == "ok"]


def draw_differences(rows: list[dict]):
    """What each variant adds to bf16's held-out loss: a dot a seed, a line at their mean.

    Linear to 0.01 and logarithmic beyond, or 2 bits would press the others together.
    """
    figure, panels = pyplot.subplots(
        1, len(TITLES), figsize=(10, 4.2), sharey=True, layout="constrained"
    )
    names = [variant for variant in VARIANTS if variant != BASE]
    for axes, (task, title) in zip(panels, TITLES.items(), strict=True):
        losses = final_losses(runs_of(rows, task))
        for place, variant in enumerate(names):
            found = differences(losses, variant)
            if not found:
                continue
            axes.plot(found, [place] * len(found), "o", color="#1f5a99", alpha=0.6)
            axes.plot([mean(found)] * 2, [place - 0.3, place + 0.3], color="#222222")
        axes.set_xscale("symlog", linthresh=0.01, linscale=1.5)
        axes.set(
            title=title,
            xlabel="held-out loss less that of bf16, each seed",
            xticks=TICKS,
            xticklabels=[f"{tick:+g}" if tick else "0" for tick in TICKS],
            xlim=(-0.035, 0.13),
            yticks=range(len(names)),
            yticklabels=names,
        )
        axes.axvline(0, color="#222222", linewidth=0.8)
        axes.grid(axis="x", alpha=0.3)
    panels[0].invert_yaxis()
    figure.savefig(PAGE.parent / LOSSES, dpi=130)
    pyplot.close(figure)


def draw_curves(rows: list[dict]):
    """Training loss under fp8 and bf16 products, and below it what fp8 changes, over all seeds."""
    figure, panels = pyplot.subplots(
        2, len(TITLES), figsize=(10, 6.2), sharex="col", layout="constrained", height_ratios=(2, 1)
    )
    for (above, below), (task, title) in zip(panels.T, TITLES.items(), strict=True):
        found = runs_of(rows, task)
        for variant, color in COLORS.items():
            curves = [
                row["losses"] for row in found if row["variant"] == variant and row.get("losses")
            ]
            if not curves:
                continue
            curve = smooth([mean(step) for step in zip(*curves, strict=True)])
            above.plot(
                range(WINDOW, WINDOW + len(curve)),
                curve,
                color=color,
                label=variant,
                linestyle="--" if variant in FP8 else "-",
            )
        for variant in FP8:
            for gap in gaps(found, variant):
                below.plot(range(WINDOW, len(gap) + 1), smooth(gap), color=COLORS[variant])
        above.set(title=title, ylabel="training loss")
        above.legend(frameon=False, fontsize=8)
        below.axhline(0, color="#222222", linewidth=0.8)
        below.set(xlabel="step", ylabel="fp8 less bf16, each seed")
    figure.savefig(PAGE.parent / CURVES, dpi=130)
    pyplot.close(figure)


def section(rows: list[dict]) -> str:
    """Tables and pictures of what there is."""
    runs = [row for row in rows if "variant" in row]
    steps = [row for row in rows if "case" in row]
    parts = ["## Loss by format", *losses_part(runs), "## One step beside fp32"]
    return "\n\n".join([*parts, origin(steps), error_tables(steps)] if steps else [*parts, NONE])


def losses_part(runs: list[dict]) -> list[str]:
    """What fine-tuning came to."""
    if not runs:
        return [NONE]
    check_one_base(runs)
    draw_differences(runs)
    draw_curves(runs)
    return [
        origin(runs),
        tables(runs),
        f"![held-out loss less that of bf16, a dot a seed]({LOSSES})",
        "## fp8 beside bf16",
        fp8_table(runs),
        f"![loss curves of fp8 and bf16 products]({CURVES})",
    ]


def check_one_base(runs: list[dict]):
    """Refuse lines of several bases, whose losses can't be compared, with a ValueError.

    Lines that don't say which weights they had are told apart by the commit that made the base.
    """
    if len({(row["model"], row.get("weights") or row["commit"]) for row in runs}) > 1:
        raise ValueError("benchmarks/results/quality_*: runs of several bases; keep those of one")


def origin(rows: list[dict]) -> str:
    """Where lines were made. A CPU emulates fp8 products, with sums in fp32."""
    row = rows[-1]
    emulated = ", which emulates fp8 products with sums in fp32" if row["gpu"] == "cpu" else ""
    device = "A CPU" if row["gpu"] == "cpu" else row["gpu"]
    return (
        f"{device}{emulated}; {row['model']}; commit {row['commit']}, {row['date']}; Python "
        f"{row['versions']['python']}."
    )


if __name__ == "__main__":
    rows = read_rows()
    PAGE.write_text(
        re.sub(
            f"{BEGIN}.*?{END}",
            lambda _: f"{BEGIN}\n{section(rows)}\n{END}",
            PAGE.read_text(),
            flags=re.S,
        )
    )
