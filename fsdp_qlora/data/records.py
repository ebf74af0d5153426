"""Records as they are read, each with its place, and the rows that they become.

A fault of JSON is one line: the place, what is wrong, what to do.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .formats import Row, row_from_record

HUB_IDS = {
    "alpaca": "yahma/alpaca-cleaned",
    "alpaca_sample": "yahma/alpaca-cleaned",
    "guanaco": "timdettmers/openassistant-guanaco",
    "sql": "knowrohit07/know_sql",
    "orca_math": "microsoft/orca-math-word-problems-200k",
}
NAMES = (*HUB_IDS, "dummy", "text_to_sql")


@dataclass(frozen=True)
class Source:
    """Records with the place of each, and a digest that changes when the data change.

    raw_records: as read. A line of JSON is still bytes: most ranks of a stream only pass it by.
    files: lines for the data report on what was read of a folder, and what was not.
    weight_column: the key of rows' weights, or None.
    """

    raw_records: Callable[[], Iterator[tuple[str, dict | bytes]]]
    digest: Callable[[], str]
    files: tuple[str, ...] = ()
    weight_column: str | None = None

    def records(self) -> Iterator[tuple[str, dict]]:
        return ((place, _parse_record(raw, place)) for place, raw in self.raw_records())

    def rows(self) -> Iterator[Row]:
        """Rows one at a time, so that a large file is never held as Python objects."""
        return (self.row(raw, place) for place, raw in self.raw_records())

    def row(self, raw: dict | bytes, place: str) -> Row:
        """The row of a raw record; ValueError names its place."""
        return row_from_record(_parse_record(raw, place), place, self.weight_column)


def _parse_record(raw: dict | bytes, place: str) -> dict:
    """A raw record as an object; a line of JSON has the place "path:line"."""
    if not isinstance(raw, bytes):
        return raw
    path, _, line = place.rpartition(":")
    return parse_json(raw, Path(path), int(line))


def parse_json(data: bytes, path: Path, first_line: int):
    """json.loads whose faults are one line: the place, what is wrong, what to do.

    NaN passes, as in Python; in a field that is used it is then reported as not being text.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise ValueError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; convert the file, for "
            f"example: iconv -f ISO-8859-1 -t UTF-8 {path.name}"
        ) from None
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"{path}:{line}: column {error.colno}: {_json_fault(error)}") from None
    except RecursionError:
        raise ValueError(
            f"{path}:{first_line}: lists or objects are nested too deeply; drop the row"
        ) from None
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise ValueError(
            f"{path}:{first_line}: an integer has too many digits; write it as text"
        ) from None


def without_filled_nulls(record: dict) -> dict:
    """A row of a table without the nulls that stand for what it lacks.

    A column has one type, so nested objects come back with the keys of all rows. A null in a list was
    written by the author, and the columns themselves are known by name.
    """
    return {key: _without_nulls(value) for key, value in record.items()}


def _without_nulls(value):
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _json_fault(error: json.JSONDecodeError) -> str:
    if error.msg.startswith("Unterminated string"):
        return (
            "the line ends inside a string, as with a raw newline; "
            "write it as \\n (json.dumps does)"
        )
    if error.msg.startswith("Invalid control character"):
        return (
            "a raw newline, tab or other control character inside a string; "
            "write it as \\n or \\t (json.dumps does)"
        )
    if error.msg.startswith("Extra data"):
        return "extra text after the record; write one JSON object per line"
    return f"not JSON ({error.msg}); write one JSON object per line, or one list in a .json file"


def import_for_data(module: str, dataset: str | Path):
    """A module of the extra `data`; ValueError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"--dataset {dataset} needs the package {module.partition('.')[0]}; "
            "run: pip install fsdp_qlora[data]"
        ) from None


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
