"""Files of records: found by a path, a folder or a glob, and read line by line.

They are read here rather than through `datasets`, for one reason: a fault in line 48,213 must be
reported as line 48,213 of that file, with what is wrong and what to do.
"""

from __future__ import annotations

import codecs
import csv
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..config.settings import one_of
from .json_tables import is_record, records_of_table
from .records import NAMES, Source, first_line, import_for_data, parse_json, without_filled_nulls

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
# The part of a file, as in train_1, train-00000-of-00002 and train-00000-of-00002-0123abcd0123abcd.
PART = re.compile(r"[-_.]?\d+([-_.]of[-_.]\d+)?([-_.][0-9a-f]{8,})?$")
csv.field_size_limit(2**31 - 1)  # a cell may hold a long text
_FILES_SHOWN = 20  # names in a line of the data report
SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test", "heldout")


def find_files(dataset: str | Path, split: str = "train") -> list[Path]:
    """The files that a path, folder or glob stands for, sorted; ValueError if there are none."""
    path = Path(dataset).expanduser()
    if path.is_file():
        if not _is_data(path):
            raise ValueError(
                f"--dataset {dataset}: '{path.suffix}' files are not supported; unpack or convert it to "
                f"one of {', '.join(SUFFIXES)}{_unpacking([path])}"
            )
        if split != "train":
            raise ValueError(
                f"--dataset_split {split}: {dataset} is a single file without splits; give the file of "
                f"that split as --dataset, or its first rows as {dataset}[:1000]"
            )
        return [path]
    if path.is_dir():
        files = list(filter(_is_data, path.iterdir())) or _nested(path)
        return _files_of_split(dataset, path, files, split)
    names = glob.glob(str(path), recursive=True)
    files = list(filter(_is_data, map(Path, names)))
    if not files:
        _refuse_address(str(dataset))
        if part := re.search(r"\s*\[[^\]]*:[^\]]*\]$", str(dataset)):
            raise ValueError(
                f"--dataset {dataset}: of a data set only the first rows can be taken, as in "
                f"{str(dataset)[: part.start()]}[:1000]; write it so, or make a file of the rows you want"
            )
        raise ValueError(
            f"--dataset {dataset}: no such file or folder; give a .jsonl, .json, .csv, .tsv or .parquet "
            f"file, a folder or glob of them, a Hugging Face name, or one of {', '.join(NAMES)}"
        )
    return _files_of_split(dataset, path, files, split)


def _is_data(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


# What unpacks a file of such a name.
_UNPACK = {
    ".gz": "gzip -dk",
    ".bz2": "bzip2 -dk",
    ".xz": "xz -dk",
    ".zst": "zstd -d",
    ".zip": "unzip",
    ".tar": "tar -xf",
}


def _unpacking(files: list[Path]) -> str:
    """The command that unpacks one of some files, in brackets; empty if none is packed."""
    commands = (
        f" ({_UNPACK[f.suffix.lower()]} {f.name})" for f in files if f.suffix.lower() in _UNPACK
    )
    return next(commands, "")


def _refuse_address(dataset: str):
    """Refuse an address: data sets of the hub have names, and files are read from this machine."""
    if "://" not in dataset:
        return
    if of_hub := re.match(r"(?:https?://huggingface\.co|hf:/)/datasets/([\w.-]+/[\w.-]+)", dataset):
        raise ValueError(
            f"--dataset {dataset}: give a data set of the hub by its name: {of_hub[1]}"
        )
    raise ValueError(
        f"--dataset {dataset}: this is an address; download the file, and give its path"
    )


def would_read(dataset: str | Path, split: str, file: Path) -> bool:
    """Whether `file` is, or would be if it were written, one of `find_files`."""
    path, file = Path(dataset).expanduser().absolute(), file.expanduser().absolute()
    if not path.is_dir():
        return glob.has_magic(str(path)) and split == "train" and _is_named(file, path)
    if not file.is_relative_to(path):
        return False
    files = list(filter(_is_data, path.iterdir()))
    if file.parent != path:
        inside = file.relative_to(path).parts
        if files or any(part.startswith(".") for part in inside):
            return False
        files = _nested(path)
    return file in _files_of_split(dataset, path, [*{*files, file}], split)


def _is_named(file: Path, pattern: Path) -> bool:
    """Whether a glob would find a file that need not be there; wildcards find nothing hidden."""
    known = pattern.parts
    if "**" in known:
        first = known.index("**")
        hidden = any(part.startswith(".") for part in file.parts[first:])
        return file.match(pattern.name) and file.parts[:first] == known[:first] and not hidden
    hidden = any(
        part.startswith(".") and not name.startswith(".")
        for part, name in zip(file.parts, known, strict=False)
    )
    return len(file.parts) == len(known) and file.match(str(pattern)) and not hidden


def _nested(folder: Path) -> list[Path]:
    """The files in folders inside of a folder that has none itself, but for hidden ones."""
    found = (file for file in folder.rglob("*") if _is_data(file) and file.is_file())
    return [f for f in found if not any(p.startswith(".") for p in f.relative_to(folder).parts)]


def _files_of_split(dataset: str | Path, path: Path, files: list[Path], split: str) -> list[Path]:
    """Of the files in a folder or of a glob, those named after `split` (train-0001.parquet), or in a folder
    of that name; for train, else those named after none, and of a glob all.
    """
    if split == "train" and not path.is_dir():
        return sorted(files)
    if not files:
        others = sorted(f for f in path.iterdir() if f.is_file())
        raise ValueError(
            f"--dataset {dataset}: no {one_of(SUFFIXES)} file there, but "
            f"{_listed([f.name for f in others]) or 'nothing'}; give another folder, or unpack or convert "
            f"what is there{_unpacking(others)}"
        )
    splits = _splits_of([file.name for file in files], split)
    named = {file: _folder_split(path, file, split) or splits[file.name] for file in files}
    chosen = [file for file in files if named[file] == split]
    if not chosen and split == "train":
        chosen = [file for file in files if not named[file]]
    if not chosen:
        found = ", ".join(sorted(file.name for file in files))
        raise ValueError(
            f"--dataset {dataset}: no file of split '{split}' there "
            f"(found {found}); name the files, or set --dataset_split"
        )
    return sorted(chosen)


def _folder_split(path: Path, file: Path, asked: str) -> str | None:
    """The split that a folder is named after which lies between a file and `path`, or a glob's fixed part."""
    while glob.has_magic(str(path)) and not path.is_dir():
        path = path.parent
    between = file.relative_to(path).parts[:-1]
    return next((name for name in map(str.lower, between) if name in (*SPLITS, asked)), None)


def _splits_of(names: list[str], asked: str) -> dict[str, str | None]:
    """The split that each file is named after, of SPLITS and `asked`; None for other names.

    A split is the whole name, but for numbers of parts (train-00000-of-00002), a beginning that all
    files share (my_data_train), or an ending that two splits share (train_sft beside test_sft). So
    train-old and dev-docs are named after none.
    """
    known = "|".join(map(re.escape, {*SPLITS, asked.lower()}))
    start = os.path.commonprefix([name.lower() for name in names])
    shared = start[: max(map(start.rfind, "-_.")) + 1]
    split, rest = {}, {}
    for name in names:
        bare = PART.sub("", Path(name.lower()).stem)
        for words in (bare, bare.removeprefix(shared)):
            if found := re.fullmatch(rf"({known})(?:[-_.](.+))?", words):
                split[name], rest[name] = found[1], found[2]
                if not found[2]:
                    break
    splits_with = {
        ending: {split[name] for name in split if rest[name] == ending} for ending in rest.values()
    }
    return {
        name: (asked if split[name] == asked.lower() else split[name])
        if name in split and (not rest[name] or len(splits_with[rest[name]]) > 1)
        else None
        for name in names
    }


def describe_files(dataset: str | Path, files: list[Path]) -> tuple[str, ...]:
    """What of a folder or glob is read, and what is left out, in two lines; none for one file."""
    path = Path(dataset).expanduser()
    if path.is_file():
        return ()
    if path.is_dir():
        there, names = list(path.iterdir()), {f: str(f.relative_to(path)) for f in files}
        if any(file.parent != path for file in files):  # nested: folders are what holds them
            there = [f for f in path.rglob("*") if f.is_file()]
    else:
        there, names = (
            list(map(Path, glob.glob(str(path), recursive=True))),
            {f: f.name for f in files},
        )
    others = sorted(
        f"{other.name}/" if other.is_dir() else other.name
        for other in there
        if other not in files and not other.name.startswith(".")
    )
    lines = [f"files read: {_listed([names[file] for file in files])}"]
    return (*lines, f"files left out: {_listed(others)}") if others else tuple(lines)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _FILES_SHOWN:,} more" if len(names) > _FILES_SHOWN else ""
    return ", ".join(names[:_FILES_SHOWN]) + more


def file_source(files: list[Path], described: tuple[str, ...] = ()) -> Source:
    """The records of files, one file after the other; the digest is of their bytes."""

    def records():
        for file in files:
            yield from _READERS.get(file.suffix.lower(), _json_records)(file)

    def digest():
        return hashlib.sha256("".join(map(_file_digest, files)).encode()).hexdigest()

    return Source(records, digest, described)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
