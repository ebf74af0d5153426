"""Writes checkpoints while training goes on.

A step is held up only while its tensors are copied to the host. Then a thread of each rank writes
that rank's file; rank 0's also waits for the others' word, puts the adapter together, verifies,
writes the manifest, gives the folder its name and prunes. Ranks speak through the store (`RankStore`), so
no collective of the thread can cross one of a step. One write is in flight at a time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from json import dumps, loads
from pathlib import Path

from torch import Tensor

from ..adapters.modules_to_save import with_tied_copy
from ..adapters.peft_names import saved_names
from ..atomic_files import remove_folder, write_text
from ..config import RunConfig
from ..dist import from_main, open_rank_store, print_main, ranks_from_env
from ..export import save_peft_config
from ..lora_init import for_original_base, saved_config
from ..tensor_files import write_tensors
from .folder import RUN, prune, scratch_folder, seal, step_folder
from .separate_disks import Disks, list_files
from .state import ADAPTER, Boundary, RunState
from .tensors import (
    RandomState,
    RowFiles,
    Staging,
    TensorRows,
    optimizer_rows,
    rank_file,
    read_back,
    taken_rows,
    weight_rows,
    weights_file,
    write_rows,
)

SLOW_SECONDS = 1.0  # a step that waited longer for the write before is spoken of
END_SECONDS = 2  # in which a thread ends that waited for another rank's file
_WORD_SECONDS = 1800  # how long rank 0 waits for another rank's file
writes = count()  # tells writes of the same step apart; every rank counts alike


@dataclass
class _Snapshot:
    """What one rank writes of a checkpoint, copied from the run."""

    step: int
    weights: dict[str, TensorRows]
    optimizer: dict[str, TensorRows]
    random: RandomState
    run: dict
    topic: str  # where the ranks say that they have written it


class CheckpointWriter:
    """Saves a run's state into `root`, keeping the newest `keep` checkpoints and the best.

    facts: what run.json says besides the state. failure: why the last write failed, on rank 0.
    """

    def __init__(
        self,
        root: Path,
        state: RunState,
        config: RunConfig,
        facts: dict,
        disks: Disks,
        verified: Path | None = None,
    ):
        self.root, self.state, self.keep, self.facts = root, state, config.keep_checkpoints, facts
        self.disks, self.minutes = disks, config.checkpoint_minutes
        self.rank, self.rank_store, self.staging = (
            ranks_from_env(),
            open_rank_store(),
            Staging(state.device),
        )
        self.keys = saved_names(state.model) if hasattr(state.model, "peft_config") else None
        self.verified, self.failure = verified, None
        self.thread: threading.Thread | None = None
        self.is_left = threading.Event()  # by a run that failed: nobody is waited for
        self.clock = time.monotonic()

    def save(self, boundary: Boundary, mark: Callable[[], None] = lambda: None) -> float:
        """Start to write the state as it is after `boundary.step`; seconds that this held up the run.

        A step whose checkpoint is good is not written again: it would be gone while that is replaced.
        Every rank must call it. `mark` is called now and then while an earlier write is waited for.
        """
        started = time.perf_counter()
        self.join(mark)
        if (waited := time.perf_counter() - started) > SLOW_SECONDS:
            print_main(
                f"the checkpoint after step {boundary.step} waited {waited:.1f} s for the previous one "
                "to be written: save less often (--checkpoint_every), or to a faster disk"
            )
        if from_main(lambda: self.has(boundary.step)):
            return 0.0
        shot = self.snapshot(boundary)
        self.thread = threading.Thread(
            target=self.write, args=(shot,), name="checkpoint", daemon=True
        )
        self.thread.start()
        self.clock = time.monotonic()
        return time.perf_counter() - started

    def has(self, step: int) -> bool:
        """Whether the last good checkpoint is that of `step`; only rank 0 knows."""
        return (
            bool(self.verified)
            and self.verified.resolve() == step_folder(self.root, step).resolve()
        )

    def is_time(self) -> bool:
        """Whether --checkpoint_minutes have gone by; rank 0's clock counts."""
        due = self.minutes and time.monotonic() - self.clock > 60 * self.minutes
        return bool(due) and self.rank.is_main

    def has_failed(self) -> bool:
        """Whether the last write failed and no earlier checkpoint is good; only rank 0 knows."""
        return self.failure is not None and self.verified is None

    def stop_all_ranks(self):
        """Raise on every rank what rank 0 failed at."""
        self.join()
        raise OSError("no checkpoint could be written: " + from_main(lambda: self.failure))

    def join(self, mark: Callable[[], None] = lambda: None, most_seconds: float = math.inf):
        """Wait until this rank's thread is done, or as long as is given."""
        deadline = time.monotonic() + most_seconds
        while self.thread and self.thread.is_alive() and time.monotonic() < deadline:
            self.thread.join(min(1.0, most_seconds))
            mark()
        self.thread = None

    def leave(self, most_seconds: float):
        """Wait so long for the write under way, then have its thread wait for no other rank and end.

        Python aborts a process that ends while a thread is in C++, such as that of the ranks' store.
        """
        thread = self.thread
        self.join(most_seconds=most_seconds)
        self.is_left.set()
        if thread:
            thread.join(END_SECONDS)

    def snapshot(self, boundary: Boundary) -> _Snapshot:
        """Copies of this rank's rows, on the host."""
        state = self.state
        weights = self.staging.copy("weights", weight_rows(state.model)) | taken_rows(state.model)
        optimizer = self.staging.copy("optimizer", optimizer_rows(state.model, state.optimizer))
        self.staging.wait()
        run = self.facts | state.to_json(boundary)
        return _Snapshot(
            boundary.step,
            weights,
            optimizer,
            boundary.random,
            run,
            f"checkpoint {next(writes)} of step {boundary.step}",
        )

    # ---- in the thread ----

    def write(self, shot: _Snapshot):
        """This rank's part; on rank 0 the whole. Never raises: a failure is kept in `failure`."""
        scratch, word, files = scratch_folder(self.root, shot.step), "written", {}
        try:
            names = _write_part(scratch, self.rank.rank, shot)
            if self.disks.is_apart:
                files = list_files(scratch, names)
            self.rank_store.post(f"{shot.topic} files", dumps(files))
        except Exception as error:  # noqa: BLE001  a full disk comes as any of several
            word = f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):
            self.rank_store.post(shot.topic, word)  # else rank 0 finds it gone
        if self.rank.is_main:
            self.complete(shot, scratch)
        elif self.disks.is_apart and word == "written":
            with suppress(OSError, RuntimeError):  # rank 0 says what fails
                self.disks.send(scratch, files)

    def complete(self, shot: _Snapshot, scratch: Path):
        """Make one checkpoint of what all ranks wrote."""
        folder = step_folder(self.root, shot.step)
        try:
            words = self.rank_store.wait_for_all(shot.topic, _WORD_SECONDS, self.is_left.is_set)
            self.receive(shot, scratch, [r for r in self.disks.apart if words[r] == "written"])
            failed = [f"rank {r}: {word}" for r, word in enumerate(words) if word != "written"]
            if failed:
                raise OSError(failed[0])
            if self.keys:
                self.assemble_adapter(scratch)
            write_text(scratch / RUN, dumps(shot.run, indent=1))
            seal(scratch, folder)
        except Exception as error:  # noqa: BLE001
            self.failure = f"{type(error).__name__}: {error}"
            remove_folder(scratch)
            if self.verified:
                print_main(
                    f"warning: no checkpoint of step {shot.step} ({self.failure}); the last good one is "
                    f"{self.verified}"
                )
        else:
            self.verified, self.failure = folder, None
            self.delete_older()

    def delete_older(self):
        """What is not kept; the new checkpoint is as good if that can't be deleted."""
        try:
            prune(self.root, self.keep, protected=[self.verified])
        except OSError as error:
            print_main(f"warning: an earlier checkpoint could not be deleted ({error})")

    def receive(self, shot: _Snapshot, scratch: Path, ranks: list[int]):
        """The files of ranks that don't see this disk; all of them, though one may fail."""
        faults = []
        for rank in ranks:
            try:
                self.disks.receive(
                    scratch, rank, loads(self.rank_store.read(f"{shot.topic} files", rank))
                )
            except OSError as error:
                faults.append(error)
        if faults:
            raise faults[0]

    def assemble_adapter(self, scratch: Path):
        """The ranks' rows of the adapter as the one file that PEFT reads, in place of theirs."""
        parts = sorted(scratch.glob("weights-*.safetensors"))
        files = RowFiles(parts)
        tensors = with_tied_copy(
            self.state.model, {key: _saved_tensor(files, name) for name, key in self.keys.items()}
        )
        (scratch / ADAPTER).parent.mkdir()
        write_tensors(tensors, scratch / ADAPTER, {"format": "pt"})
        read_back(scratch / ADAPTER, tensors)
        save_peft_config(saved_config(self.state.model), scratch / ADAPTER.parent)
        for part in parts:
            part.unlink()


def _saved_tensor(files: RowFiles, name: str) -> Tensor:
    """A whole tensor of the adapter, as it is saved."""
    taken = files.read(f"{name}|taken") if f"{name}|taken" in files.parts else None
    return for_original_base(name, files.read(name), taken).contiguous()


def _write_part(scratch: Path, rank: int, shot: _Snapshot) -> list[str]:
    """Write the files of one rank; their names."""
    scratch.mkdir(parents=True, exist_ok=True)
    paths = [weights_file(scratch, rank)] if shot.weights else []
    if shot.weights:
        write_rows(paths[0], shot.weights)
    paths.append(rank_file(scratch, rank))
    write_rows(paths[-1], shot.optimizer, shot.random)
    return [path.name for path in paths]
