"""Memory per rung of the ladder, against what the card has, as a picture."""

from __future__ import annotations

from pathlib import Path

from ..estimate import Estimate
from .proposal import Proposal

_STACK = (  # label, parts of an estimate, colour
    ("weights", ("linears", "absmax", "fp8", "embedding", "head", "norms"), "#1f5a99"),
    ("adapters, gradients, optimizer", ("adapters", "gradients", "optimizer"), "#6aa5d8"),
    ("gathered by FSDP", ("unsharded",), "#7b6bb2"),
    ("activations", ("activations",), "#e0902f"),
    ("in use: a block, the loss", ("working", "loss"), "#f2c681"),
    ("CUDA, NCCL, allocator", ("workspace", "slack", "context"), "#b5b5b5"),
)


def draw(proposal: Proposal, path: str | Path) -> Path:
    """Write the picture. Raises ValueError where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            f"--picture {path}: matplotlib is not installed; pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bars = [(f"{i}. {c.rung.name}", c.found) for i, c in enumerate(proposal.rungs, 1) if c.found]
    if proposal.choice:
        bars.append(("chosen by the search", proposal.choice))
    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.42 * len(bars)), layout="constrained")
    limit = proposal.machine.memory_gib
    axes.set_xlim(0, 1.2 * max(limit, max(found.memory.total for _, found in bars)))
    for place, (_, found) in enumerate(bars):
        bar(axes, place, found)
    axes.axvline(limit, color="#b02020", linewidth=1.5)
    axes.text(limit, -0.75, f" {limit:g} GiB", color="#b02020", va="center")
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set(
        xlabel="GiB per GPU; pale: does not fit",
        ylim=(len(bars) - 0.4, -1.1),
    )
    figure.suptitle(title(proposal))  # over the names too, or a long one would be cut
    axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, _, colour in _STACK]
    figure.legend(
        handles,
        [label for label, _, _ in _STACK],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    return saved(figure, path)


def saved(figure, path: str | Path) -> Path:
    """Write a picture into its folder, which may be new. Raises ValueError for an unknown form."""
    from matplotlib.pyplot import close

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    forms = figure.canvas.get_supported_filetypes()
    if (form := Path(path).suffix[1:] or "png").lower() not in forms:
        raise ValueError(
            f"--picture {path}: {form} is not a picture format; use .png, .pdf or .svg"
        )
    figure.savefig(path, dpi=130)
    close(figure)
    return Path(path)


def bar(axes, place: int, found: Estimate):
    """One stacked bar, with its total and speed at the end."""
    left, pale = 0.0, 1.0 if found.fits else 0.45
    for _, parts, colour in _STACK:
        width = sum(found.memory.parts[name] for name in parts)
        axes.barh(place, width, left=left, color=colour, height=0.66, alpha=pale)
        left += width
    speed = f", {found.step.tokens_per_second_per_gpu:,.0f} tok/s" if found.fits else ""
    # On white, and over the line of the limit, which may stand where the label is.
    axes.text(
        left + 0.006 * axes.get_xlim()[1],
        place,
        f"{left:.1f}{speed}",
        va="center",
        fontsize=8,
        zorder=3,
        bbox=dict(facecolor="white", edgecolor="none", pad=1),
    )


def title(proposal: Proposal) -> str:
    """Model, machine and tokens."""
    machine = proposal.machine
    return (
        f"{proposal.shape.name} on {machine.world_size}x {machine.gpu.label}, "
        f"{proposal.config.context_length:,} tokens a row"
    )
