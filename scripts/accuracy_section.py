"""The section of docs/planner.md that says how near the estimates come, and its picture.

    python scripts/accuracy_section.py

What `fsdp-qlora bench --report FILES --accuracy --picture FILE` prints and draws of all rows in
benchmarks/results is put between two marks of the page.
"""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from fsdp_qlora.bench.row import row_files
from fsdp_qlora.cli import main

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/planner.md"
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


if __name__ == "__main__":
    text = section()
    PAGE.write_text(
        re.sub(
            f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{text}\n{END}", PAGE.read_text(), flags=re.S
        )
    )
