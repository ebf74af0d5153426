"""Trained weights and the optimizer's states of a sharded model, in the folders of other trainers.

Each rank writes its own rows of the states, so nothing is gathered, and they load on any number of ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..checkpoint.tensors import (
    RowFiles,
    load_optimizer_into,
    optimizer_rows,
    rank_file,
    write_rows,
)
from ..dist import ranks_from_env
from ..export.save import load_adapter
from ..loading import load_weights
from ..loading.key_mapping import match_names
from ..loading.weight_files import Checkpoint
from ..model.wrappers import wrapper_of


def save_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer):
    """Write this rank's rows of the states; every rank must call it.

    A folder that more ranks wrote before keeps nothing of theirs: their rows would be read as this run's.
    """
    ranks = ranks_from_env()
    folder.mkdir(parents=True, exist_ok=True)  # rank 0 may not have come to it
    write_rows(rank_file(folder, ranks.rank), optimizer_rows(model, optimizer))
    if ranks.is_main:
        own = {rank_file(folder, rank) for rank in range(ranks.world_size)}
        for path in set(folder.glob("rank-*.safetensors")) - own:
            path.unlink()


def check_saved(given: str, trained: Path, states: Path):
    """Refuse weights and states of which a file is missing or cut, as a save that was ended leaves them.

    given: what the user named, for the message. Every rank looks at all files, before anything is loaded, so
    that all say the same. Raises ValueError.
    """
    weights, rows = sorted(trained.glob("*.safetensors")), sorted(states.glob("rank-*.safetensors"))
    for path in (*weights, *rows):
        try:
            safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise _damaged(given, f"{path} is not a whole file: {error}") from error
    for what, files in (
        (trained / "*.safetensors", weights),
        (states / "rank-*.safetensors", rows),
    ):
        if not files:
            raise _damaged(given, f"{what} is missing")
    if name := RowFiles(rows).lacks_rows():
        raise _damaged(given, f"{states} lacks the file of a rank, which has rows of {name}")


def _damaged(given: str, what: str) -> ValueError:
    return ValueError(
        f"{given}: {what}; its save was cut off or a file was lost, so give a folder that is whole"
    )


def load_optimizer(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer):
    """Fill the states with this rank's rows of what any number of ranks wrote in the folder."""
    files = RowFiles(sorted(folder.glob("rank-*.safetensors")))
    load_optimizer_into(model, optimizer, files)


def load_trained(folder: str | Path, model: nn.Module, device: torch.device):
    """Fill a model's adapters, or all its weights, from what `save_trained` wrote."""
    if hasattr(model, "peft_config"):
        load_adapter(model, folder)
    else:
        load_weights(model, _saved_whole(folder, model), device)


def _saved_whole(folder: str | Path, model: nn.Module) -> Checkpoint:
    """Whole weights that `save_trained` wrote, by the model's names; towers stay in the files of before."""
    wrapper = wrapper_of(model)
    before = wrapper and (wrapper.files, wrapper.others)
    saved = match_names(model, Checkpoint(folder))
    if wrapper:
        wrapper.files, wrapper.others = before
    return saved
