"""Models whose blocks differ: what is counted of one block, as the mean or the most of all.

A function of a shape and a plan that counts one block is given each kind of block by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from ..catalog.arch import ModelShape
from ..plan import Plan


def mean_of_blocks(of: Callable) -> Callable:
    """`of(shape, plan, ...)`, numbers of one block, as the mean over a model's blocks."""

    @wraps(of)
    def mean(shape: ModelShape, plan: Plan, *more):
        if not shape.kinds:
            return of(shape, plan, *more)
        found = [
            (of(kind, plan, *more), count / shape.layers) for kind, count in shape.block_kinds()
        ]
        return _weighted(found)

    return mean


def most_of_blocks(of: Callable) -> Callable:
    """The same for the kind of block of which there is most."""

    @wraps(of)
    def most(shape: ModelShape, plan: Plan, *more):
        if not shape.kinds:
            return of(shape, plan, *more)
        return max((of(kind, plan, *more) for kind, _ in shape.block_kinds()), key=_total)

    return most


def _weighted(found: list):
    """The sum of numbers by their weights; of tuples and dicts of numbers, part by part."""
    first, _ = found[0]
    if isinstance(first, dict):
        names = dict.fromkeys(name for parts, _ in found for name in parts)
        return {
            name: _weighted([(parts[name], w) for parts, w in found if name in parts])
            for name in names
        }
    if isinstance(first, tuple):
        return tuple(_weighted([(parts[i], w) for parts, w in found]) for i in range(len(first)))
    return sum(number * weight for number, weight in found)


def _total(found) -> float:
    return sum(found) if isinstance(found, tuple) else found
