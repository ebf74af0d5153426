"""`--on_end`: a command of the user's that is told how a run ended, as a webhook or a mail needs it.

It is a flag and no setting, so that an address with a secret in it is in no recipe, model card or
checkpoint. It has a session of its own: launchers signal whole groups of processes, and what ends a rank
at once (`signals.py`, `watchdog.py`) shall not end what tells of it. Pure: no torch.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..redact import redact
from .signals import LAST_WORDS, StopRequested

PATIENCE_S = 60  # for the command; a run's own exit code never depends on it
_LAST_S = 2  # that a process which ends at once waits for it
_LEAVE_S = 1  # of the grace after a stop, for the process to end by itself


class _Notice:
    """The command, which is told once, by whichever thread first knows of the end."""

    def __init__(self, command: str | None, output_dir: str):
        self.command, self.output_dir = command, output_dir
        self.is_told = threading.Lock()  # taken at the end, and never given back

    def tell(self, status: str, message: str, wait_s: float = PATIENCE_S):
        """Run the command, and end it after PATIENCE_S; after less it is left to itself.

        If it fails, a warning is all.
        """
        if not self.command or not self.is_told.acquire(blocking=False):
            return
        told = dict(
            FSDP_QLORA_STATUS=status,
            FSDP_QLORA_MESSAGE=redact(message).strip().split("\n")[0],
            FSDP_QLORA_OUTPUT_DIR=self.output_dir,
        )
        try:
            process = subprocess.Popen(
                self.command, shell=True, env=os.environ | told, start_new_session=True
            )
            if code := process.wait(max(0.0, min(PATIENCE_S, wait_s))):
                warn(f"exit code {code}")
        except subprocess.TimeoutExpired:
            if wait_s < PATIENCE_S:
                return
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            warn(f"it did not finish within {PATIENCE_S} s")
        except OSError as error:
            warn(error.strerror or str(error))

    def last_words(self, status: str, message: str):
        """Of a process that ends at once."""
        self.tell(status, message, _LAST_S)


@contextmanager
def told_at_end(
    command: str | None, output_dir: str, seconds_left: Callable[[], float] = lambda: math.inf
) -> Iterator[None]:
    """Run a shell command after the block, which learns in its environment how that ended.

    FSDP_QLORA_STATUS is finished, stopped or failed; FSDP_QLORA_MESSAGE a line about it;
    FSDP_QLORA_OUTPUT_DIR the folder of the run. An error of the block is raised as it was.
    seconds_left: until the process is ended, as it is some time after it was told to stop.
    """
    started, notice = time.monotonic(), _Notice(command, output_dir)

    def tell(status: str, message: str):
        notice.tell(status, message, seconds_left() - _LEAVE_S)

    LAST_WORDS.append(notice.last_words)
    try:
        yield
    except (StopRequested, KeyboardInterrupt) as stopped:
        tell("stopped", str(stopped) or "by the keyboard")
        raise
    except BaseException as error:
        tell("failed", f"{type(error).__name__}: {error}")
        raise
    else:
        tell("finished", f"after {time.monotonic() - started:.0f} s")
    finally:
        LAST_WORDS.remove(notice.last_words)


def warn(reason: str):
    """Say why the command told nobody."""
    print(f"warning: the --on_end command failed: {reason}", file=sys.stderr, flush=True)
