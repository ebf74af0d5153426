"""Estimates against measurements, as a picture."""

from __future__ import annotations

from pathlib import Path

from ..planner.picture import saved
from .accuracy import compare
from .row import BenchRow


def scatter(rows: list[BenchRow], path: str | Path) -> Path:
    """Memory and time, estimated over measured, on logarithmic axes; rows that set constants hollow.

    Raises ValueError where matplotlib is not installed, or there is nothing to draw.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            f"--picture {path}: matplotlib is not installed; pip install matplotlib"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    compared = [c for c in compare(rows) if not c.superseded]
    if not compared:
        raise ValueError(
            f"--picture {path}: no row has an estimate to be drawn beside it; give a file "
            "of bench, measured on GPUs of the catalogue"
        )
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    _panel(
        left,
        [
            (c.row.peak_allocated_gib, c.memory.peak_allocated, c.calibrates)
            for c in compared
            if not c.old_memory
        ],
        "peak memory, GiB",
        0.05,
    )
    _panel(
        right,
        [(c.row.seconds_per_step, c.step.total, c.calibrates) for c in compared if not c.old_code],
        "step, seconds",
        0.10,
    )
    return saved(figure, path)


def _panel(axes, points: list[tuple[float, float, bool]], what: str, band: float):
    """One scatter with the diagonal and a band around it."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for hollow in (False, True):
        some = [(x, y) for x, y, calibrates in points if calibrates == hollow]
        axes.scatter(
            [x for x, _ in some],
            [y for _, y in some],
            s=26,
            zorder=3,
            facecolors="none" if hollow else "#1f5a99",
            edgecolors="#1f5a99",
            label="constants were set on it" if hollow else "not used for any constant",
        )
    values = [v for x, y, _ in points for v in (x, y)] or [1.0]
    ends = [0.8 * min(values), 1.25 * max(values)]
    axes.plot(ends, ends, color="#888888", linewidth=1)
    axes.fill_between(
        ends,
        [e * (1 - band) for e in ends],
        [e * (1 + band) for e in ends],
        color="#888888",
        alpha=0.2,
        label=f"within {band:.0%}",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel=f"measured {what}",
        ylabel="estimated",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize=8)
