"""Draw docs/pictures/step.svg: a sharded QLoRA step of three blocks on two GPUs.

python scripts/step_picture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update(
    {"svg.hashsalt": "step", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
)
from matplotlib.patches import FancyBboxPatch  # noqa: E402
from matplotlib.pyplot import Axes, subplots  # noqa: E402

PICTURE = Path(__file__).parents[1] / "docs/pictures/step.svg"
FROZEN, TRAINED, WHOLE, COMPUTE, LINE = "#9fc5e8", "#f6b26b", "#d9e8f6", "#e4e4e4", "#444444"
BLOCKS = 3


def box(ax: Axes, x: float, y: float, width: float, height: float, text: str, color: str, size=10):
    """A box with a text in its middle."""
    ax.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=color,
            edgecolor=LINE,
            linewidth=0.8,
        )
    )
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]):
    """An arrow from one place to another."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": LINE, "linewidth": 1})


def draw_block(ax: Axes):
    """What happens to one block: shards, gathered bytes, one matrix at a time, gradients."""
    ax.set_title("One block: what a GPU holds, and what travels", loc="left", fontweight="bold")
    for gpu, y in ((0, 2.3), (1, 0.3)):
        ax.text(0, y + 1.05, f"GPU {gpu}", va="center", fontweight="bold")
        box(ax, 0.9, y + 1.1, 2.6, 0.6, "half of W's rows, 4 bits", FROZEN)
        box(ax, 0.9, y + 0.4, 2.6, 0.6, "half of A and B, fp32", TRAINED)
        box(ax, 5.1, y + 0.4, 2.2, 1.3, "the whole block,\nstill 4 bits\n(for a moment)", WHOLE)
        box(
            ax,
            8.2,
            y + 0.4,
            2.9,
            1.3,
            "one matrix at a time:\nW in bf16, y = W x + B A x,\nW forgotten",
            COMPUTE,
        )
        box(ax, 12.0, y + 0.4, 2.3, 1.3, "backward the same;\ngradients of\nA and B only", TRAINED)
        for x, end in ((3.55, 5.05), (7.35, 8.15), (11.15, 11.95)):
            arrow(ax, (x, y + 1.05), (end, y + 1.05))
    ax.text(4.3, 2.25, "all-gather\n(4-bit bytes)", ha="center", va="center", fontsize=9)
    ax.annotate(
        "",
        (1.2, 0.55),
        (13.1, 0.55),
        arrowprops={
            "arrowstyle": "-|>",
            "color": LINE,
            "linewidth": 1,
            "connectionstyle": "bar,angle=180,fraction=-0.035",
        },
    )
    ax.text(
        7.2,
        -0.28,
        "reduce-scatter: each GPU gets the summed gradient of its own rows of A and B; "
        "AdamW updates them there",
        ha="center",
        va="center",
        fontsize=9,
    )
    ax.set_xlim(-0.1, 14.5)
    ax.set_ylim(-0.55, 4.2)


def draw_step(ax: Axes):
    """The step of one GPU in time: communication beside computation."""
    ax.set_title(
        "One step in time (each GPU the same): block i+1 travels while block i computes",
        loc="left",
        fontweight="bold",
    )
    ax.text(0, 1.6, "network", va="center")
    ax.text(0, 0.6, "GPU", va="center")
    x = 1.3
    for i in range(BLOCKS):
        box(ax, x + 1.1 * i, 1.3, 1.0, 0.6, f"gather {i + 1}", FROZEN, 9)
        box(ax, x + 1.1 * (i + 1), 0.3, 1.0, 0.6, f"forward {i + 1}", COMPUTE, 9)
    start = x + 1.1 * (BLOCKS + 1)
    box(ax, start, 0.3, 0.75, 0.6, "loss", COMPUTE, 9)
    box(ax, start, 1.3, 0.75, 0.6, f"gather {BLOCKS}", FROZEN, 8)
    start += 0.85
    for i in range(BLOCKS):
        block, at = BLOCKS - i, start + 1.6 * i
        box(ax, at, 0.3, 1.5, 0.6, f"backward {block}", COMPUTE, 9)
        if block > 1:
            box(ax, at, 1.3, 0.72, 0.6, f"gather {block - 1}", FROZEN, 8)
        if i:
            box(ax, at + 0.78, 1.3, 0.72, 0.6, f"grads {block + 1}", TRAINED, 8)
    end = start + 1.6 * BLOCKS
    box(ax, end, 1.3, 0.72, 0.6, "grads 1", TRAINED, 8)
    box(ax, end + 0.82, 0.3, 1.2, 0.6, "AdamW", TRAINED, 9)
    ax.set_xlim(-0.1, 14.5)
    ax.set_ylim(0, 2.2)


def draw() -> str:
    """The picture as SVG."""
    from io import StringIO

    figure, axes = subplots(2, 1, figsize=(11.5, 6), height_ratios=(4.6, 2.2), layout="constrained")
    for ax in axes:
        ax.set_axis_off()
    draw_block(axes[0])
    draw_step(axes[1])
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw())
