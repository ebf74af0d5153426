"""Files of records: found by a path, a folder or a glob, and read line by line.

They are read here rather than through `datasets`, for one reason: a fault in line 48,213 must be
reported as line 48,213 of that file, with what is wrong and what to do.
"""
from __future__ import annotations

import codecs
import glob
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from .records import NAMES, Source, first_line, import_for_data, parse_json, without_filled_nulls

SUFFIXES = (".jsonl", ".json", ".parquet")
SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test", "heldout")


def find_files(dataset: str | Path, split: str = "train") -> list[Path]:
    """The files that a path, folder or glob stands for, sorted; ValueError if there are none."""
    path = Path(dataset).expanduser()
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"--dataset {dataset}: '{path.suffix}' files are not read; "
                             f"convert it to one of {', '.join(SUFFIXES)}")
        if split != "train":
            raise ValueError(f"--dataset_split {split}: {dataset} is one file and has no splits; "
                             "give the file of that split as --dataset")
        return [path]
    if path.is_dir():
        files = [file for file in path.iterdir() if file.suffix in SUFFIXES]
        return _files_of_split(dataset, files, split)
    files = [Path(name) for name in glob.glob(str(path)) if Path(name).suffix in SUFFIXES]
    if not files:
        raise ValueError(
            f"--dataset {dataset}: no such file or folder; give a .jsonl, .json or .parquet file, "
            f"a folder or glob of them, a Hugging Face name, or one of {', '.join(NAMES)}")
    return sorted(files)


def _files_of_split(folder: str | Path, files: list[Path], split: str) -> list[Path]:
    """Files named after `split` (train-0001.parquet); for train, else those named after none."""
    def split_names(file):
        return set(re.split(r"[-_.]", file.name.lower())) & {*SPLITS, split}
    chosen = [file for file in files if split in split_names(file)]
    if not chosen and split == "train":
        chosen = [file for file in files if not split_names(file)]
    if not chosen:
        found = ", ".join(sorted(file.name for file in files)) or "no .jsonl, .json or .parquet"
        raise ValueError(f"--dataset {folder}: no file of split '{split}' in this folder "
                         f"(found {found}); name the files, or set --dataset_split")
    return sorted(chosen)


def file_source(files: list[Path]) -> Source:
    """The records of files, one file after the other; the digest is of their bytes."""
    def records():
        for file in files:
            yield from (_parquet_records(file) if file.suffix == ".parquet"
                        else _json_records(file))

    def digest():
        return hashlib.sha256("".join(map(_file_digest, files)).encode()).hexdigest()
    return Source(records, digest)


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
        raise ValueError(f"{path}: not readable as parquet after row {number} "
                         f"({first_line(error)}); download or export it again") from None


def _json_records(path: Path) -> Iterator[tuple[str, dict | bytes]]:
    """Records of JSON lines, or of one JSON list, told apart by the first character."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{path}:1: the file is UTF-16; convert it: "
                         f"iconv -f UTF-16 -t UTF-8 {path.name} > utf8-{path.name}")
    if head.startswith(b"version https://git-lfs"):
        raise ValueError(f"{path}:1: this is a Git LFS pointer, not the data; run: git lfs pull")
    if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        return _json_list_records(path)
    return _json_lines_records(path)


def _json_lines_records(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n")  # marks also stand mid-file
            if line.strip(): yield f"{path}:{number}", line


def _json_list_records(path: Path) -> Iterator[tuple[str, dict]]:
    records = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8), path, first_line=1)
    return ((f"{path}: element {number}", record) for number, record in enumerate(records, 1))
