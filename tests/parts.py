"""The quick part of a test, which `make test` runs, and what other targets run of it."""

from __future__ import annotations

from functools import partial

import pytest

# A parameter that shows with another value what a quick one shows: for `make test-exhaustive`.
slow = partial(pytest.param, marks=pytest.mark.exhaustive)
# One that every change should meet, but not within minutes: for `make test-rest`.
rest = partial(pytest.param, marks=pytest.mark.slow)


def in_parts(cases, *quick: int, then: tuple[int, ...] = ()) -> list:
    """Parameters that are lists of cases: the quick ones by their places, those for `make test-rest`,
    and for `make test-exhaustive` all others."""
    chosen, later, others = [], [], []
    for i, case in enumerate(cases):
        (chosen if i in quick else later if i in then else others).append(case)
    assert len(chosen) == len(quick) and len(later) == len(then)
    parts = [pytest.param(chosen, id="quick")]
    parts += [rest(later, id="more")] if later else []
    return parts + ([slow(others, id="rest")] if others else [])
