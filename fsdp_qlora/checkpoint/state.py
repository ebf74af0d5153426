"""What a run is made of, as far as a checkpoint must bring it back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..adapters import trainable_parameters
from ..adapters.peft_names import saved_name, saved_names
from ..data import StepSampler, StreamSampler
from ..dist import ranks_from_env
from ..observe.evaluate import Evaluator
from ..observe.metrics import EvalMetrics
from .folder import read_run
from .tensors import (
    RandomState,
    RowFiles,
    load_optimizer_into,
    load_weights_into,
    read_random_state,
)

ADAPTER = Path("adapter", "adapter_model.safetensors")


@dataclass
class Boundary:
    """The moment between two steps: what changes while the next one is prepared and run."""

    step: int  # optimizer steps done
    sampler: dict
    random: RandomState


class _Scaler(Protocol):
    """What a checkpoint asks of `training.loss_scaler.LossScaler`."""

    def state_dict(self) -> dict: ...

    def load_state_dict(self, state: dict): ...


@dataclass
class RunState:
    """The parts of a run that training changes."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR
    sampler: StepSampler | StreamSampler
    evaluator: Evaluator | None
    device: torch.device
    scaler: _Scaler | None = None  # of the loss, with fp16

    def boundary(self, step: int) -> Boundary:
        """Where the run is now, after `step` optimizer steps."""
        return Boundary(step, self.sampler.state_dict(), RandomState.now(self.device))

    def to_json(self, boundary: Boundary) -> dict:
        """All but the tensors, as run.json holds it."""
        return {
            "step": boundary.step,
            "sampler": boundary.sampler,
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "evaluator": _evaluator_to_json(self.evaluator),
        }

    def restore(self, folder: Path) -> Boundary:
        """Bring back a checkpoint, on any number of ranks; every rank must call it.

        Random states come back only on as many ranks as wrote them; on others they begin anew, and
        differ from those at the beginning of the run, whose masks would come again.
        """
        run, rank = read_run(folder), ranks_from_env().rank
        load_weights_into(self.model, *_saved_weights(self.model, folder))
        load_optimizer_into(self.model, self.optimizer, RowFiles(folder.glob("rank-*.safetensors")))
        self.scheduler.load_state_dict(run["scheduler"])
        for group, peak, share in zip(
            self.optimizer.param_groups,
            self.scheduler.base_lrs,
            self.scheduler.lr_lambdas,
            strict=True,
        ):
            group["lr"] = peak * share(self.scheduler.last_epoch)  # a run made longer has another
        if self.scaler:
            self.scaler.load_state_dict(run["scaler"])
        self.sampler.load_state_dict(run["sampler"])
        _evaluator_from_json(self.evaluator, run["evaluator"])
        if run["world_size"] == ranks_from_env().world_size:
            read_random_state(folder, rank).restore(self.device)
        else:
            torch.manual_seed(_seed_after(run["step"], torch.initial_seed()))
        return self.boundary(run["step"])


def _seed_after(step: int, seed: int) -> int:
    """A seed for the steps after `step` of a run, from that of its beginning."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}".encode()).digest()[:7], "little")


def _saved_weights(model: nn.Module, folder: Path) -> tuple[RowFiles, dict[str, str]]:
    """A checkpoint's trained weights, and how each parameter is named there."""
    if hasattr(model, "peft_config"):
        return RowFiles([folder / ADAPTER]), saved_names(model)
    return (
        RowFiles(folder.glob("weights-*.safetensors")),
        {name: name for name in trainable_parameters(model)},
    )


def saved_adapter(folder: Path | None) -> Callable[[str], Tensor] | None:
    """Reads the adapter of a checkpoint, a tensor by its parameter's name."""
    if folder is None or not (folder / ADAPTER).is_file():
        return None
    files = RowFiles([folder / ADAPTER])
    return lambda name: files.read(saved_name(name))


def _evaluator_to_json(evaluator: Evaluator | None) -> dict | None:
    """The best and the last evaluation."""
    if evaluator is None:
        return None
    return {
        name: metrics and asdict(metrics)
        for name, metrics in (("best", evaluator.best), ("last", evaluator.last))
    }


def _evaluator_from_json(evaluator: Evaluator | None, saved: dict | None):
    """The other way; an evaluator that is new starts without a best."""
    if evaluator is None or saved is None:
        return
    for name, values in saved.items():
        setattr(evaluator, name, values and EvalMetrics(**values))
