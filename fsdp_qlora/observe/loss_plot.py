"""The losses of a run as one picture, `loss.png`."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

from ..report.run_history import smoothed
from .metrics import EvalMetrics, StepMetrics


def plot_loss(
    steps: list[StepMetrics], path: str | Path, title: str = "", evaluations: list[EvalMetrics] = ()
) -> bool:
    """Draw the losses over optimizer steps as a PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    x, losses = [s.step for s in steps], [s.loss for s in steps]
    axes.plot(x, losses, color="#9db8d2", linewidth=1, label="each step")
    means = [mean for _, mean in smoothed(list(zip(x, losses, strict=True)))]
    axes.plot(x, means, color="#1f5a99", linewidth=2, label="mean around it")
    if evaluations:
        axes.plot(
            [e.step for e in evaluations],
            [e.eval_loss for e in evaluations],
            color="#c2571a",
            linewidth=2,
            marker="o",
            markersize=4,
            label="held-out rows",
        )
    axes.set(xlabel="optimizer step", ylabel="loss per trained token", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 2.5
    if _is_seen_from_zero(losses + [e.eval_loss for e in evaluations]):
        axes.set_ylim(0, None)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _is_seen_from_zero(losses: list[float]) -> bool:
    """Whether an axis from zero shows how losses change; of a small change it makes a flat line."""
    losses = [loss for loss in losses if isfinite(loss)]
    return bool(losses) and min(losses) < max(losses) / 2
