"""What tests have started ends with them, also where pytest was killed.

A watcher in a session of its own waits for this process to end, then kills every process that has the
token of this one in its environment: the fork server and its ranks, launchers and what they started.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "FSDP_QLORA_TESTS"
GRACE_SECONDS = 1.0  # for what ends by itself, as multiprocessing's resource tracker does


def start():
    """Have everything that this process starts from now on killed once it has ended."""
    token = f"{os.getpid()}-{time.time_ns()}"
    env = {k: v for k, v in os.environ.items() if k != MARK}  # or it would find itself
    command = [sys.executable, "-S", __file__, str(os.getpid()), token]
    # Pipes of this process aren't kept open: who reads them waits for their end.
    to_nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    os.posix_spawn(sys.executable, command, env, file_actions=to_nothing, setsid=True)
    os.environ[MARK] = token


def processes_of(token: str) -> list[int]:
    """Ids of the processes, and of what they started, that have the token in their environment."""
    found, mark = [], f"{MARK}={token}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _watch(process: int, token: str):
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])
    time.sleep(GRACE_SECONDS)
    while left := processes_of(token):
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
