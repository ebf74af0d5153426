"""Docs that repeat what the code says must say the same."""
from __future__ import annotations

from pathlib import Path

from fsdp_qlora.sharding import STRATEGIES

DOCS = Path(__file__).parents[1] / "docs"


def test_the_strategies_table_is_the_one_in_the_code():
    lines = (DOCS / "strategies.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines
            if line.startswith("| ")]
    freed = {None: "-", True: "yes", False: "no"}
    expected = [[name, s.fsdp1, s.mesh, freed[s.reshard_after_forward], s.summary]
                for name, s in STRATEGIES.items()]
    assert rows[1:] == expected
