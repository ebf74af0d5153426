"""accelerate's `save_state` and `load_state` for a sharded model.

accelerate writes what rank 0 has of weights and optimizer states, which is its shards. So both are taken
out of what it saves: weights lie beside it in `model`, as `save_trained` writes them, and each rank's rows
of the optimizer's states in `optimizer`. Random states, schedulers, data loaders and registered objects
stay accelerate's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor

from ..dist import each_writes
from ..export import save_trained
from ..sharding import is_placed
from .states import check_saved, load_optimizer, load_trained, save_optimizer

_MODEL, _OPTIMIZER, _RATES = "model", "optimizer", "rates.json"


@cache
def register_with_accelerate() -> None:
    """Have every `Accelerator` save and load sharded models from now on, in this process."""
    for name, replaced in [
        ("save_state", _save_state),
        ("load_state", _load_state),
        ("save_model", _save_model),
        ("get_state_dict", _get_state_dict),
    ]:
        setattr(Accelerator, name, _wrapped(getattr(Accelerator, name), replaced))


def _wrapped(original: Callable, replaced: Callable) -> Callable:
    @wraps(original)
    def call(self: Accelerator, *args: Any, **kwargs: Any):
        return replaced(original, self, *args, **kwargs)

    return call


def _save_state(save: Callable, self: Accelerator, output_dir: str | None = None, *args, **kwargs):
    with _taken_out(self) as taken:
        folder = save(self, output_dir, *args, **kwargs)
    if taken is None:
        return folder
    model, optimizer = taken
    save_trained(model, Path(folder) / _MODEL)
    if optimizer is not None:
        states = Path(folder) / _OPTIMIZER
        with each_writes():
            save_optimizer(states, model, optimizer)
            if self.is_main_process:
                (states / _RATES).write_text(json.dumps([g["lr"] for g in optimizer.param_groups]))
    self.wait_for_everyone()
    return folder


def _load_state(load: Callable, self: Accelerator, input_dir: str | None = None, *args, **kwargs):
    with _taken_out(self) as taken:
        if taken is not None:
            input_dir = str(_folder_of_state(self, input_dir))
        load(self, input_dir, *args, **kwargs)
    if taken is None:
        return
    model, optimizer = taken
    states = Path(input_dir) / _OPTIMIZER
    if optimizer is not None:
        check_saved(f"accelerator.load_state: {input_dir}", Path(input_dir) / _MODEL, states)
    load_trained(Path(input_dir) / _MODEL, model, self.device)
    if optimizer is not None:
        load_optimizer(states, model, optimizer)
        rates = json.loads((states / _RATES).read_text())
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _folder_of_state(self: Accelerator, given: str | None) -> Path:
    """The folder to load, checked before anything is; None is the newest that accelerate named."""
    if given is None and self.project_configuration.automatic_checkpoint_naming:
        folders = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
        given = max(folders, key=lambda folder: int(folder.name.rpartition("_")[2]), default="none")
    folder = Path(given or "none")
    if not (folder / _MODEL).is_dir():
        raise ValueError(
            f"accelerator.load_state: {folder} has no folder {_MODEL!r}, for it was not saved from a model "
            "that shard_and_load has sharded; give a folder that accelerator.save_state wrote with one, or "
            "load the weights before shard_and_load"
        )
    return folder


@contextmanager
def _taken_out(
    self: Accelerator,
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer | None] | None]:
    """Without the model of ours and its optimizer among accelerate's objects; gives both, if there is one."""
    models = [model for model in self._models if is_placed(model)]
    if not models:
        yield None
        return
    model = models[0]
    owned = {id(p) for p in model.parameters()}
    of_model = [o for o in self._optimizers if any(id(p) in owned for p in _parameters(o))]
    if len(models) > 1 or len(of_model) > 1:
        raise ValueError(
            "accelerator: a state holds one sharded model with one optimizer, and there are "
            f"{len(models)} with {len(of_model)}; save each with save_trained(model, folder)"
        )
    before = self._models, self._optimizers
    self._models = [m for m in self._models if m is not model]
    self._optimizers = [o for o in self._optimizers if o not in of_model]
    try:
        yield model, of_model[0].optimizer if of_model else None
    finally:
        self._models, self._optimizers = before


def _parameters(optimizer: Any) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _save_model(save: Callable, self: Accelerator, model: nn.Module, *args, **kwargs):
    if is_placed(model):
        raise ValueError(
            "accelerator.save_model writes what one rank has of a sharded model; call "
            "save_trained(model, folder) on every rank"
        )
    return save(self, model, *args, **kwargs)


def _get_state_dict(get: Callable, self: Accelerator, model: nn.Module, *args, **kwargs):
    if is_placed(model) and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            "accelerator.get_state_dict gives a rank's shards of this model; call "
            "save_trained(model, folder) or save_adapter(model, folder) on every rank to save it"
        )
    return get(self, model, *args, **kwargs)
