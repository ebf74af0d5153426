"""Machines that share no file system: the disk that rank 0 sees holds the run.

A checkpoint is made there of all ranks' files, so ranks that don't see that disk send theirs. A run that
goes on hands the checkpoint out to them, for as long as it is read. After a restart rank 0 may be on
another machine: then the newest checkpoint on any disk is brought to it first.

Bytes travel by gloo in a group of their own, for a thread sends them while training goes on. Where all
ranks see one folder nothing here does anything.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..atomic_files import remove_folder, sync
from ..dist import from_main, from_rank_in, gather_over_ranks, print_main, ranks_from_env
from .folder import (
    WEIGHTS,
    all_checkpoints,
    checkpoints_of,
    fault_of,
    sha256,
    step_folder,
    step_of,
)

CHUNK = 64 << 20  # bytes that travel at once
BESIDE = (
    *(f"{name}-best" for name in WEIGHTS),
    "metrics.jsonl",
)  # what a run resumes with, besides
_Listed = dict[str, tuple[int, str]]  # name -> size and SHA-256 of a file


class Disks:
    """apart: ranks that don't see rank 0's disk. takers: the first of them on each machine."""

    def __init__(self, seen: list[bool], hosts: list[str]):
        self.rank, self.hosts = ranks_from_env().rank, hosts
        self.apart = [rank for rank, sees in enumerate(seen) if not sees]
        self.takers = sorted({hosts[rank]: rank for rank in reversed(self.apart)}.values())
        self.group = dist.new_group(backend="gloo") if self.apart else None

    @property
    def is_apart(self) -> bool:
        """Whether this rank's files must be sent."""
        return self.rank in self.apart

    # ---- a checkpoint that is written; in a thread ----

    def send(self, scratch: Path, files: _Listed):
        """This rank's files to rank 0, and away from here."""
        for name in files:
            with open(scratch / name, "rb") as file:
                while data := file.read(CHUNK):
                    dist.send(as_tensor(data), 0, group=self.group)
            (scratch / name).unlink()
        with suppress(OSError):
            scratch.rmdir()  # the last rank of this machine

    def receive(self, scratch: Path, rank: int, files: _Listed):
        """A rank's files, on rank 0. Raises OSError when all have come, so that the sender can go on."""
        faults = []
        for name, (size, digest) in files.items():
            received = (self.chunk_from(rank, n) for n in _chunks_of(size))
            faults.append(written(scratch / name, received, digest))
        for fault in filter(None, faults):
            raise OSError(f"rank {rank}'s file: {fault}")

    def chunk_from(self, rank: int, size: int) -> Tensor:
        chunk = torch.empty(size, dtype=torch.uint8)
        dist.recv(chunk, rank, group=self.group)
        return chunk

    # ---- a checkpoint that is read; every rank calls these ----

    @contextmanager
    def at_hand(self, folder: Path) -> Iterator[None]:
        """Rank 0's checkpoint on every disk for the length of the block."""
        copied = self.hand_out(folder, 0, self.takers)
        try:
            yield
            if self.apart:
                dist.barrier(self.group)  # others on this machine read it too
        finally:
            if copied:
                remove(folder)

    def bring_newest(self, out: Path, is_wanted: Callable[[], bool]):
        """Copy a run's newest whole checkpoint, best weights and figures to rank 0's disk from another.

        Only if rank 0 has no checkpoint so new.
        """
        if not self.apart or not from_main(is_wanted):
            return
        root = checkpoints_of(out)
        looks = self.rank == 0 or self.rank in self.takers
        whole = (f for f in all_checkpoints(root) if fault_of(f) is None) if looks else ()
        steps = gather_over_ranks(next(map(step_of, whole), -1))
        if max(steps) == steps[0]:
            return
        source = steps.index(max(steps))
        print_main(f"copied the newest checkpoint, of step {max(steps)}, from {self.hosts[source]}")
        for path in (step_folder(root, max(steps)), *(out / name for name in BESIDE)):
            self.hand_out(path, source, [0])

    def hand_out(self, path: Path, source: int, takers: list[int]) -> bool:
        """Copy a folder or a file of `source`'s disk to those of `takers`; whether this rank has."""
        if not takers:
            return False
        listed = from_rank_in(self.group, source, list_files(path) if self.rank == source else None)
        new, faults = path.with_name(f".{path.name}.{uuid.uuid4().hex}"), []
        for name, (size, digest) in listed.items():
            received = self.broadcast(path / name if self.rank == source else None, size, source)
            if self.rank in takers:
                faults.append(written(new / name, received, digest))
            else:
                _drain(received)
        failed = [text for text in gather_over_ranks(next(filter(None, faults), None)) if text]
        if failed:
            raise OSError(f"{path} could not be copied to every machine: {failed[0]}")
        if new.exists():
            remove(path)
            new.rename(path)
        dist.barrier(self.group)
        return self.rank in takers

    def broadcast(self, path: Path | None, size: int, source: int) -> Iterator[Tensor]:
        """The chunks of a file; `path` on the rank that has it."""
        with open(path, "rb") if path else nullcontext() as file:
            for n in _chunks_of(size):
                chunk = as_tensor(file.read(n)) if path else torch.empty(n, dtype=torch.uint8)
                dist.broadcast(chunk, source, group=self.group)
                yield chunk


def find_disks(folder: Path) -> Disks:
    """Look which ranks see a file that rank 0 makes in `folder`; every rank must call it."""

    def leave() -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        mark = folder / f".seen-{uuid.uuid4().hex}"
        mark.touch()
        return mark

    mark = from_main(leave)
    seen, hosts = zip(*gather_over_ranks((mark.exists(), socket.gethostname())), strict=True)
    if ranks_from_env().is_main:
        mark.unlink()
    disks = Disks(list(seen), list(hosts))
    if disks.apart:
        print_main(
            f"{folder} is on the disk of {hosts[0]}; "
            f"{', '.join(hosts[rank] for rank in disks.takers)} can't see it and "
            f"send{'s' if len(disks.takers) == 1 else ''} checkpoints there"
        )
    return disks


def list_files(path: Path, names: Iterable[str] = ()) -> _Listed:
    """Size and hash of a file, or of a folder's files; of all if none is named."""
    paths = [path / name for name in names] or [p for p in (path, *path.rglob("*")) if p.is_file()]
    return {str(p.relative_to(path)): (p.stat().st_size, sha256(p)) for p in sorted(paths)}


def remove(path: Path):
    """Delete a folder or a file, if it is there."""
    if path.is_dir():
        remove_folder(path)
    else:
        path.unlink(missing_ok=True)


def written(path: Path, received: Iterator[Tensor], digest: str) -> str | None:
    """Write what is received and read it back; what went wrong, once all of it has come, or None."""
    fault = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for chunk in received:
                file.write(memoryview(chunk.numpy()))
        sync(path)
        if sha256(path) != digest:
            fault = f"{path.name} arrived with different bytes than were sent"
    except OSError as error:
        fault = str(error)
    _drain(received)
    return fault


def _drain(received: Iterator[Tensor]):
    """Take what is left, as whoever sends it expects."""
    for _ in received:
        pass


def _chunks_of(size: int) -> Iterator[int]:
    """Sizes of the chunks of so many bytes."""
    return (min(CHUNK, size - start) for start in range(0, size, CHUNK))


def as_tensor(data: bytes) -> Tensor:
    """Bytes as gloo sends them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
