"""Data sets of the Hugging Face hub, and folders that `datasets` wrote.

`datasets` is imported only when one of them is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from ..hub import asked_hub
from .files import SUFFIXES
from .records import HUB_IDS, NAMES, Source, first_line, import_for_data, without_filled_nulls

_SQL_HELDOUT_ROWS = 1000  # the first rows of the shuffled know_sql were kept for evaluation


def looks_like_hub_name(dataset: str | Path) -> bool:
    """owner/name or name, with nothing of that name here and no suffix of a file."""
    return (
        isinstance(dataset, str)
        and not Path(dataset).expanduser().exists()
        and re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", dataset) is not None
        and not dataset.lower().endswith(SUFFIXES)
    )


def is_saved_by_datasets(dataset: str | Path) -> bool:
    """True for a folder written by `save_to_disk`."""
    folder = Path(dataset).expanduser()
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def disk_source(folder: str | Path, split: str) -> Source:
    """A folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    datasets = import_for_data("datasets", folder)
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged file, a missing one, a kind of column of a later version
        raise ValueError(
            f"--dataset {folder}: datasets {datasets.__version__} can't read what was saved there "
            f"({first_line(error)}); save it again, or upgrade: pip install -U datasets"
        ) from error
    if isinstance(loaded, dict):
        if split not in loaded:
            raise ValueError(
                f"--dataset_split {split}: {folder} has the splits {', '.join(loaded)}"
            )
        loaded = loaded[split]
    elif split not in ("train", str(loaded.split)):
        raise ValueError(
            f"--dataset_split {split}: {folder} is a single data set without splits; give the folder of "
            "that split as --dataset, or save a DatasetDict"
        )
    return arrow_source(loaded, str(folder))


def hub_source(name: str, split: str, streaming: bool) -> Source:
    """A data set by its name on the hub."""
    return arrow_source(_load_from_hub(name, split, name, streaming), name)


def named_hub_source(name: str, split: str, seed: int, streaming: bool) -> Source:
    """The data sets of the first fsdp_qlora, prepared as there."""
    hub_id = HUB_IDS[name]
    if name == "sql":  # fetched whole: its splits are made by a shuffle of all rows
        shuffled = _load_from_hub(hub_id, "validation", name).shuffle(seed=seed)
        cut = min(_SQL_HELDOUT_ROWS, len(shuffled))
        rows = range(cut, len(shuffled)) if split == "train" else range(cut)
        return arrow_source(shuffled.select(rows), name)
    source = arrow_source(_load_from_hub(hub_id, split, name, streaming), name)
    if name != "guanaco":
        return source
    return Source(
        lambda: ((place, _guanaco_record(record)) for place, record in source.records()),
        source.digest,
    )


def _guanaco_record(record: dict) -> dict:
    """Guanaco writes a conversation as one text of "### Human: ..." and "### Assistant: ..."."""
    pieces = re.split(r"(?:^|\n?)### (Human|Assistant): ?", record["text"])
    roles = {"Human": "user", "Assistant": "assistant"}
    return {
        "messages": [
            {"role": roles[role], "content": content.strip()}
            for role, content in zip(pieces[1::2], pieces[2::2], strict=True)
        ]
    }


def _load_from_hub(hub_id: str, split: str, dataset: str, streaming: bool = False):
    datasets = import_for_data("datasets", dataset)
    with asked_hub() as unreachable:
        try:
            return datasets.load_dataset(
                hub_id, split=split, **{"streaming": True} if streaming else {}
            )
        except Exception as error:  # no network, unknown name, unknown split, a gated repository
            missing = "no such file or folder here, and " if dataset == hub_id else ""
            if unreachable:
                raise ValueError(
                    f"--dataset {dataset}: {missing}{unreachable}, and it is not in the cache; give a file, "
                    f"a folder or one of {', '.join(NAMES)}, or download it on a machine with a network: "
                    f"`hf download {hub_id} --repo-type dataset --local-dir FOLDER`"
                ) from error
            raise ValueError(
                f"--dataset {dataset}: {missing}{hub_id} (split {split}) could not be "
                f"loaded from the Hugging Face hub: {first_line(error)}; check the name, "
                f"the split and the network, or use a file or one of {', '.join(NAMES)}"
            ) from error


def arrow_source(data, name: str) -> Source:
    """A data set as `datasets` has it, but for images, sound and the like, which stay undecoded."""
    # The fingerprint follows the hub's commit and every shuffle and select.
    return Source(lambda: _arrow_records(data, name), lambda: str(data._fingerprint))


def _arrow_records(data, name: str) -> Iterator[tuple[str, dict]]:
    media = [
        column
        for column, kind in (getattr(data, "features", None) or {}).items()
        if _is_media(kind)
    ]
    if media and hasattr(data, "decode"):  # a stream
        data, media = data.decode(False), []
    undecoded, number = dict.fromkeys(media, "not decoded"), 0
    try:
        for number, record in enumerate(data.remove_columns(media) if media else data, 1):
            yield f"{name}: row {number}", without_filled_nulls(record) | undecoded
    except Exception as error:  # whatever a file, a decoder or a connection gives
        raise ValueError(
            f"--dataset {name}: row {number + 1} can't be read ({first_line(error)}); download or save "
            "the data set again"
        ) from error


def _is_media(kind) -> bool:
    """Whether a column needs a decoder, as images do, at any depth."""
    if isinstance(kind, dict | list | tuple):
        return any(map(_is_media, kind.values() if isinstance(kind, dict) else kind))
    inner = getattr(kind, "feature", None)
    return hasattr(kind, "decode") if inner is None else _is_media(inner)
