"""Tokenised rows kept under a key: in a file of --data_cache, or in the memory of the ranks' node.

The key follows from all that the tokens do: the data, the tokenizer with its template, the options.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from . import node_share
from .cache import build_or_wait
from .records import first_line
from .tokenized import TokenizedDataset

_VERSION = 4  # raise it when the same input gives other tokens


def key_of(data_digest: str, tokenizer, options: list) -> str:
    """What rows of these data are kept under."""
    parts = [
        _VERSION,
        data_digest,
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        options,
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


def rows_in_folder(
    folder: str | Path,
    key: str,
    build: Callable[[], TokenizedDataset],
    *,
    is_writer: bool,
    timeout_s: float,
) -> TokenizedDataset:
    """The rows of a file of --data_cache, which one rank builds if it is missing or damaged (cache.py)."""

    def write(path: Path):
        rows = build()
        try:
            rows.save(path, key)
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"--data_cache {folder}: {first_line(error)}; free some space there, give another "
                "folder, or leave it out"
            ) from error

    return build_or_wait(
        Path(folder) / f"tokens-{key}.safetensors",
        write,
        lambda path: TokenizedDataset.load(path, key),
        is_writer=is_writer,
        timeout_s=timeout_s,
    )


def rows_of_node(
    share: str, key: str, build: Callable[[], TokenizedDataset], *, is_writer: bool
) -> TokenizedDataset:
    """What one rank of the node built (node_share.py); `build()` here where it can't be had."""
    name = f"fsdp_qlora-{hashlib.sha256(f'{share} {key}'.encode()).hexdigest()}"
    if not is_writer:
        found = node_share.read(name, lambda path: TokenizedDataset.load(path, key))
        return build() if found is None else found
    writer = node_share.writer_of(name)
    if writer is None:  # the others find none either
        return build()
    return TokenizedDataset.load(writer.write(lambda: build().to_bytes(key)), key)
