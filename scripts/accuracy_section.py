"""The section of docs/planner.md that says how near the estimates come, and its picture.

    python scripts/accuracy_section.py benchmarks/results/*_h[12]00_*.jsonl

What `fsdp-qlora bench --report FILES --accuracy --picture FILE` prints and draws is put between two
marks of the page.
"""
from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

from fsdp_qlora.cli import main

PAGE = Path(__file__).parents[1] / "docs/planner.md"
PICTURE = PAGE.parent / "pictures/accuracy.png"
BEGIN, END = "<!-- accuracy: made by make -C docs accuracy -->", "<!-- end of accuracy -->"


def section(files: list[str]) -> str:
    """The table and the sentence below it."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        code = main(["bench", "--report", ",".join(files), "--accuracy", "--picture", str(PICTURE)])
    if code: sys.exit(code)
    table, sentence = printed.getvalue().strip().rsplit("\n\n", 1)
    return f"{sentence}\n\n![estimated over measured](pictures/{PICTURE.name})\n\n{table}"


if __name__ == "__main__":
    text = section(sys.argv[1:])
    PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{text}\n{END}", PAGE.read_text(),
                           flags=re.S))
