"""A tokenizer's files as servers and converters of any age read them.

transformers 5 names its own class for tokenizers that have none of a model's, and lists special tokens under
a name that transformers 4 takes for something else; vLLM, llama.cpp and MLX ended on both:
https://github.com/huggingface/transformers/issues/47553. The older names mean the same to transformers 5.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..json_input import read_object

_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
_NAMES = {"extra_special_tokens": "additional_special_tokens"}
_OF_THIS_MACHINE = ("is_local", "local_files_only")  # how this process has loaded it


def save_tokenizer(tokenizer: ProcessorMixin | PreTrainedTokenizerBase, folder: Path):
    """Write a tokenizer into a folder, with names that transformers 4 and 5 read."""
    tokenizer.save_pretrained(folder)
    use_older_names(folder)


def use_older_names(folder: Path):
    """Let transformers 4 read a folder's tokenizer too; one without a tokenizer stays as it is."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    config = {k: v for k, v in read_object(path).items() if k not in _OF_THIS_MACHINE}
    if (kind := config.get("tokenizer_class")) in _CLASSES:
        config["tokenizer_class"] = _CLASSES[kind]
    if isinstance(config.get("extra_special_tokens"), list):  # a dict is transformers 4's own
        config = {_NAMES.get(name, name): value for name, value in config.items()}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
