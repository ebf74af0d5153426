"""The files of a model folder beside its weights: config.json, tokenizer, generation settings."""
from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from ..reading import read_object

# By name only: no weights, no code, nothing else that happens to lie in the folder.
TOKENIZER_FILES = ("tokenizer*.json", "*.model", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "vocab.txt", "merges.txt", "chat_template.*",
                   "additional_chat_templates")
OTHER_FILES = ("generation_config.json", "LICENSE*", "USE_POLICY*")


def write_other_files(folder: Path, base: Path, adapter: str | Path | None, settings: dict):
    """All files but the weights: the base's, with the tokenizer that the adapter was trained with.

    `settings` are entries of config.json that change; one that is None is taken out.
    """
    write_config(folder, base, settings)
    for file in matching(base, (*TOKENIZER_FILES, *OTHER_FILES)): copy(file, folder)
    if adapter:
        for file in matching(Path(adapter), TOKENIZER_FILES): copy(file, folder)


def write_config(folder: Path, base: Path, settings: dict):
    """The base's config.json, as it is but for `settings`."""
    config = read_object(base / "config.json")
    if "torch_dtype" in config and "dtype" in settings: config["torch_dtype"] = settings["dtype"]
    config.pop("_name_or_path", None)
    config |= settings
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k not in settings or v is not None}, indent=2))


def matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """Files and folders of `folder` with such names."""
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in patterns): yield path


def copy(path: Path, folder: Path):
    """Copy a file or a folder into `folder`, over what is there; links are followed."""
    if path.is_dir(): shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
    else: shutil.copyfile(path, folder / path.name)
