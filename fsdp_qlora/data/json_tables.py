"""Tables that one JSON object holds, as pandas' to_json(), datasets' to_dict() and other tools write them.

Records in a list under a key; columns, each a list, or an object of values by the rows' names; rows by their
names; or the names of columns beside lists of values (orient "table", "columns", "index" and "split").
"""

from __future__ import annotations

from .formats import FORMATS, TOKENS_KEY

_LISTS = ("data", "rows", "train", "examples", "instances", "records", "items")

Placed = list[tuple[str, dict]]  # records, each with its place in the object


def records_of_table(whole: dict) -> Placed | None:
    """The records of a table; None of a record, whose fields may be lists of objects too (messages)."""
    by_name = _rows_by_name(whole)
    if by_name is not None:
        return by_name
    key = next((key for key in _LISTS if isinstance(whole.get(key), list)), None)
    if key is not None:
        rows = _with_names(whole.get("columns"), whole[key])
        return [(f"{key}[{n}]", row) for n, row in enumerate(rows)]
    rows_of_columns = _rows_of_columns(whole)
    if rows_of_columns is None:
        return None
    return [(f"row {n}", row) for n, row in enumerate(rows_of_columns, 1)]


def is_record(fields: dict) -> bool:
    """Whether an object has the keys of a format, and no table's values under them, or is of tokens."""
    if isinstance(tokens := fields.get(TOKENS_KEY), list) and all(
        isinstance(t, int) for t in tokens
    ):
        return True
    if _rows_of_columns(fields) is not None:
        return False
    return _has_format(fields)


def _has_format(fields: dict) -> bool:
    return any(all(key in fields for key in keys) for keys, _ in FORMATS)


def _rows_by_name(whole: dict) -> Placed | None:
    """Rows of an object of objects, where these have the keys of a format and it has none of its own.

    Or where names are numbers, as of pandas' index, so that an unknown format is told by its columns.
    """
    rows = list(whole.values())
    if not rows or not all(isinstance(row, dict) for row in rows) or _has_format(whole):
        return None
    if not all(map(_has_format, rows)) and not all(map(str.isdecimal, whole)):
        return None
    return [(f"row {name!r}", row) for name, row in whole.items()]


def _with_names(columns: object, rows: list) -> list:
    """Lists of values as records, if their columns are named beside them."""
    named = isinstance(columns, list) and all(isinstance(name, str) for name in columns)
    if not named or any(not isinstance(row, list) or len(row) != len(columns) for row in rows):
        return rows
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _rows_of_columns(whole: dict) -> list[dict] | None:
    """Rows of an object of columns: each a list, or an object of values by the rows' names."""
    columns = list(whole.values())
    if columns and all(isinstance(column, dict) for column in columns):
        if any(column.keys() != columns[0].keys() for column in columns):
            return None
        columns = [list(column.values()) for column in columns]
    elif any(not isinstance(c, list) or all(isinstance(x, dict) for x in c) for c in columns):
        return None
    if len({len(column) for column in columns}) != 1:
        return None
    return [dict(zip(whole, row, strict=True)) for row in zip(*columns, strict=True)]
