"""docs/cases.md names, for each difficult input, tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "cases.md"
LATER: set[int] = set()  # wholly or in part


def rows() -> dict[int, tuple[str, list[str]]]:
    """Number -> (right result, names of tests) of each row of the table."""
    found = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].isdecimal():
            found[int(cells[0])] = cells[2], re.findall(r"`([\w/]+\.py::\w+)`", cells[3])
    return found


def functions_of(path: Path) -> set[str]:
    """Names of the test functions of a file, without importing it."""
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_table_has_all_thirty_rows_and_each_is_tested_or_said_to_be_later():
    table = rows()
    assert list(table) == list(range(1, 31))
    for number, (result, tests) in table.items():
        if number in LATER:
            assert "Later" in result or "comes with" in result, number
        else:
            assert tests, number


def test_every_named_test_exists():
    for name in re.findall(r"`([\w/]+\.py::\w+)`", TABLE.read_text()):
        file, function = name.split("::")
        assert function in functions_of(TESTS / file), name


def test_every_row_of_the_second_round_names_tests():
    rows = re.findall(r"^\|.*\|$", TABLE.read_text().partition("## Second round")[2], re.MULTILINE)[
        2:
    ]
    assert rows and all("::test_" in row for row in rows)
