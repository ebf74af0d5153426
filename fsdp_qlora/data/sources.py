"""Where rows come from: files, folders, the Hugging Face hub, and names known by heart."""

from __future__ import annotations

import hashlib
import importlib.resources
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from .files import describe_files, file_source, find_files, would_read
from .formats import Row
from .hub_datasets import (
    arrow_source,
    disk_source,
    hub_source,
    is_saved_by_datasets,
    looks_like_hub_name,
    named_hub_source,
)
from .records import HUB_IDS, Source

SAMPLED_NAMES = ("alpaca_sample", "dummy", "orca_math")  # those that --dataset_samples is meant for

_LOREM = (
    "Lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt "
    "ut labore et dolore magna aliqua"
).split()


def read_rows(
    dataset: str | Path | list,
    *,
    split: str = "train",
    samples: int | None = None,
    seed: int = 42,
    dummy_words: int = 1024,
    weight_column: str | None = None,
) -> list[Row]:
    """All rows of `dataset` in file order.

    dataset: a .jsonl, .json, .csv, .tsv or .parquet file, a list of files, a folder or glob of them, a
        folder written by `datasets`, a name on the Hugging Face hub, one of NAMES, or several of these
        joined by commas, each with a limit and a weight if wanted: `a.jsonl*2,b.csv[:1000]`.
    samples: keep this many rows, drawn by `seed` (the first ones for alpaca_sample; the number of
        rows made for dummy, 512 if None). All rows if there are fewer.
    dummy_words: length of each row of dummy.
    weight_column: the key of each record that holds its weight.
    Raises ValueError, in one line, for anything missing or malformed.
    """
    source = open_source(
        dataset,
        split=split,
        samples=samples,
        seed=seed,
        dummy_words=dummy_words,
        weight_column=weight_column,
    )
    return list(source.rows())


def open_source(
    dataset,
    *,
    split: str = "train",
    samples: int | None = None,
    seed: int = 42,
    dummy_words: int = 1024,
    streaming: bool = False,
    weight_column: str | None = None,
) -> Source:
    """The `Source` behind `read_rows`, whose records are not read yet.

    dataset: as in `read_rows`, or a Dataset or IterableDataset of `datasets`.
    streaming: take a data set of the hub row by row, instead of fetching it first.
    """
    if samples is not None and samples < 1:
        raise ValueError(f"--dataset_samples {samples}: give a number of rows above 0")
    if dataset == "dummy":
        if split != "train":
            raise ValueError(f"--dataset_split {split}: dummy has no splits; leave it out")
        source, samples = _dummy_source(samples or 512, dummy_words), None
    else:
        source = _whole_source(dataset, split, seed, streaming)
    source = replace(source, weight_column=weight_column)
    if samples is None:
        return source
    draw = _first if dataset == "alpaca_sample" else _sample
    return replace(source, raw_records=lambda: draw(source.raw_records(), samples, seed))


def _whole_source(dataset, split: str, seed: int, streaming: bool) -> Source:
    """The source of all rows."""
    several = isinstance(dataset, str) and ("," in dataset or _PART.fullmatch(dataset))
    if several and not Path(dataset).expanduser().exists():
        return _joined(dataset, split, seed, streaming)
    if isinstance(dataset, list):
        parts = [(part, find_files(part, split)) for part in dataset]
        return file_source(
            [path for _, files in parts for path in files],
            tuple(line for part in parts for line in describe_files(*part)),
        )
    if not isinstance(dataset, str | Path):
        return arrow_source(dataset, "dataset")
    if dataset == "text_to_sql":
        return file_source(_bundled_files(split))
    if dataset in HUB_IDS:
        return named_hub_source(dataset, split, seed, streaming)
    if is_saved_by_datasets(dataset):
        return disk_source(dataset, split)
    if looks_like_hub_name(dataset):
        return hub_source(str(dataset), split, streaming)
    files = find_files(dataset, split)
    return file_source(files, describe_files(dataset, files))


def reads_from(dataset: str, split: str, folder: str | Path) -> bool:
    """Whether a data set, or one of several, would have what a run writes into `folder` among its rows."""
    names = [dataset] if Path(dataset).expanduser().exists() else dataset.split(",")
    found = [(_PART.fullmatch(name.strip()), name.strip()) for name in names]
    return any(
        would_read(part["name"] if part else name, split, Path(folder) / "metrics.jsonl")
        for part, name in found
        if not is_saved_by_datasets(part["name"] if part else name)
    )


# A name with [:N], its first N rows, and *W, how often an epoch has each of them; one at least.
_PART = re.compile(r"(?P<name>.+?)(?=[\[*])(\[:(?P<limit>\d+)\])?(\*(?P<weight>\d+(\.\d+)?))?")
_MOST_OFTEN = 1000


def _joined(datasets: str, split: str, seed: int, streaming: bool) -> Source:
    """Several data sets, one after the other: `a.jsonl*2,org/name[:1000]*0.5`.

    An epoch has each row of the first twice, and half of the first 1,000 rows of the second.
    """
    parts = []
    for name in map(str.strip, datasets.split(",")):
        if not name:
            raise ValueError(
                f"--dataset {datasets}: a name is missing between two commas; remove one"
            )
        found = _PART.fullmatch(name)
        source = _whole_source(found["name"].rstrip() if found else name, split, seed, streaming)
        limit, weight = (found["limit"], float(found["weight"] or 1)) if found else (None, 1.0)
        if not 0 < weight <= _MOST_OFTEN:
            raise ValueError(
                f"--dataset {name}: *{weight:g} says how often an epoch has each row; give a number "
                f"above 0 and up to {_MOST_OFTEN}, or leave the data set out"
            )
        parts.append((source, int(limit) if limit else None, weight))

    def records():
        for source, limit, weight in parts:
            yield from _as_often(islice(source.raw_records(), limit), weight, seed)

    def digest():
        each = "".join(f"{source.digest()}{limit}*{weight:g}" for source, limit, weight in parts)
        return hashlib.sha256(each.encode()).hexdigest()

    return Source(records, digest, tuple(line for source, *_ in parts for line in source.files))


def _as_often(records: Iterator, weight: float, seed: int) -> Iterator:
    """Records, each `weight` times: of a fraction, as many as a draw by number and seed gives.

    Ranks and later runs draw the same ones, without knowing how many there are.
    """
    times, rest = divmod(weight, 1)
    for number, record in enumerate(records):
        draw = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
        more = int.from_bytes(draw, "big") < rest * 2**64
        yield from [record] * (int(times) + more)


def _bundled_files(split: str) -> list[Path]:
    """The files of text_to_sql."""
    if split not in ("train", "heldout"):
        raise ValueError(f"--dataset_split {split}: text_to_sql has the splits train and heldout")
    file = importlib.resources.files("fsdp_qlora") / "demo" / f"text_to_sql_{split}.jsonl"
    return [Path(str(file))]


def _dummy_source(num_rows: int, num_words: int) -> Source:
    """Rows of equal length for benchmarks; they differ in the word they start with."""

    def records():
        for number in range(num_rows):
            words = (_LOREM[(number + i) % len(_LOREM)] for i in range(num_words))
            yield f"dummy:{number + 1}", {"text": " ".join(words)}

    return Source(records, lambda: f"dummy-{num_rows}-{num_words}")


def _first(records: Iterator, samples: int, seed: int) -> Iterator:
    """The first records, in their order."""
    return islice(records, samples)


def _sample(records: Iterator, samples: int, seed: int) -> Iterator:
    """`samples` records drawn without replacement, in their old order."""
    return iter(reservoir(records, samples, seed)[0])


def reservoir(records: Iterator, samples: int, seed: int) -> tuple[list, int]:
    """`samples` records drawn in one pass, in their old order; and how many there are in all."""
    rng = random.Random(seed)
    kept, number = [], -1
    for number, record in enumerate(records):
        if number < samples:
            kept.append((number, record))
        elif (place := rng.randrange(number + 1)) < samples:
            kept[place] = (number, record)
    return [record for _, record in sorted(kept, key=lambda pair: pair[0])], number + 1
