"""The quick part of a test, which `make test` runs, and the rest, for `make test-exhaustive`."""

from __future__ import annotations

from functools import partial

import pytest

# A parameter that shows with another value what a quick one shows.
slow = partial(pytest.param, marks=pytest.mark.exhaustive)


def in_parts(cases, *quick: int) -> list:
    """Two parameters: the list of the cases at these places, and that of all others."""
    chosen = [case for i, case in enumerate(cases) if i in quick]
    others = [case for i, case in enumerate(cases) if i not in quick]
    assert len(chosen) == len(quick) and others
    return [pytest.param(chosen, id="quick"), slow(others, id="rest")]
