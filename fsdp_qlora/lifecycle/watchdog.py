"""Names the rank that the others wait for, before the process group's bare time-out.

A stalled rank looks like a stalled run: all others wait for it in a collective. A thread of each rank
notices that its main thread has not moved, tells the others where it is, and compares: the culprit is
the one that does not answer, or is outside any collective, or is behind. Its phase and Python stack are
printed once, and the run ends; rerun, it resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..dist.rank_store import RankStore
from .signals import StopRequested, end_at_once

EXIT_STALLED = 70  # EX_SOFTWARE of sysexits.h
_INNERMOST = 5  # frames of a stack that tell whether it waits in a collective
WITHOUT_STORE_SECONDS = 30  # the store may be in the process that is frozen
_NO_BEAT = '[0, "start", 0]'  # count, phase and time of a rank that has told nothing
_OVER = "over"  # the phase of a rank that is done
END_SECONDS = 2  # in which a thread ends whose store answers
GONE_LOOKS = 16  # that meet no new beat: one comes every second, a look (signals.py) every half


class Watchdog:
    """Watches this rank's main thread from `watching`, which marks where it is; 0 seconds never do."""

    def __init__(self, rank_store: RankStore, stall_seconds: float):
        self.rank_store, self.seconds = rank_store, stall_seconds
        self.grace = max(
            2.0, min(30.0, stall_seconds / 2)
        )  # ranks come to a stop one after another
        self.main = threading.main_thread().ident
        self.phase, self.count, self.moved = "start", 0, time.monotonic()
        self.is_paused, self.is_over, self.looked = False, threading.Event(), time.monotonic()
        self.seen: dict[int, tuple[str | None, int]] = {}  # a rank's last beat, and the looks since
        self.last = _OVER  # the phase of the last beat

    def mark(self, phase: str | None = None):
        """The main thread is at a new place; ranks count alike."""
        if phase:
            self.phase = phase
        self.count, self.moved = self.count + 1, time.monotonic()

    @contextmanager
    def watching(self) -> Iterator[Watchdog]:
        """Watch for the life of the block. A rank that fails in it counts as gone, it saves no more."""
        self.mark()
        threads = [
            threading.Thread(target=body, name="watchdog", daemon=True)
            for body in (self.watch, self.guard)
            if self.seconds
        ]
        if self.seconds:
            self.post_beat()
        for thread in threads:
            thread.start()
        try:
            yield self
        except BaseException as error:
            if not isinstance(error, StopRequested):
                self.last = self.phase
            raise
        finally:
            self.is_over.set()
            # As in `StopSignals`: Python aborts a process that ends while one asks the store.
            for thread in threads:
                thread.join(END_SECONDS)

    def missing(self) -> str:
        """Which other rank is not done and has told nothing new in GONE_LOOKS looks; empty if none.

        Looks count and not seconds: after a machine was suspended everybody's last beat is old.
        """
        if not self.seconds:
            return ""
        try:
            beats = self.rank_store.read_all("beat")
        except (
            RuntimeError
        ):  # it went with a rank, with its machine, or as this rank's work is done
            return "" if self.is_over.is_set() else "the ranks' store"
        for rank, beat in enumerate(beats):
            if rank == self.rank_store.rank:
                continue
            before, looks = self.seen.get(rank, ("", 0))
            self.seen[rank] = beat, looks + 1 if beat == before else 0
            if beat and json.loads(beat)[1] != _OVER and self.seen[rank][1] >= GONE_LOOKS:
                return f"rank {rank}"
        return ""

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Rank 0 may take as long as it likes here, and the others wait."""
        self.mark(phase)
        self.is_paused = True
        try:
            yield
        finally:
            self.mark()
            self.is_paused = False

    # ---- in the threads ----

    def watch(self):
        """Tell the others where this rank is, and look for a stall.

        The last beat is told here too: the main thread would wait for a store that does not answer.
        """
        while not self.is_over.wait(min(1.0, self.seconds / 4)):
            with suppress(RuntimeError):  # the store is closing, or frozen: `guard` sees that
                self.post_beat()
                if self.is_stalled():
                    self.look_around()
                self.looked = time.monotonic()
        with suppress(RuntimeError):
            self.post_beat(self.last)

    def guard(self):
        """The store does not answer: its process is the one that is frozen."""
        limit = self.seconds + self.grace + WITHOUT_STORE_SECONDS
        while not self.is_over.wait(1.0):
            if self.is_stalled() and time.monotonic() - self.looked > limit:
                self.end(
                    f"rank {self.rank_store.rank} gets no answer from the ranks' store on rank 0's "
                    "machine: its process is stopped, or the machine is gone"
                )

    def is_stalled(self) -> bool:
        """Whether the main thread has not moved for too long."""
        return not self.is_paused and time.monotonic() - self.moved > self.seconds

    def look_around(self):
        """Find the culprit once all stalled ranks have had the time to say where they are."""
        count = self.count
        stack = traceback.extract_stack(sys._current_frames()[self.main])
        self.rank_store.post(
            "stalled",
            json.dumps(
                [count, self.phase, waits(stack), "".join(traceback.format_list(stack[-8:]))]
            ),
        )
        self.is_over.wait(self.grace)
        if self.is_over.is_set() or self.count != count:
            return
        said = self.rank_store.read_all("stalled")
        told = {r: json.loads(text) for r, text in enumerate(said) if text}
        beats = [json.loads(text or _NO_BEAT) for text in self.rank_store.read_all("beat")]
        silent = [r for r, beat in enumerate(beats) if not told.get(r) or told[r][0] < beat[0]]
        frozen = [r for r in silent if time.time() - beats[r][2] > self.grace]
        if set(silent) - set(frozen):
            return  # somebody moves, so this rank only waits
        if self.rank_store.claim("verdict"):
            self.end(verdict(self.seconds, told, {r: beats[r] for r in frozen}))
        time.sleep(self.grace)
        end_at_once(EXIT_STALLED, stalled(self.seconds), is_said=True)

    def post_beat(self, last: str | None = None):
        """Tell that this rank lives, and where it is; nothing more after the `last` one."""
        if self.is_over.is_set() and last is None:
            return
        self.rank_store.post("beat", json.dumps([self.count, last or self.phase, time.time()]))

    def end(self, message: str):
        """Say it and end this rank; the launcher ends the others."""
        end_at_once(EXIT_STALLED, f"error: {message}")


def waits(stack: list[traceback.FrameSummary]) -> bool:
    """Whether a thread is inside a collective."""
    return any("/torch/distributed/" in frame.filename for frame in stack[-_INNERMOST:])


def verdict(seconds: float, told: dict[int, list], frozen: dict[int, list]) -> str:
    """Who holds up the run: `told` has (count, phase, waits, stack) of ranks, `frozen` the last beat."""
    if frozen:
        places = ", ".join(
            f"rank {r} (last seen at {phase})" for r, (_, phase, _) in frozen.items()
        )
        return f"{stalled(seconds)}: no answer from {places}"
    outside = {r: t for r, t in told.items() if not t[2]} or told
    behind = min(t[0] for t in outside.values())
    guilty = {r: t for r, t in outside.items() if t[0] == behind}
    if len(guilty) == len(told) > 1:
        return (
            f"{stalled(seconds)}: all ranks wait at {told[0][1]}, so the network or a GPU is at "
            f"fault; rank 0 is at\n{told[0][3]}"
        )
    if len(told) == 1 and not frozen:  # nobody waits for it
        ((_, phase, _, stack),) = told.values()
        return f"{stalled(seconds)}: it is at {phase}, whose stack is:\n{stack}"
    return "\n".join(
        f"{stalled(seconds)}: the others wait for rank {r} at {phase}, whose stack is:\n{stack}"
        for r, (_, phase, _, stack) in guilty.items()
    )


def stalled(seconds: float) -> str:
    """What is wrong, without who is to blame."""
    return f"the run has made no progress for {seconds:g} s"
