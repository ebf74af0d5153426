"""Make the tables of docs/families.md from the families that the tests train, and from chat templates.

python scripts/families_page.py            # a test says when it is needed
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.chat_templates import templates_table  # noqa: E402
from tests.families import families_table  # noqa: E402

PAGE = ROOT / "docs/families.md"
TABLES = {
    "family": families_table,
    "template of": templates_table,
}  # by the head of the first column


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    for head, table in TABLES.items():
        old = re.compile(rf"^\| {head} \|.*?\n\n", re.MULTILINE | re.DOTALL)
        new = f"{table()}\n\n".replace("\\", r"\\")
        page = old.sub(new, page)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
