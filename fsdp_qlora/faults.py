"""What ranks tell each other while they train, so that all do the same about it.

A signal, a full disk or a flipped bit is seen by one rank. Each step begins with a sum of token
counts over all ranks; what a rank has to tell is added to it, which costs nothing and makes every
decision common.
"""
from __future__ import annotations

from collections.abc import Callable

from .dist import sum_over_ranks


class StopRequested(Exception):
    """All ranks were asked to stop, and agreed to; the state is as it was after the last step."""


class Agreement:
    """Sums counts over ranks, and asks each rank its questions on the way.

    questions: name -> a function that says yes on a rank that has something to tell. `heard` keeps
    how many ranks said yes the last time. A yes to "stop" raises StopRequested on every rank.
    """

    def __init__(self, **questions: Callable[[], bool]):
        self.questions, self.heard = questions, dict.fromkeys(questions, 0)

    def __call__(self, *counts: int) -> list[int]:
        answers = [int(ask()) for ask in self.questions.values()]
        sums = sum_over_ranks(*counts, *answers)
        self.heard = dict(zip(self.questions, sums[len(counts):], strict=True))
        if self.heard.get("stop"): raise StopRequested
        return sums[:len(counts)]
