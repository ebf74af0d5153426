"""Files of records: found by a path, a folder or a glob, and read line by line.

They are read here rather than through `datasets`, for one reason: a fault in line 48,213 must be
reported as line 48,213 of that file, with what is wrong and what to do.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .records import NAMES, Source, first_line, import_for_data, parse_json, without_filled_nulls

SUFFIXES = (".jsonl", ".json", ".parquet")
# The part of a file, as in train_1, train-00000-of-00002 and train-00000-of-00002-0123abcd0123abcd.
PART = re.compile(r"[-_.]?\d+([-_.]of[-_.]\d+)?([-_.][0-9a-f]{8,})?$")
_FILES_SHOWN = 20  # names in a line of the data report
SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test", "heldout")


def find_files(dataset: str | Path, split: str = "train") -> list[Path]:
    """The files that a path, folder or glob stands for, sorted; ValueError if there are none."""
    path = Path(dataset).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"--dataset {dataset}: '{path.suffix}' files are not supported; convert it to one of "
                f"{', '.join(SUFFIXES)}"
            )
        if split != "train":
            raise ValueError(
                f"--dataset_split {split}: {dataset} is a single file without splits; give the file of "
                "that split as --dataset"
            )
        return [path]
    if path.is_dir():
        files = [file for file in path.iterdir() if file.suffix in SUFFIXES]
        return _files_of_split(dataset, files, split)
    files = [Path(name) for name in glob.glob(str(path)) if Path(name).suffix in SUFFIXES]
    if not files:
        raise ValueError(
            f"--dataset {dataset}: no such file or folder; give a .jsonl, .json or .parquet file, "
            f"a folder or glob of them, a Hugging Face name, or one of {', '.join(NAMES)}"
        )
    return sorted(files)


def _files_of_split(folder: str | Path, files: list[Path], split: str) -> list[Path]:
    """Files named after `split` (train-0001.parquet); for train, else those named after none."""
    splits = _splits_of([file.name for file in files], split)
    chosen = [file for file in files if splits[file.name] == split]
    if not chosen and split == "train":
        chosen = [file for file in files if not splits[file.name]]
    if not chosen:
        found = ", ".join(sorted(file.name for file in files)) or "no .jsonl, .json or .parquet"
        raise ValueError(
            f"--dataset {folder}: no file of split '{split}' in this folder "
            f"(found {found}); name the files, or set --dataset_split"
        )
    return sorted(chosen)


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
    there = path.iterdir() if path.is_dir() else map(Path, glob.glob(str(path)))
    others = sorted(
        f"{other.name}/" if other.is_dir() else other.name
        for other in there
        if other not in files and not other.name.startswith(".")
    )
    lines = [f"files read: {_listed([file.name for file in files])}"]
    return (*lines, f"files left out: {_listed(others)}") if others else tuple(lines)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _FILES_SHOWN:,} more" if len(names) > _FILES_SHOWN else ""
    return ", ".join(names[:_FILES_SHOWN]) + more


def file_source(files: list[Path], described: tuple[str, ...] = ()) -> Source:
    """The records of files, one file after the other; the digest is of their bytes."""

    def records():
        for file in files:
            yield from (
                _parquet_records(file) if file.suffix == ".parquet" else _json_records(file)
            )

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
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(
            f"{path}:1: the file is UTF-16; convert it: "
            f"iconv -f UTF-16 -t UTF-8 {path.name} > utf8-{path.name}"
        )
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}:1: this is a Git LFS pointer, not the data; run: git lfs pull")
    if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return _json_list_records(path)
    return _json_lines_records(path)


def _json_lines_records(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")  # marks also stand mid-file
            if line.strip():
                yield f"{path}:{number}", line


def _json_list_records(path: Path) -> Iterator[tuple[str, dict]]:
    records = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8), path, first_line=1)
    return ((f"{path}: element {number}", record) for number, record in enumerate(records, 1))
