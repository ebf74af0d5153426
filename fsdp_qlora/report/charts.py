"""Charts as inline SVG that stretches with its box, with labels in HTML, which do not. Pure: no torch.

Everything is drawn here: the page's script only reads a value off under the pointer.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape

from .run_history import thinned

WIDE, _HIGH = 1000, 400  # of the drawing's own coordinates


@dataclass(frozen=True)
class Series:
    """A line of a chart, or dots joined by one. style: a CSS class."""

    name: str
    points: list[tuple[float, float]]
    style: str = "main"
    dots: bool = False


def chart(title: str, series: list[Series], note: str = "", from_zero: bool = False) -> str:
    """A figure; where no series has a point, what `note` says stands in its place."""
    series = [s for s in series if s.points]
    if not series:
        return (
            f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
            f'<p class="none">{escape(note or "not measured")}</p></figure>'
        )
    steps = [p[0] for s in series for p in s.points]
    values = [p[1] for s in series for p in s.points]
    ticks = _ticks_of(0.0 if from_zero else min(values), max(values))
    left, right = min(steps), max(steps) if max(steps) > min(steps) else min(steps) + 1

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = (point[0] - left) / (right - left) * WIDE
        return round(x, 1), round(_HIGH - (point[1] - ticks[0]) / (ticks[-1] - ticks[0]) * _HIGH, 1)

    lines = "".join(drawn(s, place) for s in series)
    grid = "".join(
        f'<line class="grid" x1="0" x2="{WIDE}" y1="{y}" y2="{y}"/>'
        for y in (place((left, t))[1] for t in ticks)
    )
    data = {
        "left": left,
        "right": right,
        "low": ticks[0],
        "high": ticks[-1],
        "series": [[s.name, s.style, [list(p) for p in thinned(s.points)]] for s in series],
    }
    return f"""<figure class="chart" data-chart="{escape(json.dumps(data))}">
<figcaption>{escape(title)}{legend(series)}</figcaption>
<div class="plot"><div class="y">{labels(ticks)}</div>
<div class="area"><svg viewBox="0 0 {WIDE} {_HIGH}" preserveAspectRatio="none" role="img"
aria-label="{escape(title)}">{grid}{lines}</svg></div></div>
<div class="x"><span>{left:,.0f}</span><span>step</span><span>{right:,.0f}</span></div></figure>"""


def drawn(s: Series, place) -> str:
    """A series as SVG; a dot is a line of no length, which stays round however the box is stretched."""
    points = [place(p) for p in thinned(s.points)]
    line = f'<polyline class="line {s.style}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'
    if not s.dots and len(points) > 1:
        return line
    dots = "".join(f"M{x},{y}h0" for x, y in points)
    return f'{line}<path class="dot {s.style}" d="{dots}"/>'


def legend(series: list[Series]) -> str:
    """The names of the series, where there are several."""
    if len(series) < 2:
        return ""
    return (
        '<span class="legend">'
        + "".join(f'<span class="key {s.style}">{escape(s.name)}</span>' for s in series)
        + "</span>"
    )


def labels(ticks: list[float]) -> str:
    """The values beside the grid's lines."""
    return "".join(
        f'<span style="bottom:{100 * i / (len(ticks) - 1):.1f}%">{short(t)}</span>'
        for i, t in enumerate(ticks)
    )


def _ticks_of(low: float, high: float, about: int = 4) -> list[float]:
    """Round values from below `low` to above `high`."""
    if high <= low:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number in a few characters."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g}k"
    if abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.4g}"


def histogram(lengths: dict[int, int]) -> str:
    """Rows by length as bars."""
    most, bounds = max(lengths.values()), sorted(lengths)
    bars = "".join(
        f'<div class="bar" title="{lengths[b]:,} rows of up to {b:,} tokens">'
        f'<i style="height:{max(1, 100 * lengths[b] / most):.1f}%"></i>'
        f"<span>{b:,}</span></div>"
        for b in bounds
    )
    return (
        '<figure class="chart"><figcaption>Rows by length</figcaption>'
        f'<div class="bars">{bars}</div>'
        '<div class="x"><span></span><span>tokens in a row, up to</span><span></span></div>'
        "</figure>"
    )
