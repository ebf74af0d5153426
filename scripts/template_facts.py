"""Find again what chat templates do, for tests/chat_templates.json.

    git clone --depth 1 https://github.com/ggml-org/llama.cpp
    python scripts/template_facts.py llama.cpp=llama.cpp xinference=some/folder

Each argument is a source of tests/template_sources.py and a checkout of it. Rows from TRL's package are
found without one; rows of sources that are not given stay as they are. A new row needs `model`,
`families`, `from` (the source) and `template`; then run scripts/families_page.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.chat_templates import FACTS, facts_of, stored_facts  # noqa: E402
from tests.template_sources import text_of  # noqa: E402


def found_again(row: dict, checkouts: dict[str, Path | None]) -> dict:
    """A row with the facts of its template, if its source is at hand."""
    if row["from"] not in checkouts:
        return row
    return row | facts_of(text_of(row, checkouts[row["from"]]))


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    checkouts = {"trl": None} | {source: Path(folder) for source, folder in given.items()}
    rows = [found_again(row, checkouts) for row in stored_facts()]
    FACTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
