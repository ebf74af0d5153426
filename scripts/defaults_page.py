"""The measured part of docs/defaults.md, made of the lines that benchmarks/defaults.py wrote.

python scripts/defaults_page.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from defaults_table import tables  # noqa: E402

PAGE = ROOT / "docs/defaults.md"
BEGIN, END = "<!-- made by scripts/defaults_page.py -->", "<!-- end of what is made -->"


def read_rows() -> list[dict]:
    """All lines of the results, file by file."""
    files = sorted((ROOT / "benchmarks/results").glob("defaults*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def section(rows: list[dict]) -> str:
    """Where the lines were made, and the tables of them."""
    if not rows:
        return "Not measured yet."
    last = rows[-1]
    return (
        f"Held-out loss after one pass over the rows of each task, mean of the seeds; in brackets, how "
        f"far it is above the best rate of the same kind of training. `lr x1` is the rate of LoRA Without "
        f"Regret, 5e-4 x (2000 / width)^0.775; the default is 1.9 times that at a width of 512. "
        f"{last['gpu']}, commit {last['commit']}, {last['date']}.\n\n{tables(rows)}"
    )


def page(text: str, rows: list[dict]) -> str:
    """The page with what is made of the lines."""
    made = f"{BEGIN}\n{section(rows)}\n{END}"
    return re.sub(f"{BEGIN}.*?{END}", lambda _: made, text, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), read_rows()))
