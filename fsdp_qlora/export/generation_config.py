"""generation_config.json of a saved model: its base's settings, and a stop at the trained end tokens.

A base model may know no end of a turn at all (<|endoftext|> alone), and a chat model's stops may stand
in this file only. Without it, or without the token that answers were trained to end with, whoever
generates from the folder never stops.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from ..data import stop_token_ids
from ..json_input import read_object
from ..loading.generation_config import GENERATION_FILE, read_generation_settings

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_generation_settings(model: nn.Module, folder: Path):
    """The generation settings of a model, unchecked: some bases have those that can't be combined."""
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        (folder / GENERATION_FILE).write_text(settings.to_json_string(), encoding="utf-8")


def stop_at_trained_ends(folder: Path, tokenizer):
    """Add the tokens that end an answer to the stops of a model folder; its other settings stay."""
    settings = read_generation_settings(folder)
    if not settings:  # transformers then takes these from the model's configuration
        config = read_object(folder / "config.json")
        settings = {name: config[name] for name in _TOKEN_IDS if config.get(name) is not None}
    known = settings.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    ends = stop_token_ids(tokenizer) if tokenizer.is_fast else [tokenizer.eos_token_id]
    added = [token for token in ends if token not in known and token is not None]
    if not added:
        return
    stops = known + added
    settings["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    (folder / GENERATION_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
