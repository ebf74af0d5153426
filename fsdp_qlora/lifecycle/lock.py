"""One run at a time in an output folder: two would overwrite each other's checkpoints.

The lock is the system's (flock), so it is gone with the process that held it, however that ended; the
file only says who that is. Pure: no torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..json_input import from_json

LOCK = ".fsdp_qlora.lock"


@contextmanager
def sole_run_in(folder: str | Path) -> Iterator[None]:
    """Hold `folder`, which is made if it is not there, for the life of the block.

    Raises ValueError naming --output_dir if another run holds it, or nothing can be written there. Where
    the file system has no locks nothing is held, and a warning says so.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = take(folder / LOCK)
    except OSError as error:
        raise ValueError(f"--output_dir {folder}: {error.strerror}; give another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK).unlink()  # a disk may have become read-only
        os.close(descriptor)
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # where nothing was written


def take(path: Path) -> int:
    """The descriptor of the locked file, with this process written into it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise ValueError(
                f"--output_dir {path.parent}: {described(holder)} writes there; end it, "
                "or give another folder"
            ) from None
        except OSError as error:
            print(
                f"warning: --output_dir {path.parent}: its file system has no locks "
                f"({error.strerror}), so a second run there would not be noticed",
                flush=True,
            )
            return descriptor
        if _is_at(descriptor, path):
            break
        os.close(descriptor)  # its holder has just ended and removed it
    os.ftruncate(descriptor, 0)
    os.write(
        descriptor,
        json.dumps(
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
        ).encode(),
    )
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def described(holder: str) -> str:
    """Who holds a lock."""
    try:
        return "another run (process {pid} on {host}, since {since})".format(**from_json(holder))
    except (ValueError, KeyError, TypeError):
        return "another run"
