"""SIGTERM, SIGUSR1, a closed terminal (SIGHUP) and Ctrl-C end a run saved, within --stop_grace_seconds.

While it trains, all ranks agree to stop at the next chance and save. Before that there is nothing new
to save, and the process ends at once; so it does at a second Ctrl-C, and where a rank is gone, as the
others could never agree: torchrun sends SIGTERM to what a killed rank leaves, and starts anew when that
has ended. All is decided by a thread that the interpreter wakes through a pipe (`signal.set_wakeup_fd`):
a rank that waits in a collective runs no Python handler.

Pure: no torch, so that the command line can name the exit code.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..config.options import CheckpointOptions

EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes later
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
LOOK_SECONDS = 0.5
SAME_SECONDS = 2  # a terminal and the launcher both pass one Ctrl-C on to a rank
_OWN_THREADS = ("checkpoint", "watchdog", "looking")  # which speak to the ranks' store
# Told (status, message) by what ends the process at once, from any thread.
LAST_WORDS: list[Callable[[str, str], None]] = []
_ENDING = threading.Lock()  # of the thread that ends the process


class StopRequested(Exception):
    """A run was asked to stop, and has: the message says what it can resume from."""

    ends_as = "stopped"  # in the run's own records


class StopSignals:
    """Context manager: listens for STOP_SIGNALS. Only the main thread can enter it.

    grace_seconds: after a signal the process ends in any case, saved or not.
    """

    def __init__(self, grace_seconds: float = CheckpointOptions.stop_grace_seconds):
        self.grace_seconds = grace_seconds
        self.asked_by: str | None = None  # a signal's name
        self.asked_at = 0.0
        self.is_over = threading.Event()
        self.looking: threading.Thread | None = None
        self.can_save = False  # from the first step on
        self.interrupted: float | None = None  # when Ctrl-C came first
        self.missing: Callable[[], str] = lambda: ""  # who keeps the ranks from agreeing

    def __enter__(self) -> StopSignals:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.before = {
            s: signal.signal(s, lambda *_: None) for s in STOP_SIGNALS if not is_ignored(s)
        }
        if (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):  # else it is to be ignored
            self.before[signal.SIGINT] = signal.signal(signal.SIGINT, self.interrupt)
        self.fd_before = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.listening = threading.Thread(target=self.listen, name="signals", daemon=True)
        self.listening.start()
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self.fd_before)
        for s, handler in self.before.items():  # who has stopped is not told again on the way out
            signal.signal(s, signal.SIG_IGN if self.asked_by and s in STOP_SIGNALS else handler)
        os.close(self.writer)  # which ends the thread
        self.is_over.set()
        self.listening.join(timeout=2)  # it may be about to start the next
        # Python ends its threads when it ends, and one that is asking the store then aborts the process.
        if self.looking:
            self.looking.join(timeout=2)

    def listen(self):
        """The thread: one byte a signal."""
        with os.fdopen(self.reader, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                if byte[0] in STOP_SIGNALS:
                    self.stop(signal.Signals(byte[0]).name)
                if byte[0] != signal.SIGINT or not self.can_save or self.asked_by:
                    continue
                if os.environ.get("RANK", "0") == "0":
                    print(
                        "saving; press Ctrl-C again to stop without saving",
                        file=sys.stderr,
                        flush=True,
                    )
                self.stop("Ctrl-C")

    def interrupt(self, *_):
        """The main thread's part of Ctrl-C: nothing at the first while there is something to save."""
        now = time.monotonic()
        if not self.can_save:
            raise KeyboardInterrupt
        self.interrupted = self.interrupted or now
        if now - self.interrupted > SAME_SECONDS:
            raise KeyboardInterrupt

    def stop(self, name: str):
        """Ask for a stop and see that it comes, or stop at once where nothing would be lost."""
        if not self.can_save:
            end(f"stopped by {name} before the first step: nothing to save")
        now = time.monotonic()
        if self.asked_by == "Ctrl-C" and now - self.asked_at > SAME_SECONDS:
            end("stopped at once")  # torch's launcher makes SIGTERM of a second Ctrl-C
        if self.asked_by:
            return
        self.asked_by, self.asked_at = name, now
        threading.Thread(target=self.insist, name="grace", daemon=True).start()
        looking = threading.Thread(target=self.look_for_others, name="looking", daemon=True)
        looking.start()
        self.looking = looking  # only now, since the main thread may be joining it

    def insist(self):
        """End the process if the run has not by then."""
        time.sleep(self.grace_seconds)
        end(
            f"stopped by {self.asked_by}: not saved within {self.grace_seconds:g} s "
            "(--stop_grace_seconds); the last checkpoint is the one before"
        )

    def look_for_others(self):
        """End the process if a rank is gone."""
        while not (gone := self.missing()):
            if self.is_over.wait(LOOK_SECONDS):
                return
        end(
            f"stopped by {self.asked_by}: {gone} does not answer, so nothing could be saved; the "
            "last checkpoint is the one before"
        )

    def is_asked(self) -> bool:
        """Whether this rank was told to stop."""
        return self.asked_by is not None

    def seconds_left(self) -> float:
        """Until `insist` ends the process; infinity if nobody has asked."""
        if not self.is_asked():
            return math.inf
        return self.asked_at + self.grace_seconds - time.monotonic()


def is_ignored(number: signal.Signals) -> bool:
    """Whether who started this process keeps a terminal's signal from it, as nohup does.

    A rank gets those from its launcher alone, in a session of its own.
    """
    of_terminal = (
        number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT) and "RANK" not in os.environ
    )
    return of_terminal and signal.getsignal(number) == signal.SIG_IGN


def end_beside_threads(code: int):
    """End this process now if one of its threads may be in C++: an error does not wait for a write, and
    a store whose process is frozen does not answer.

    Python would end that thread by unwinding it through C++, which aborts the process.
    """
    if all(thread.name not in _OWN_THREADS for thread in threading.enumerate()):
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, AttributeError):
            stream.flush()  # closed, or there is none
    os._exit(code)


def end(message: str):
    """End this process from any thread, also where nobody reads any more."""
    end_at_once(EXIT_STOPPED, message, "stopped")


def end_at_once(code: int, message: str, status: str = "failed", is_said: bool = False):
    """End this process: the message is printed unless somebody has, and --on_end is told.

    A second thread that wants to end it has nothing to add, and waits here.
    """
    _ENDING.acquire()
    with suppress(OSError):
        if not is_said:
            print(message, file=sys.stderr, flush=True)
    for tell in list(LAST_WORDS):
        tell(status, message)
    os._exit(code)
