"""One rank builds a file, the others wait for it, without a process group.

Tokenising a large data set takes longer than the timeout of a collective, so ranks that waited in a
barrier would be killed while rank 0 worked. Here they poll the disk instead, before any process
group exists. The file appears whole (atomic rename), and one that is not what was written is built
again; if the writer fails it leaves a note, and every rank raises the writer's error.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

POLL_SECONDS = 0.2
_CLOCK_SLACK_SECONDS = 60  # file times may come from another host, and ranks start at odd times

T = TypeVar("T")


class DamagedFile(Exception):
    """A cached file that does not hold what was written."""


def build_or_wait(
    path: Path,
    build: Callable[[Path], None],
    load: Callable[[Path], T],
    *,
    is_writer: bool,
    timeout_s: float,
) -> T:
    """What `load(path)` gives, once the file is there and `load` raises no DamagedFile.

    The writer builds it with `build(temporary_path)` where it is missing or damaged, the others wait.
    Raises what `build` raised on the writer, and ValueError with the same text on the others.
    """
    if not is_writer:
        return _wait(path, load, timeout_s)
    if path.exists():
        try:
            return load(path)
        except DamagedFile as damage:
            print(f"--data_cache: rebuilding {path}: {damage}", flush=True)
    return _build(path, build, load)


def _build(path: Path, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _note_of(path).unlink(missing_ok=True)  # of an earlier run
    except OSError as error:
        raise ValueError(f"--data_cache {path.parent}: {error}; give a writable folder") from error
    try:
        _write_whole(path, build)
        return _read_back(path, load)
    except Exception as error:
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        with suppress(OSError):  # a full disk; the launcher then ends the waiting ranks
            _write_whole(_note_of(path), lambda temporary: temporary.write_text(text))
        raise


def _read_back(path: Path, load: Callable[[Path], T]) -> T:
    try:
        return load(path)
    except DamagedFile as damage:
        raise ValueError(
            f"--data_cache {path}: {damage}, right after it was written; check the disk, or give "
            "another folder"
        ) from damage


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".writing-{uuid.uuid4().hex}")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _wait(path: Path, load: Callable[[Path], T], timeout_s: float) -> T:
    started, deadline, seen = time.time(), time.monotonic() + timeout_s, None
    while True:
        if (now := _identity(path)) != seen:
            seen = now
            with suppress(DamagedFile):
                return load(path)  # else the writer builds it again
        if (text := _fresh_note(path, started)) is not None:
            raise ValueError(text)
        if time.monotonic() > deadline:
            raise ValueError(
                f"{path}: the writing rank did not finish it within {timeout_s:.0f} s; see its log, or "
                "delete --data_cache and rerun"
            )
        time.sleep(POLL_SECONDS)


def _identity(path: Path) -> tuple | None:
    """Changes when the file is replaced; None if it is not there."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _fresh_note(path: Path, started: float) -> str | None:
    """The error of this run's writer; a note left by an earlier run does not count."""
    note = _note_of(path)
    try:
        if note.stat().st_mtime < started - _CLOCK_SLACK_SECONDS:
            return None
        return note.read_text()
    except FileNotFoundError:
        return None


def _note_of(path: Path) -> Path:
    return path.with_suffix(".failed")
