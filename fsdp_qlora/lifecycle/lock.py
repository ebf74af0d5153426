"""One run at a time in an output folder: two would overwrite each other's checkpoints.

The lock is the system's (flock, through https://py-filelock.readthedocs.io), so it ends with the process
that holds it, however that ends; the file only says who that is. Pure: no torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..json_input import from_json

LOCK = ".fsdp_qlora.lock"
# What network file systems that have no locks, or whose lock service is down, answer to flock.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


@contextmanager
def sole_run_in(folder: str | Path) -> Iterator[None]:
    """Hold `folder`, which is made if it is not there, for the life of the block.

    Raises ValueError naming --output_dir if another run holds it, or nothing can be written there. On a
    file system without locks it holds nothing, and a warning says so.
    """
    folder = Path(folder)
    is_new = not folder.exists()
    path = folder / LOCK
    lock = FileLock(path, timeout=0, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _acquire(lock, path)
    except OSError as error:
        raise ValueError(f"--output_dir {folder}: {error.strerror}; give another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # a disk may have become read-only
        lock.release()
        if is_new:
            with suppress(OSError):
                folder.rmdir()  # where nothing was written


def is_held(folder: str | Path) -> bool | None:
    """Whether a run is at work in a folder; None where there is nothing to know it from.

    A run that was killed leaves its file, and no lock.
    """
    try:
        with open(Path(folder) / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the file is closed
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _acquire(lock: FileLock, path: Path):
    """Take the lock and write this process into its file."""
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"--output_dir {path.parent}: {_holder(path)}") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        print(
            f"warning: --output_dir {path.parent}: its file system has no locks "
            f"({error.strerror}), so nothing keeps a second run from writing there",
            flush=True,
        )
        return
    holder = dict(
        pid=os.getpid(), host=socket.gethostname(), since=time.strftime("%Y-%m-%d %H:%M:%S")
    )
    path.write_text(json.dumps(holder))


def _holder(path: Path) -> str:
    """Who holds a lock, and what to do about it."""
    try:
        holder = from_json(path.read_text(errors="replace"))
        who = "another run (process {pid} on {host}, since {since})".format(**holder)
        is_elsewhere = holder["host"] != socket.gethostname()
    except (OSError, ValueError, KeyError, TypeError):
        who, is_elsewhere = "another run", False
    remedy = f", or delete {path} if that machine is gone" if is_elsewhere else ""
    return f"{who} writes there; stop it, or give another folder{remedy}"
