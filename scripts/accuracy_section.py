"""The section of docs/planner.md that says how near the estimates come, its picture, and README's table.

    python scripts/accuracy_section.py

What `fsdp-qlora bench --report FILES --accuracy --picture FILE` prints and draws of all rows in
benchmarks/results is put between two marks of each page.
"""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from fsdp_qlora.bench.accuracy import Accuracy, accuracy, compare
from fsdp_qlora.bench.row import read_rows, row_files
from fsdp_qlora.cli import main

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs/planner.md", ROOT / "README.md"
PICTURE = PAGE.parent / "pictures/accuracy.png"
BEGIN, END = "<!-- accuracy: made by make -C docs accuracy -->", "<!-- end of accuracy -->"


def section() -> str:
    """The table and the sentence below it."""
    files, printed = map(str, row_files(ROOT / "benchmarks/results")), io.StringIO()
    with redirect_stdout(printed):
        code = main(["bench", "--report", ",".join(files), "--accuracy", "--picture", str(PICTURE)])
    if code:
        sys.exit(code)
    table, sentence = printed.getvalue().strip().rsplit("\n\n", 1)
    return f"{sentence}\n\n![estimated over measured](pictures/{PICTURE.name})\n\n{table}"


def short_table(found: Accuracy) -> str:
    """README's: counts of rows, median and worst errors."""
    lines = [
        ("allocated memory", found.rows, found.memory_median, found.memory_worst),
        ("reserved memory", found.reserving, found.reserved_median, found.reserved_worst),
        ("seconds per step", found.timed, found.time_median, found.time_worst),
    ]
    return "\n".join(
        ["| | rows | median error | worst |", "|---|--:|--:|--:|"]
        + [
            f"| {what} | {rows} | {middle:.1%} | {worst:.1%} |"
            for what, rows, middle, worst in lines
        ]
    )


def put(page: Path, text: str):
    """Between the marks of a page."""
    whole = re.sub(
        f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{text}\n{END}", page.read_text(), flags=re.S
    )
    page.write_text(whole)


if __name__ == "__main__":
    put(PAGE, section())
    rows = [row for file in row_files(ROOT / "benchmarks/results") for row in read_rows(file)]
    put(README, short_table(accuracy(compare(rows))))
