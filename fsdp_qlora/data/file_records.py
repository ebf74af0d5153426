"""The records of one file: Parquet, a table of texts, JSON lines, or one JSON value.

They are read here rather than through `datasets`, for one reason: a fault in line 48,213 must be
reported as line 48,213 of that file, with what is wrong and what to do.
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterator
from pathlib import Path

from .json_tables import is_record, records_of_table
from .records import first_line, import_for_data, parse_json, without_filled_nulls

csv.field_size_limit(2**31 - 1)  # a cell may hold a long text


def records_in(path: Path) -> Iterator[tuple[str, dict | bytes]]:
    """(place, record) of a file in turn; bytes are JSON still to be read. ValueError names the line."""
    return _READERS.get(path.suffix.lower(), _json_records)(path)


def _parquet_records(path: Path) -> Iterator[tuple[str, dict]]:
    parquet = import_for_data("pyarrow.parquet", path)
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for record in batch.to_pylist(maps_as_pydicts="strict"):
                number += 1
                yield f"{path}: row {number}", without_filled_nulls(record)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ValueError(
            f"{path}: not readable as parquet after row {number} "
            f"({first_line(error)}); download or export it again"
        ) from None


def _json_records(path: Path) -> Iterator[tuple[str, dict | bytes]]:
    """Records of JSON lines, or of one JSON list, told apart by the first character."""
    with path.open("rb") as file:
        head = file.read(64)
    _check_text(path, head)
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}:1: this is a Git LFS pointer, not the data; run: git lfs pull")
    if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return _json_list_records(path)
    if path.suffix.lower() == ".json" and (records := _listed_records(path)) is not None:
        return records
    if path.suffix != ".json" and _is_table(path):
        raise ValueError(
            f"{path}:1: one table, not a record in each line; rename it to {path.stem}.json, or write its "
            'records in lines (pandas: to_json(..., orient="records", lines=True))'
        )
    return _json_lines_records(path)


def _is_table(path: Path) -> bool:
    """Whether the only line of a file of lines is a table."""
    whole = _one_object(path)
    return whole is not None and not is_record(whole) and records_of_table(whole) is not None


# What a file is that begins with these bytes, and what makes text of it.
_NO_TEXT = {
    b"\x1f\x8b": ("gzip", "gzip -dc {0} > plain-{0}"),
    b"BZh": ("bzip2", "bzip2 -dc {0} > plain-{0}"),
    b"\xfd7zXZ": ("xz", "xz -dc {0} > plain-{0}"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc {0} > plain-{0}"),
    b"PK\x03\x04": ("a zip file or a spreadsheet", "unzip {0}, or export a sheet as .csv"),
    b"PAR1": ("Parquet", "mv {0} {0}.parquet"),
}


def _check_text(path: Path, head: bytes):
    """Refuse a file that says by its first bytes that it is no text, or UTF-16."""
    for mark, (kind, remedy) in _NO_TEXT.items():
        if head.startswith(mark):
            raise ValueError(
                f"{path}:1: this is {kind}, not text; unpack, export or rename it: "
                f"{remedy.format(path.name)}"
            )
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(
            f"{path}:1: the file is UTF-16; convert it: "
            f"iconv -f UTF-16 -t UTF-8 {path.name} > utf8-{path.name}"
        )


def _listed_records(path: Path) -> Iterator[tuple[str, dict]] | None:
    """The records of one object that is a table, or that is one itself; None for another file."""
    if (whole := _one_object(path)) is None:
        return None
    if (records := records_of_table(whole)) is not None:
        return ((f"{path}: {place}", record) for place, record in records)
    return iter([(f"{path}:1", whole)])


def _one_object(path: Path) -> dict | None:
    """The object that a file is as a whole; None of JSON lines."""
    with path.open("rb") as file:
        first = file.readline().strip()
        if _is_json(first) and any(line.strip() for line in file):
            return None
    try:
        whole = json.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (ValueError, RecursionError):
        return None  # its fault is said by line
    return whole if isinstance(whole, dict) else None


def _is_json(text: bytes) -> bool:
    """Whether a text is a JSON value."""
    try:
        json.loads(text)
        return True
    except (ValueError, RecursionError):
        return False


def _csv_records(path: Path) -> Iterator[tuple[str, dict]]:
    """Rows of a table with a header, as objects of texts; a cell may hold newlines in quotes."""
    _check_encoding(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        separator = _separator(path, file.readline())
        file.seek(0)
        reader = csv.reader(file, delimiter=separator, strict=True)
        try:
            names = _column_names(next(reader, []))
            if not names or len(set(names)) < len(names):
                raise ValueError(
                    f"{path}:1: the first line must name each column once; it has "
                    f"{', '.join(names) or 'nothing'}"
                )
            line = reader.line_num
            for row in reader:
                if len(row) not in (0, len(names)):
                    raise ValueError(
                        f"{path}:{line + 1}: {len(row)} cells where the first line names "
                        f"{len(names)} columns; put cells that contain separators in quotes"
                    )
                if row:
                    yield f"{path}: line {line + 1}", dict(zip(names, row, strict=True))
                line = reader.line_num
        except csv.Error as error:
            raise ValueError(
                f"{path}:{reader.line_num}: not valid {path.suffix[1:].upper()} ({error}); export it "
                "again, or convert it to .jsonl"
            ) from None


def _column_names(header: list[str]) -> list[str]:
    """The names of a table's columns; one without, as of pandas' index, is known by its place."""
    names = [name.strip() for name in header]
    return [name or f"column {place}" for place, name in enumerate(names, 1)] if any(names) else []


def _separator(path: Path, header: str) -> str:
    """What stands between the names of the columns: the suffix's own, unless the header has only another.

    Where a comma is the decimal mark, spreadsheets export .csv with semicolons.
    """
    own = "\t" if path.suffix.lower() == ".tsv" else ","
    return next((mark for mark in (own, "\t", ";", ",") if mark in header), own)


def _check_encoding(path: Path):
    """Refuse a text file that is not UTF-8, naming the line."""
    with path.open("rb") as file:
        _check_text(path, file.read(8))
        file.seek(0)
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}:{number}: byte 0x{line[error.start]:02x} is not UTF-8; convert the file, "
                    f"for example: iconv -f ISO-8859-1 -t UTF-8 {path.name}"
                ) from None


def _json_lines_records(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")  # marks also stand mid-file
            if line.strip():
                yield f"{path}:{number}", line


def _json_list_records(path: Path) -> Iterator[tuple[str, dict]]:
    records = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8), path, first_line=1)
    return ((f"{path}: element {number}", record) for number, record in enumerate(records, 1))


_READERS = {".parquet": _parquet_records, ".csv": _csv_records, ".tsv": _csv_records}
