"""Make the table of docs/families.md from the families that the tests train.

python scripts/families_page.py            # a test says when it is needed
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.families import families_table  # noqa: E402

PAGE = ROOT / "docs/families.md"
TABLE = re.compile(r"^\| family \|.*?\n\n", re.MULTILINE | re.DOTALL)


def with_table(page: str) -> str:
    """The page with its table made anew."""
    return TABLE.sub(lambda _: f"{families_table()}\n\n", page)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
