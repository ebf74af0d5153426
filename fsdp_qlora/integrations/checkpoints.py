"""How a transformers `Trainer` of a sharded model saves and resumes: whole checkpoints, or none.

Weights are written by rank 0, the optimizer's rows and random states by each rank. Where one rank can't,
all of them say so and what was begun goes, so that no rank waits for another and the newest checkpoint is
one that can be resumed.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..atomic_files import remove_folder
from ..dist import WriteError, each_writes, from_main, main_only
from ..export import save_trained
from .states import check_saved, load_optimizer, load_trained, save_optimizer

_SCHEDULER_FILE = "scheduler.json"
# A folder of a checkpoint: beside a whole model its files would be read as weights.
_STATES = "optimizer"


class CheckpointMixin:
    """The part of `ShardedTrainerMixin` that saves and resumes."""

    _in_checkpoint = False

    def init_hf_repo(self, token: str | None = None) -> None:
        """Rank 0 makes the repository; its failure is every rank's, and so is the name."""
        with main_only():
            super().init_hf_repo(token)
        self.hub_model_id = from_main(lambda: self.hub_model_id)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Of every rank amid a checkpoint, and of rank 0 alone where the trainer pushes to the hub."""
        with main_only() if self._in_checkpoint else nullcontext():
            super().create_model_card(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """What a failed save had begun goes: a run would resume from the newest folder."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        folder = Path(self._get_output_dir(trial=trial)) / name
        was_there = from_main(folder.exists)
        self._in_checkpoint = True
        try:
            with main_only():
                super()._save_checkpoint(model, trial)
        except WriteError as error:
            if self.args.should_save and not was_there:
                remove_folder(folder)
            raise WriteError(
                f"{folder}: {error}; mend that and resume: earlier checkpoints stay"
            ) from error
        finally:
            self._in_checkpoint = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The adapter, or the whole model, in transformers' files. Every rank must call it."""
        folder = output_dir or self.args.output_dir
        save_trained(self.model, folder, self.processing_class)
        with main_only():
            if self.args.should_save:
                (Path(folder) / "training_args.json").write_text(self.args.to_json_string())
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str):
        folder = Path(output_dir)
        with each_writes():
            save_optimizer(folder / _STATES, self.model, self._own_optimizer())
            if self.args.should_save:
                (folder / _SCHEDULER_FILE).write_text(json.dumps(self.lr_scheduler.state_dict()))

    def _save_scaler(self, output_dir: str) -> None:
        with each_writes():
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with each_writes():
            super()._save_rng_state(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None):
        if checkpoint is None:
            return
        folder, optimizer = Path(checkpoint), self._own_optimizer()
        if not (folder / _SCHEDULER_FILE).is_file():
            raise ValueError(
                f"resume_from_checkpoint={checkpoint!r}: it has no {_SCHEDULER_FILE}, for it was saved with "
                "save_only_model=True or by another trainer; give a checkpoint that this trainer saved "
                "whole, or train from the weights in it without resume_from_checkpoint"
            )
        load_optimizer(_states_in(folder), self.model, optimizer)
        state = json.loads((folder / _SCHEDULER_FILE).read_text())
        self.lr_scheduler.load_state_dict(_with_keys_of(self.lr_scheduler.state_dict(), state))
        for group, rate in zip(
            optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate

    def _own_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None):
        folder = Path(resume_from_checkpoint)
        if (folder / _SCHEDULER_FILE).is_file():
            given = f"resume_from_checkpoint={resume_from_checkpoint!r}"
            check_saved(given, folder, _states_in(folder))
        load_trained(resume_from_checkpoint, self.model, self.args.device)

    def _load_best_model(self):
        load_trained(self.state.best_model_checkpoint, self.model, self.args.device)


def _states_in(checkpoint: Path) -> Path:
    """Where the optimizer's rows are; once they lay beside an adapter."""
    states = checkpoint / _STATES
    return states if states.is_dir() else checkpoint


def _with_keys_of(own: Any, read: Any) -> Any:
    """What JSON has made of a scheduler's state, with whole numbers as keys where its own are.

    `MultiStepLR` has its milestones so, and would never come to one that is text.
    """
    if isinstance(own, list) and isinstance(read, list) and len(own) == len(read):
        return [_with_keys_of(*pair) for pair in zip(own, read, strict=True)]
    if not isinstance(own, dict) or not isinstance(read, dict):
        return read
    if own and all(isinstance(key, int) for key in own):
        read = {int(key): value for key, value in read.items()}
    return type(own)({key: _with_keys_of(own.get(key), value) for key, value in read.items()})
