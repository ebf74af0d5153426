"""Write what is generated: docs/flags.md and examples/recipes/schema.json.

    python scripts/make_reference.py            # tests/test_reference.py says when it is needed
"""
from __future__ import annotations

import json
from dataclasses import is_dataclass
from pathlib import Path

from fsdp_qlora import cli, delivery, guide
from fsdp_qlora.bench import command as bench
from fsdp_qlora.config import GROUPS, RunConfig
from fsdp_qlora.recipe import RecipeOptions
from fsdp_qlora.reference import flags_page, schema

ROOT = Path(__file__).parents[1]


def pages() -> dict[Path, str]:
    """Each generated file and its text."""
    return {ROOT / "docs/flags.md": flags_page(own_options()),
            ROOT / "examples/recipes/schema.json": json.dumps(schema(), indent=1) + "\n"}


def own_options() -> list[type]:
    """The dataclasses of settings that commands add to those of a run."""
    found = [RecipeOptions, *(value for module in (guide, cli, bench, delivery)
                              for value in vars(module).values() if is_dataclass(value))]
    return [g for g in dict.fromkeys(found) if isinstance(g, type) and g.__name__.endswith("Options")
            and g not in (*GROUPS, RunConfig)]


if __name__ == "__main__":
    for path, text in pages().items(): path.write_text(text)
