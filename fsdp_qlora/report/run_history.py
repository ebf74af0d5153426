"""What happened in a run, read from its metrics.jsonl. Pure: no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ..json_input import from_json


@dataclass
class RunHistory:
    """The records of a run by kind, in their order; of steps, evaluations and samples one per step."""

    starts: list[dict] = field(default_factory=list)
    steps: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)
    samples: list[dict] = field(default_factory=list)
    checkpoints: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)  # starts, ends, skipped steps, returns
    data: dict = field(default_factory=dict)
    is_running: bool | None = None  # None: not known

    @property
    def start(self) -> dict:
        """The last start, or nothing."""
        return self.starts[-1] if self.starts else {}

    @property
    def status(self) -> str:
        """How the run ended; of one that does not say, whether it is running or was killed, if known."""
        last = [e for e in self.events if e["kind"] in ("start", "end")][-1:]
        if last and last[0]["kind"] == "end":
            return last[0]["status"]
        return {True: "running", False: "killed", None: "running or killed"}[self.is_running]

    @property
    def warm(self) -> list[dict]:
        """Steps without the first of each start, which compiles."""
        first = {start["step"] + 1 for start in self.starts} or {1}
        return [s for s in self.steps if s["step"] not in first] or self.steps

    def typical(self, name: str) -> float | None:
        """The median of a figure over warm steps; None where it is not known."""
        found = [s[name] for s in self.warm if isinstance(s.get(name), int | float)]
        return median(found) if found else None

    def highest(self, name: str) -> float | None:
        """The highest value of a figure; None where it is not known or was not measured."""
        return max((s[name] for s in self.steps if s.get(name)), default=None)

    @property
    def seconds(self) -> float:
        """Of all steps, evaluations, samples and held checkpoints that count."""
        return sum(
            r.get("seconds", 0) for r in (*self.steps, *self.evaluations, *self.samples)
        ) + sum(c.get("seconds_held", 0) for c in self.checkpoints)

    @property
    def dollars(self) -> float | None:
        """What that cost; None where no price is known."""
        price = self.start.get("dollars_per_hour")
        return None if price is None else price * self.seconds / 3600


def read_run_history(run: str | Path) -> RunHistory:
    """The story of a run's folder. Raises ValueError naming it if it is none."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run}: no metrics.jsonl there; give the --output_dir of a run")
    story = tell(_read_lines(path))
    if not story.steps and not story.starts:
        raise ValueError(
            f"{path}: it has no step yet; give the --output_dir of a run that has started"
        )
    return story


def _read_lines(path: Path) -> list[dict]:
    """The records of the file; a last line that was cut is left out."""
    found = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            record = from_json(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def tell(records: list[dict]) -> RunHistory:
    """Records as a story: what a restart did again counts once, as it was in the end."""
    story = RunHistory()
    lists = dict(
        step=story.steps,
        eval=story.evaluations,
        samples=story.samples,
        start=story.starts,
        checkpoint=story.checkpoints,
    )
    for record in records:
        kind = record.get("kind", "step")
        if kind in lists:
            lists[kind].append(record)
        if kind in ("start", "end", "skipped", "rollback"):
            story.events.append(record)
        if kind in ("start", "data") and record.get("data"):
            story.data |= record["data"]
    for name in ("steps", "evaluations", "samples"):
        setattr(story, name, list({r["step"]: r for r in getattr(story, name)}.values()))
    return story


def points_of(records: list[dict], name: str) -> list[tuple[float, float]]:
    """(step, value) of a figure where it is a number."""
    return [
        (r["step"], r[name])
        for r in records
        if isinstance(r.get(name), int | float) and math.isfinite(r[name])
    ]


def smoothed(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """A mean around each point: of a fortieth of the points on both sides, five at least."""
    reach, sums = max(5, len(points) // 40), [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    found = []
    for i, (step, _) in enumerate(points):
        here = min(reach, i, len(points) - 1 - i)  # as far back as ahead, or the ends would lean
        found.append((step, (sums[i + here + 1] - sums[i - here]) / (2 * here + 1)))
    return found


def thinned(points: list[tuple[float, float]], most: int = 600) -> list[tuple[float, float]]:
    """No more than `most` points: of each stretch the lowest and the highest, so no peak is lost."""
    if len(points) <= most:
        return points
    size = math.ceil(2 * len(points) / most)
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        found += sorted(ends)
    return found
