"""What goes wrong while ranks train, and how all of them do the same about it.

A signal or a full disk is seen by one rank. Each step begins with a sum of token counts over all
ranks; what a rank has to tell is added to it, which costs nothing and makes every decision common.
A loss or gradient that is not a number needs no telling: both are sums over ranks already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ..dist import sum_over_ranks
from ..observe.metrics import StepMetrics
from .signals import StopRequested


class Agreement:
    """Sums counts over ranks, and asks each rank its questions on the way.

    questions: name -> a function that says yes on a rank that has something to tell. `heard` keeps
    how many ranks said yes the last time. A yes to "stop" raises StopRequested on every rank. `mark`
    is called first: this rank has come so far.
    """

    def __init__(self, mark: Callable[[], None] = lambda: None, **questions: Callable[[], bool]):
        self.mark, self.questions, self.heard = mark, questions, dict.fromkeys(questions, 0)

    def __call__(self, *counts: int) -> list[int]:
        self.mark()
        answers = [int(ask()) for ask in self.questions.values()]
        sums = sum_over_ranks(*counts, *answers)
        self.heard = dict(zip(self.questions, sums[len(counts) :], strict=True))
        if self.heard.get("stop"):
            raise StopRequested
        return sums[: len(counts)]


class RollBack(Exception):
    """Too many bad steps: the run is to go on from its last good checkpoint."""


class BadSteps:
    """Steps whose loss or gradient is not finite: no rank takes them; after `limit` in a row `policy`.

    policy: stop, skip (go on for ever) or rollback. Steps are numbered from 1, as they are logged;
    `left_out` holds indices from 0, as the loader counts.
    """

    def __init__(self, policy: str, limit: int):
        self.policy, self.limit = policy, limit
        self.in_a_row: list[int] = []
        self.rows: dict[int, Sequence] = {}  # of the steps that were queued and not read
        self.left_out: set[int] = set()
        self.went_back_to: Path | None = None

    def see(self, metrics: StepMetrics) -> Sequence | None:
        """The rows of a step that no rank took, else None; an fp16 overflow counts for none in a row."""
        rows = self.rows.pop(metrics.step, ())
        if metrics.overflowed:
            return rows
        if metrics.is_finite:
            self.in_a_row = []
            return None
        self.in_a_row.append(metrics.step)
        return rows

    def decide(self):
        """After a bad step: raises ValueError or RollBack if it is one too many."""
        if self.policy == "skip" or len(self.in_a_row) < self.limit:
            return
        if self.policy == "rollback":
            raise RollBack
        raise ValueError(
            f"{self.reason()}; try a lower --lr, clip gradients, or --on_bad_steps rollback"
        )

    def reason(self) -> str:
        """What happened."""
        return (
            f"the loss or gradient of steps {self.in_a_row[0]} to {self.in_a_row[-1]} is not a "
            "number"
        )

    def leave_out(self, folder: Path | None):
        """Skip the rows of these steps from now on. Raises ValueError if going back can't help."""
        if folder is None:
            raise ValueError(self.reason() + ", and there is no checkpoint to go back to")
        if folder == self.went_back_to:
            raise ValueError(
                f"{self.reason()}, also after going back to {folder}; try a lower --lr"
            )
        self.left_out |= {step - 1 for step in self.in_a_row}
        self.in_a_row, self.rows, self.went_back_to = [], {}, folder
