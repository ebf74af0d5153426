"""How the authors of a model would have it generate: the generation_config.json beside its weights."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import GenerationConfig

from ..json_input import read_object

GENERATION_FILE = "generation_config.json"


def read_generation_settings(folder: Path) -> dict:
    """The settings in a folder's generation_config.json; {} without one. ValueError names the file."""
    path = folder / GENERATION_FILE
    return read_object(path) if path.is_file() else {}


def keep_generation_settings(model: nn.Module, folder: Path | None):
    """Let a model have the generation settings that lie beside its weights, in place."""
    if folder is None or not (settings := read_generation_settings(folder)):
        return
    try:
        model.generation_config = GenerationConfig(**settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / GENERATION_FILE}: {error}; mend that file, or remove it"
        ) from error
