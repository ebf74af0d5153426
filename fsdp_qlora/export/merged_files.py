"""The files of a model folder beside its weights: config.json, tokenizer, generation settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from transformers import AutoTokenizer

from ..json_input import read_object
from ..loading import Checkpoint, first_line
from .config_file import with_older_names
from .generation_config import stop_at_trained_ends
from .tokenizer_files import use_older_names

# By name only: no weights, no code, nothing else that happens to lie in the folder.
TOKENIZER_FILES = (
    "tokenizer*.json",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
    "additional_chat_templates",
)
_TEMPLATE_FILES = ("chat_template.*", "additional_chat_templates")
# Of a tokenizer's files these speak for the whole, so those of two tokenizers must not lie together.
_OLDER_FILES = ("special_tokens_map.json", "added_tokens.json")
# How images and sound become a model's input, which its towers need.
PROCESSOR_FILES = ("*processor_config.json",)
_OF_THE_TEXT = ("vocab_size", "tie_word_embeddings")  # settings that its own config.json has
OTHER_FILES = ("generation_config.json", "LICENSE*", "USE_POLICY*", *PROCESSOR_FILES)


def write_other_files(folder: Path, base: Path, adapter: str | Path | None, settings: dict):
    """All files but the weights: the base's, with the tokenizer that the adapter was trained with.

    That tokenizer's chat template is the only one in the folder, in whichever file it lies, and
    generation stops at the token that ends its answers. `settings` are entries of config.json that
    change; one that is None is taken out.
    """
    _write_config(folder, base, settings)
    tokenizer_files = list(_matching(Path(adapter), TOKENIZER_FILES)) if adapter else []
    names = {file.name for file in tokenizer_files}
    has_own_template = _brings_template(tokenizer_files)
    left_out = (_TEMPLATE_FILES if has_own_template else ()) + (
        _OLDER_FILES if "tokenizer.json" in names else ()
    )
    for file in _matching(base, (*TOKENIZER_FILES, *OTHER_FILES)):
        if not any(fnmatch(file.name, pattern) for pattern in left_out):
            copy(file, folder)
    if has_own_template and "tokenizer_config.json" not in names:
        _drop_inline_template(folder)
    for file in tokenizer_files:
        copy(file, folder)
    if "tokenizer_config.json" in names:
        use_older_names(folder)  # of an adapter from elsewhere
        _stop_at_ends_of(folder)


def copy_processor(base: Checkpoint | None, folder: Path):
    """Copy what a base has to read images and sound, if there is a base with such files."""
    for file in _matching(base.folder, PROCESSOR_FILES) if base else ():
        copy(file, folder)


def _brings_template(tokenizer_files: list[Path]) -> bool:
    """Whether an adapter says how it is asked: by a chat template, or a tokenizer that has none."""
    return any(
        file.name == "tokenizer_config.json" or fnmatch(file.name, pattern)
        for file in tokenizer_files
        for pattern in _TEMPLATE_FILES
    )


def _drop_inline_template(folder: Path):
    """Take the base's template out of its tokenizer_config.json, where the adapter has a file for it."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    config = read_object(path)
    if config.pop("chat_template", None) is not None:
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _stop_at_ends_of(folder: Path):
    """Let generation stop where the tokenizer of a merged folder says that answers end."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        print(
            f"warning: the adapter's tokenizer can't be loaded ({first_line(error)}), so "
            "generation_config.json gets no additional stop tokens"
        )
        return
    stop_at_trained_ends(folder, tokenizer)


def _write_config(folder: Path, base: Path, settings: dict):
    """The base's config.json, as it is but for `settings`, with names that transformers 4 reads."""
    config = read_object(base / "config.json")
    config.pop("_name_or_path", None)
    text = config.get("text_config")
    if isinstance(text, dict):  # of a language model inside of another
        if "quantization_config" in settings:
            text.pop("quantization_config", None)
        text |= {name: value for name, value in settings.items() if name in _OF_THE_TEXT}
        settings = {k: v for k, v in settings.items() if k != "vocab_size" or k in config}
    config = {k: v for k, v in (config | settings).items() if k not in settings or v is not None}
    (folder / "config.json").write_text(
        json.dumps(with_older_names(config), indent=2), encoding="utf-8"
    )


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """Files and folders of `folder` with such names."""
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in patterns):
            yield path


def copy(path: Path, folder: Path):
    """Copy a file or a folder into `folder`, over what is there; links are followed."""
    if path.is_dir():
        shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
    else:
        shutil.copyfile(path, folder / path.name)
