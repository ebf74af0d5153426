"""What a run is made from, as hashes: its base, its rows, its tokenizer.

A checkpoint keeps them, so that it is never resumed with others; and every rank must start from the
same, for each reads its own files. Paths may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from ..config.settings import shown
from ..data import Source, Subset, TokenizedDataset
from ..dist import gather_over_ranks
from ..loading import Checkpoint, checkpoint_folder
from ..loading.weight_files import fingerprint

DataRows = TokenizedDataset | Subset

# What the kinds of content are called, by the flag that names them.
KINDS = {
    "model": ("model_name", "another model"),
    "sample": ("model_name", "other weights"),
    "weights": ("model_name", "other weights"),
    "data": ("dataset", "other rows"),
    "held_out": ("eval_dataset", "other held-out rows"),
    "tokenizer": ("model_name", "another tokenizer"),
}


def content_of(
    config: RunConfig,
    dataset: DataRows | Source,
    held_out: DataRows | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, str]:
    """Hashes of the rows, the tokenizer, and the base as far as that is known before it is loaded."""
    found = {"model": "random", "data": dataset.digest()}
    if not config.random_weights:
        folder = checkpoint_folder(config.model_name, config.revision)
        found["model"] = _files_digest(folder)
        found["sample"] = fingerprint(Checkpoint(config.llama_pro_path or folder))
    if held_out is not None:
        found["held_out"] = held_out.digest()
    if tokenizer is not None:
        found["tokenizer"] = _tokenizer_digest(tokenizer)
    return found


def _files_digest(folder: str | Path) -> str:
    """Of config.json, the index, and the names and sizes of the weight files, which are not read."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*")):
        if path.name == "config.json" or path.name.endswith(".index.json"):
            digest.update(path.read_bytes())
        elif path.suffix == ".safetensors":
            digest.update(f"{path.name} {path.stat().st_size}".encode())
    return digest.hexdigest()


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of all that decides which tokens a text becomes."""
    how = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    parts = how, tokenizer.chat_template, tokenizer.special_tokens_map
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def check_same_on_every_rank(config: RunConfig, content: dict[str, str]):
    """Refuse ranks that were started with other settings, rows or weights; every rank must call it.

    Raises ValueError on each, naming the ranks that differ from rank 0.
    """
    settings = {
        f.name: shown(getattr(config, f.name)) for f in fields(config) if not f.metadata["per_rank"]
    }
    every = gather_over_ranks((settings, content))
    faults = [
        f"rank {rank}: {'; '.join(found)}"
        for rank, other in enumerate(every)
        if (found := list(unlike(every[0], other)))
    ]
    if not faults:
        return
    raise ValueError(
        f"{'. '.join(faults[:4])}; give every rank the same command and the same files"
    )


def unlike(first: tuple[dict, dict], other: tuple[dict, dict]) -> Iterable[str]:
    """What differs between (settings, content) of rank 0 and of another rank, in words."""
    for name, value in first[0].items():
        if other[0][name] != value:
            yield f"--{name} is {other[0][name]}, and {value} on rank 0"
    said = set()
    for kind in sorted(first[1].keys() | other[1].keys(), key=list(KINDS).index):
        flag, what = KINDS[kind]
        if first[1].get(kind) == other[1].get(kind) or flag in said:
            continue
        said.add(flag)
        yield (
            f"--{flag} holds {what} than on rank 0"
            if what[:5] == "other"
            else f"--{flag} is {what} than on rank 0"
        )
