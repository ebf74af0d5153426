"""SIGTERM, SIGUSR1 and Ctrl-C end a run with its state saved, in every phase within 30 seconds.

While it trains, all ranks agree to stop at the next chance and save. Before that there is nothing new
to save, and the process ends at once; so it does at a second Ctrl-C, and where a rank is gone, as the
others could never agree: torchrun sends SIGTERM to what a killed rank leaves, and starts anew when that
has ended. All is decided by a thread that the interpreter wakes through a pipe (`signal.set_wakeup_fd`):
a rank that waits in a collective runs no Python handler.

Pure: no torch, so that the command line can name the exit code.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

EXIT_STOPPED = 75    # EX_TEMPFAIL of sysexits.h: the same command goes on later
GRACE_SECONDS = 25   # schedulers and torchrun kill 30 s after SIGTERM
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LOOK_SECONDS = 0.5
SAME_SECONDS = 2     # a terminal and the launcher both pass one Ctrl-C on to a rank


class StopRequested(Exception):
    """A run was asked to stop, and has: the message says where it can go on from."""
    ends_as = "stopped"  # in the run's own records


class StopSignals:
    """Context manager: listens for STOP_SIGNALS. Only the main thread can enter it."""

    def __init__(self):
        self.asked_by: str | None = None  # a signal's name
        self.can_save = False             # from the first step on
        self.interrupted: float | None = None  # when Ctrl-C came first
        self.missing: Callable[[], str] = lambda: ""  # who keeps the ranks from agreeing

    def __enter__(self) -> StopSignals:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.before = {s: signal.signal(s, lambda *_: None) for s in STOP_SIGNALS}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is to be ignored
            self.before[signal.SIGINT] = signal.signal(signal.SIGINT, self.interrupt)
        self.fd_before = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        threading.Thread(target=self.listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self.fd_before)
        for s, handler in self.before.items(): signal.signal(s, handler)
        os.close(self.writer)  # which ends the thread

    def listen(self):
        """The thread: one byte a signal."""
        with os.fdopen(self.reader, "rb", buffering=0) as pipe:
            while byte := pipe.read(1):
                if byte[0] in STOP_SIGNALS: self.stop(signal.Signals(byte[0]).name)
                if byte[0] != signal.SIGINT or not self.can_save or self.asked_by: continue
                if os.environ.get("RANK", "0") == "0":
                    print("saving; Ctrl-C once more ends the run at once", file=sys.stderr, flush=True)
                self.stop("Ctrl-C")

    def interrupt(self, *_):
        """The main thread's part of Ctrl-C: nothing at the first while there is something to save."""
        now = time.monotonic()
        if not self.can_save: raise KeyboardInterrupt
        self.interrupted = self.interrupted or now
        if now - self.interrupted > SAME_SECONDS: raise KeyboardInterrupt

    def stop(self, name: str):
        """Ask for a stop and see that it comes, or stop at once where nothing would be lost."""
        if not self.can_save: end(f"stopped by {name} before the first step: nothing to save")
        if self.asked_by: return
        self.asked_by = name
        for body in (self.insist, self.look_for_others):
            threading.Thread(target=body, name="grace", daemon=True).start()

    def insist(self):
        """End the process if the run has not by then."""
        time.sleep(GRACE_SECONDS)
        end(f"stopped by {self.asked_by}: not saved within {GRACE_SECONDS} s; the checkpoint before "
            "is the last one")

    def look_for_others(self):
        """End the process if a rank is gone."""
        while not (gone := self.missing()): time.sleep(LOOK_SECONDS)
        end(f"stopped by {self.asked_by}: {gone} does not answer, so nothing could be saved; the "
            "checkpoint before is the last one")

    def is_asked(self) -> bool:
        """Whether this rank was told to stop."""
        return self.asked_by is not None


def end(message: str):
    """End this process from any thread."""
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_STOPPED)
