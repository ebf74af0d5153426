"""Score text-to-SQL answers by running them: right means the same rows as the reference query.

Comparing strings would fail answers that say the same in other words. Instead both queries run in
an in-memory sqlite database that cannot be written to, with limits on time and size, since
a language model may write anything. This is "execution accuracy" as in Spider
(https://arxiv.org/abs/1809.08887), on one small database per schema.
"""

import math
import re
import sqlite3
import time
from collections import Counter
from dataclasses import dataclass, field

from .prompts import load_schemas

MAX_ROWS = 1_000
MAX_SECONDS = 1.0
_MAX_VALUE_BYTES = 100_000

# Everything else, such as DROP, ATTACH or PRAGMA, is refused by the authorizer.
_READ_ONLY = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}

# Where a statement starts, most certain first: a line of its own (or after "SQL:"), then anywhere
# in capitals, then anywhere followed by FROM. "I select the names with ..." is prose.
WITH = r"WITH\s+(?:RECURSIVE\s+)?\w+\s*(?:\([^)]*\)\s*)?AS\s*\("
_STARTS = [
    re.compile(rf"(?im)(?:^|[:`])[ \t]*(?=SELECT\s|{WITH})"),
    re.compile(rf"(?=\bSELECT\s|{WITH})"),
    re.compile(r"(?is)(?=\bSELECT\s.*?\sFROM\s)"),
]
# Where it ends: a semicolon, a blank line, closing backticks, a chat token. Quoted text is skipped.
_ENDS = re.compile(r"""('[^']*'|"[^"]*")|;|\n[ \t]*\n|`|<\|""")


def _extract_sql(text: str) -> str:
    """The first SQL query in a text, on one line and without its semicolon; "" if there is none."""
    text = text.replace("\r", "")
    for start in _STARTS:
        if found := start.search(text):
            statement = text[found.end() :]
            ends = (end.start() for end in _ENDS.finditer(statement) if not end.group(1))
            return " ".join(statement[: next(ends, None)].split())
    return ""


def execute(schema_sql: str, sql: str) -> list[tuple]:
    """Rows of one query on a fresh copy of a database.

    Raises ValueError for anything but one query that reads, and for one that takes too long or
    gives too many rows.
    """
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(schema_sql)
        _restrict(connection)
        cursor = connection.execute(sql)
        rows = cursor.fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ValueError(f"sqlite cannot run {sql!r}: {error}") from error
    finally:
        connection.close()
    if cursor.description is None:
        raise ValueError(f"there is no query in {sql!r}")
    if len(rows) > MAX_ROWS:
        raise ValueError(f"{sql!r} gives more than {MAX_ROWS} rows")
    return rows


def _restrict(connection: sqlite3.Connection):
    """Let a connection only read, and only for a while."""

    def authorize(action, *_):
        return sqlite3.SQLITE_OK if action in _READ_ONLY else sqlite3.SQLITE_DENY

    deadline = time.monotonic() + MAX_SECONDS
    connection.set_authorizer(authorize)
    connection.set_progress_handler(lambda: time.monotonic() > deadline, 1_000)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)


def same_result(gold: list[tuple], predicted: list[tuple], ordered: bool) -> bool:
    """Whether two results hold the same rows, in the same order if `ordered`.

    Columns are compared by position, not by name, and numbers to a relative 1e-6.
    """
    if len(gold) != len(predicted):
        return False
    if not ordered:
        gold, predicted = sorted(gold, key=_sort_key), sorted(predicted, key=_sort_key)
    return all(map(_same_row, gold, predicted))


def _same_row(one: tuple, other: tuple) -> bool:
    return len(one) == len(other) and all(map(_same_value, one, other))


def _same_value(one, other) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return one == other


def _sort_key(row: tuple) -> list[tuple]:
    """Sorts values of any type; numbers are rounded, since nearly equal ones must sort alike."""
    return [(0, f"{v:.9g}") if isinstance(v, (int, float)) else (1, str(v)) for v in row]


def is_ordered(sql: str) -> bool:
    return re.search(r"\bORDER\s+BY\b", sql, re.IGNORECASE) is not None


@dataclass
class _Failure:
    kind: str
    question: str
    gold: str
    predicted: str
    error: str  # why it did not run; "" if it ran and gave other rows


@dataclass
class Score:
    accuracy: float  # share of answers, 0 to 1, whose rows are right
    executable: float  # share that sqlite could run
    by_kind: dict[str, tuple[int, int]]  # kind -> right, asked
    failures: list[_Failure] = field(repr=False)

    def __str__(self) -> str:
        lines = [f"right {self.accuracy:.1%}, executable {self.executable:.1%}"]
        for kind, (right, asked) in self.by_kind.items():
            lines.append(f"  {kind:<16} {right:>3} of {asked}")
        return "\n".join(lines)


def score(rows: list[dict], answers: list[str], schemas: dict[str, str] | None = None) -> Score:
    """Score one answer (any text) per row of the data.

    `schemas` maps a row's schema to the SQL that builds it; the bundled ones unless given.
    """
    if len(rows) != len(answers) or not rows:
        raise ValueError(f"need one answer for each row, got {len(answers)} for {len(rows)}")
    schemas = schemas or load_schemas()
    verdicts = [_judge(row, text, schemas) for row, text in zip(rows, answers, strict=True)]
    failures = [failure for failure in verdicts if failure]
    errors = sum(failure.error != "" for failure in failures)
    asked = Counter(row["kind"] for row in rows)
    failed = Counter(failure.kind for failure in failures)
    return Score(
        accuracy=1 - len(failures) / len(rows),
        executable=1 - errors / len(rows),
        by_kind={kind: (asked[kind] - failed[kind], asked[kind]) for kind in sorted(asked)},
        failures=failures,
    )


def _judge(row: dict, answer: str, schemas: dict[str, str]) -> _Failure | None:
    """None if the answer is right."""
    *_, question, gold = (message["content"] for message in row["messages"])
    schema_sql, predicted, error = schemas[row["schema"]], _extract_sql(answer), ""
    expected = execute(schema_sql, gold)
    try:
        if same_result(expected, execute(schema_sql, predicted), is_ordered(gold)):
            return None
    except ValueError as problem:
        error = str(problem)
    return _Failure(row["kind"], question, gold, predicted, error)
