"""Files of records: found by a path, a folder or a glob, and read one after the other."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from pathlib import Path

from ..config.settings import one_of
from .file_records import records_in
from .records import NAMES, Source

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
# The part of a file, as in train_1, train-00000-of-00002 and train-00000-of-00002-0123abcd0123abcd.
PART = re.compile(r"[-_.]?\d+([-_.]of[-_.]\d+)?([-_.][0-9a-f]{8,})?$")
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
            yield from records_in(file)

    def digest():
        return hashlib.sha256("".join(map(_file_digest, files)).encode()).hexdigest()

    return Source(records, digest, described)


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
