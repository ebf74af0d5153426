"""Set the constants of the estimates on the rows that `bench/accuracy.py` names, and say how well.

    python scripts/fit_constants.py RESULTS.jsonl ...
    python scripts/fit_constants.py RESULTS.jsonl ... --write

Each constant moves while that brings the predicted times of those rows nearer to the measured ones; a
penalty holds it near what it stands for, because ten rows can't tell fifteen constants apart; what no
row of today's code depends on stays. The allocator's slack is least squares over the same rows. Nothing
is written without --write, which changes `fsdp_qlora/estimate/constants.py`. Errors are printed for all
other rows, before and after.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from statistics import median

import numpy as np

from fsdp_qlora.bench.accuracy import Compared, compare
from fsdp_qlora.bench.row import BenchRow, read_rows
from fsdp_qlora.estimate import GIB, Peak, constants, step_seconds

TIMES = (
    "MATMUL_SHARE",
    "FP8_SHARE",
    "ATTENTION_SHARE",
    "COPY_SHARE",
    "RANK_SHARE",
    "UNPACK_SHARE",
    "MERGE_SHARE",
    "FP8_UNPACK_SHARE",
    "GATHER_SHARE",
    "COMPILED_LAUNCH",
    "EAGER_LAUNCH",
    "RECOMPUTE_LAUNCH",
    "ADAPTER_LAUNCH",
    "UNPACK_LAUNCH",
    "FP8_LAUNCH",
    "SHARDED_LAUNCH",
    "STEP_SECONDS",
    "OPTIMIZER_LAUNCH",
)
SLACK = ("SLACK_KEPT", "SLACK_INPUTS", "SLACK_MOVED", "SLACK_GATHERED")
HOLD = 0.02  # penalty of moving a constant by a factor of e, in squared relative errors
FIRST, LAST = 0.16, 0.002  # the step of the search, as a share of a constant


def time_error(row: Compared) -> float:
    """Relative error of a row's time by the constants as they are now."""
    found = step_seconds(row.shape, row.gpu, row.plan)
    return found.total / row.row.seconds_per_step - 1


def loss(rows: list[Compared], start: dict[str, float]) -> float:
    """Squared errors, and the penalty."""
    moved = sum(math.log(getattr(constants, name) / value) ** 2 for name, value in start.items())
    return sum(time_error(row) ** 2 for row in rows) + HOLD * moved


def fit_times(rows: list[Compared]):
    """Move one constant after the other, in place, by smaller and smaller steps."""
    start = {name: getattr(constants, name) for name in TIMES}
    best, step = loss(rows, start), FIRST
    while step > LAST:
        before = best
        for name in TIMES:
            value = getattr(constants, name)
            for tried in (value * (1 + step), value / (1 + step)):
                setattr(constants, name, tried)
                if (found := loss(rows, start)) < best:
                    best, value = found, tried
            setattr(constants, name, value)
        if best > before * 0.999:
            step /= 2


def fit_slack(rows: list[Compared]):
    """Least squares of reserved less allocated memory, as shares of reserved memory."""
    terms = [Peak(row.shape, row.plan).slack_terms(row.plan.memory.runs(row.shape)) for row in rows]
    size = np.array([row.row.peak_reserved_gib for row in rows])
    gaps = 1 - np.array([row.row.peak_allocated_gib for row in rows]) / size
    names = [*SLACK]
    while True:  # without those that come out below 0
        sizes = (
            np.array([[t.get(name, 0.0) / GIB for name in names] for t in terms]) / size[:, None]
        )
        found = np.linalg.lstsq(sizes, gaps, rcond=None)[0]
        if (found >= 0).all():
            break
        names = [name for name, value in zip(names, found, strict=True) if value > 0]
    for name in SLACK:
        setattr(constants, name, 0.0)
    for name, value in zip(names, found, strict=True):
        setattr(constants, name, float(value))


def errors(rows: list[BenchRow]) -> str:
    """Errors of time and of reserved memory over rows that set nothing."""
    tested = [
        row for row in compare(rows) if not (row.calibrates or row.superseded or row.old_code)
    ]
    if not tested:
        return "no row of today's code besides"
    times = [abs(row.time_error) for row in tested]
    sizes = [row.reserved_error for row in tested if not row.old_reserved]
    return (
        f"time: median {median(times):.1%}, worst {max(times):.1%}; reserved memory: median "
        f"{median(map(abs, sizes)):.1%}, from {min(sizes):+.1%} to {max(sizes):+.1%} "
        f"({len(tested)} and {len(sizes)} rows)"
    )


def write(path: Path):
    """The values as they are now into the source, with three digits."""
    text = path.read_text()
    for name in (*TIMES, *SLACK):
        text = re.sub(
            rf"^{name} = [\d.e+-]+", f"{name} = {getattr(constants, name):.3g}", text, flags=re.M
        )
    path.write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = [row for path in options.results for row in read_rows(path)]
    chosen = [row for row in compare(rows) if row.fits and not row.superseded]
    print(f"{len(chosen)} rows set constants; the others before: {errors(rows)}")
    start = {name: getattr(constants, name) for name in (*TIMES, *SLACK)}
    fit_times([row for row in chosen if not row.old_code])
    for _ in range(5):  # the moment that counts changes with the constants
        fit_slack([row for row in chosen if not row.old_reserved])
    for name, value in start.items():
        print(f"{name:<18}{value:>10.4g} -> {getattr(constants, name):.3g}")
    for row in chosen:
        print(f"{time_error(row):+7.1%}  {row.row.name} ({row.row.commit})")
    print(f"after: {errors(rows)}")
    if options.write:
        write(Path(constants.__file__))


if __name__ == "__main__":
    main()
