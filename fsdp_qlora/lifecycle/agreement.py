"""How all ranks learn of what one of them knows: a signal, a full disk, a flipped bit.

Each step begins with a sum of token counts over all ranks. The answers of a rank are added to it, which
costs nothing and makes every decision common.
"""

from __future__ import annotations

from collections.abc import Callable

from ..dist import sum_over_ranks
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
