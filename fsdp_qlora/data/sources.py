"""Where rows come from: files, folders, the Hugging Face hub, and names known by heart.

Files are read here rather than through `datasets`, for one reason: a fault in line 48,213 must be
reported as line 48,213 of that file, with what is wrong and what to do. `datasets` and `pyarrow`
are imported only when the hub or a parquet file asks for them.
"""
from __future__ import annotations

import codecs
import glob
import hashlib
import importlib.resources
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..hub import asked_hub
from .formats import Row, row_from_record

HUB_IDS = {
    "alpaca": "yahma/alpaca-cleaned",
    "alpaca_sample": "yahma/alpaca-cleaned",
    "guanaco": "timdettmers/openassistant-guanaco",
    "sql": "knowrohit07/know_sql",
    "orca_math": "microsoft/orca-math-word-problems-200k",
}
NAMES = (*HUB_IDS, "dummy", "text_to_sql")
SAMPLED_NAMES = ("alpaca_sample", "dummy", "orca_math")  # those that --dataset_samples is meant for

SUFFIXES = (".jsonl", ".json", ".parquet")
SPLITS = ("train", "validation", "valid", "val", "dev", "eval", "test", "heldout")
SQL_HELDOUT_ROWS = 1000  # the first rows of the shuffled know_sql were kept for evaluation

LOREM = ("Lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt "
         "ut labore et dolore magna aliqua").split()


@dataclass(frozen=True)
class Source:
    """Records with the place of each, and a digest that changes when the data change.

    raw_records: as read. A line of JSON is still bytes: most ranks of a stream only pass it by.
    """

    raw_records: Callable[[], Iterator[tuple[str, dict | bytes]]]
    digest: Callable[[], str]

    def records(self) -> Iterator[tuple[str, dict]]:
        return ((place, parse_record(raw, place)) for place, raw in self.raw_records())

    def rows(self) -> Iterator[Row]:
        """Rows one at a time, so that a large file is never held as Python objects."""
        return (parse_row(raw, place) for place, raw in self.raw_records())


def parse_row(raw: dict | bytes, place: str) -> Row:
    """The row of a raw record; ValueError names its place."""
    return row_from_record(parse_record(raw, place), place)


def parse_record(raw: dict | bytes, place: str) -> dict:
    """A raw record as an object; a line of JSON has the place "path:line"."""
    if not isinstance(raw, bytes): return raw
    path, _, line = place.rpartition(":")
    return _parse_json(raw, Path(path), int(line))


def read_rows(dataset: str | Path | list, *, split: str = "train", samples: int | None = None,
              seed: int = 42, dummy_words: int = 1024) -> list[Row]:
    """All rows of `dataset` in file order.

    dataset: a .jsonl, .json or .parquet file, a list of files, a folder or glob of them, a folder
        written by `datasets`, a name on the Hugging Face hub, or one of NAMES.
    samples: keep this many rows, drawn by `seed` (the first ones for alpaca_sample; the number of
        rows made for dummy, 512 if None). All rows if there are fewer.
    dummy_words: length of each row of dummy.
    Raises ValueError, in one line, for anything missing or malformed.
    """
    source = open_source(dataset, split=split, samples=samples, seed=seed, dummy_words=dummy_words)
    return list(source.rows())


def open_source(dataset, *, split: str = "train", samples: int | None = None, seed: int = 42,
                dummy_words: int = 1024, streaming: bool = False) -> Source:
    """The `Source` behind `read_rows`, whose records are not read yet.

    dataset: as in `read_rows`, or a Dataset or IterableDataset of `datasets`.
    streaming: take a data set of the hub row by row, instead of fetching it first.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"--dataset_samples {samples}: give a number of rows above 0")
    if dataset == "dummy": return _dummy_source(samples or 512, dummy_words)
    source = _whole_source(dataset, split, seed, streaming)
    if samples is None: return source
    draw = _first if dataset == "alpaca_sample" else _sample
    return Source(lambda: draw(source.raw_records(), samples, seed), source.digest)


def _whole_source(dataset, split: str, seed: int, streaming: bool) -> Source:
    if isinstance(dataset, list):
        return _file_source([path for part in dataset for path in find_files(part, split)])
    if not isinstance(dataset, str | Path): return _arrow_source(dataset, "dataset")
    if dataset == "text_to_sql": return _file_source(_bundled_files(split))
    if dataset in HUB_IDS: return _named_hub_source(dataset, split, seed, streaming)
    if _is_saved_by_datasets(dataset): return _disk_source(dataset, split)
    if _looks_like_hub_name(dataset): return _hub_source(str(dataset), split, streaming)
    return _file_source(find_files(dataset, split))


def _dummy_source(num_rows: int, num_words: int) -> Source:
    """Rows of equal length for benchmarks; they differ in the word they start with."""
    def records():
        for number in range(num_rows):
            words = (LOREM[(number + i) % len(LOREM)] for i in range(num_words))
            yield f"dummy:{number + 1}", {"text": " ".join(words)}
    return Source(records, lambda: f"dummy-{num_rows}-{num_words}")


def _first(records: Iterator, samples: int, seed: int) -> Iterator:
    return islice(records, samples)


def _sample(records: Iterator, samples: int, seed: int) -> Iterator:
    """`samples` records drawn without replacement in one pass (reservoir), in their old order."""
    rng = random.Random(seed)
    kept = []
    for number, record in enumerate(records):
        if number < samples: kept.append((number, record))
        elif (place := rng.randrange(number + 1)) < samples: kept[place] = (number, record)
    return (record for _, record in sorted(kept, key=lambda pair: pair[0]))


# ---- files ----------------------------------------------------------------------------------

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


def _bundled_files(split: str) -> list[Path]:
    if split not in ("train", "heldout"):
        raise ValueError(f"--dataset_split {split}: text_to_sql has the splits train and heldout")
    file = importlib.resources.files("fsdp_qlora") / "demo" / f"text_to_sql_{split}.jsonl"
    return [Path(str(file))]


def _file_source(files: list[Path]) -> Source:
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
    parquet = _import_for_data("pyarrow.parquet", path)
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", record
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ValueError(f"{path}: not readable as parquet after row {number} "
                         f"({_first_line(error)}); download or export it again") from None


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
    records = _parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8), path, first_line=1)
    return ((f"{path}: element {number}", record) for number, record in enumerate(records, 1))


def _parse_json(data: bytes, path: Path, first_line: int):
    """json.loads whose faults are one line: the place, what is wrong, what to do.

    NaN passes, as in Python; in a field that is used it is then reported as not being text.
    """
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; convert the "
                         f"file, say: iconv -f ISO-8859-1 -t UTF-8 {path.name}") from None
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"{path}:{line}: column {error.colno}: {_json_fault(error)}") from None


def _json_fault(error: json.JSONDecodeError) -> str:
    if error.msg.startswith("Unterminated string"):
        return ("the line ends inside a string, as with a raw newline; "
                "write it as \\n (json.dumps does)")
    if error.msg.startswith("Invalid control character"):
        return ("a raw newline, tab or other control character inside a string; "
                "write it as \\n or \\t (json.dumps does)")
    if error.msg.startswith("Extra data"):
        return "more follows after the record; write one JSON object a line"
    return f"not JSON ({error.msg}); write one JSON object a line, or one list in a .json file"


# ---- the hub --------------------------------------------------------------------------------

def _looks_like_hub_name(dataset: str | Path) -> bool:
    """owner/name or name, with nothing of that name here and no suffix of a file."""
    return (isinstance(dataset, str) and not Path(dataset).expanduser().exists()
            and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", dataset) is not None
            and not dataset.endswith(SUFFIXES))


def _is_saved_by_datasets(dataset: str | Path) -> bool:
    folder = Path(dataset).expanduser()
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _disk_source(folder: str | Path, split: str) -> Source:
    """A folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    loaded = _import_for_data("datasets", folder).load_from_disk(str(folder))
    if isinstance(loaded, dict):
        if split not in loaded:
            raise ValueError(f"--dataset_split {split}: {folder} has the splits "
                             f"{', '.join(loaded)}")
        loaded = loaded[split]
    return _arrow_source(loaded, str(folder))


def _hub_source(name: str, split: str, streaming: bool) -> Source:
    return _arrow_source(_load_from_hub(name, split, name, streaming), name)


def _named_hub_source(name: str, split: str, seed: int, streaming: bool) -> Source:
    """The data sets of the first fsdp_qlora, prepared as there."""
    hub_id = HUB_IDS[name]
    if name == "sql":  # fetched whole: its splits are made by a shuffle of all rows
        shuffled = _load_from_hub(hub_id, "validation", name).shuffle(seed=seed)
        cut = min(SQL_HELDOUT_ROWS, len(shuffled))
        rows = range(cut, len(shuffled)) if split == "train" else range(cut)
        return _arrow_source(shuffled.select(rows), name)
    source = _arrow_source(_load_from_hub(hub_id, split, name, streaming), name)
    if name != "guanaco": return source
    return Source(lambda: ((place, guanaco_record(record)) for place, record in source.records()),
                  source.digest)


def guanaco_record(record: dict) -> dict:
    """Guanaco writes a conversation as one text of "### Human: ..." and "### Assistant: ..."."""
    pieces = re.split(r"(?:^|\n?)### (Human|Assistant): ?", record["text"])
    roles = {"Human": "user", "Assistant": "assistant"}
    return {"messages": [{"role": roles[role], "content": content.strip()}
                         for role, content in zip(pieces[1::2], pieces[2::2], strict=True)]}


def _load_from_hub(hub_id: str, split: str, dataset: str, streaming: bool = False):
    datasets = _import_for_data("datasets", dataset)
    with asked_hub() as unreachable:
        try:
            return datasets.load_dataset(hub_id, split=split, **{"streaming": True} if streaming else {})
        except Exception as error:  # no network, unknown name, unknown split, a gated repository
            missing = "no such file or folder here, and " if dataset == hub_id else ""
            if unreachable:
                raise ValueError(f"--dataset {dataset}: {missing}{unreachable}, and it is not in the "
                                 f"cache; give a file, a folder or one of {', '.join(NAMES)}, or, where "
                                 f"there is a network, fetch it with `hf download {hub_id} --repo-type "
                                 "dataset --local-dir FOLDER`") from error
            raise ValueError(f"--dataset {dataset}: {missing}{hub_id} (split {split}) could not be "
                             f"loaded from the Hugging Face hub: {_first_line(error)}; check the name, "
                             f"the split and the network, or use a file or one of {', '.join(NAMES)}"
                             ) from error


def _arrow_source(data, name: str) -> Source:
    # The fingerprint follows the hub's commit and every shuffle and select.
    return Source(lambda: ((f"{name}: row {number}", record)
                           for number, record in enumerate(data, 1)),
                  lambda: str(data._fingerprint))


def _import_for_data(module: str, dataset: str | Path):
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(f"--dataset {dataset} needs the package {module.partition('.')[0]}; "
                         "run: pip install fsdp_qlora[data]") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
