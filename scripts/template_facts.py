"""Find again what chat templates do, for tests/chat_templates.json.

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    python scripts/template_facts.py llama_cpp_python-*/vendor/llama.cpp/models/templates

A new row needs `model`, `families`, `from` (trl or llama.cpp) and `template`; then run
scripts/families_page.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.chat_templates import FACTS, facts_of, stored_facts, text_of  # noqa: E402

if __name__ == "__main__":
    rows = [row | facts_of(text_of(row, Path(sys.argv[1]))) for row in stored_facts()]
    FACTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
