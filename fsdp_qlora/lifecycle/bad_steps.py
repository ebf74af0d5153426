"""Steps whose loss or gradient is not a number, and what --on_bad_steps does about them.

Loss and gradient norm are sums over all ranks, so every rank sees the same and decides the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..observe.metrics import StepMetrics


class RollBack(Exception):
    """Too many bad steps: the run is to resume from its last good checkpoint."""


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
            f"{self.reason()}; lower --lr, clip gradients, or use --on_bad_steps rollback"
        )

    def reason(self) -> str:
        """What happened."""
        return (
            f"the loss or gradient of steps {self.in_a_row[0]} to {self.in_a_row[-1]} is not finite"
        )

    def leave_out(self, folder: Path | None):
        """Skip the rows of these steps from now on. Raises ValueError if going back can't help."""
        if folder is None:
            raise ValueError(self.reason() + ", and there is no checkpoint to roll back to")
        if folder == self.went_back_to:
            raise ValueError(f"{self.reason()}, even after rolling back to {folder}; lower --lr")
        self.left_out |= {step - 1 for step in self.in_a_row}
        self.in_a_row, self.rows, self.went_back_to = [], {}, folder
