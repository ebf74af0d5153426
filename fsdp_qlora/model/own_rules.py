"""Mixers that compute by an op of this project where transformers' code calls a function of its file."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache, wraps

from torch import nn

from ..own_forward import compute_by


def has_own_rule(mixer: nn.Module) -> bool:
    """Whether a mixer computes by an op of this project."""
    return getattr(mixer, "has_own_rule", False)


@cache
def functions_called(kind: type[nn.Module]) -> frozenset[str]:
    """The names that a mixer's forward calls functions by, or reads attributes by."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset(code.co_names if code else ())


def use_own_rule(mixer: nn.Module, rules: dict[str, Callable[[Callable], Callable]]):
    """Let a mixer call ours for functions of its class's file, in place; others call theirs as before.

    rules: by a function's name, what makes ours of theirs.
    """
    for name, rule in rules.items():
        _make_choosable(type(mixer).__module__, name, rule)
    compute_by(mixer, _by_own_rule)
    mixer.has_own_rule = True


def _by_own_rule(mixer: nn.Module, own, *args, **kwargs):
    """A mixer's forward, which hands on to the rule what it does not know."""
    return own(mixer, *args, own_rule=True, **kwargs)


def _make_choosable(file: str, name: str, rule: Callable[[Callable], Callable]):
    """Let those who call a function of transformers ask for ours; for others it stays as it is."""
    theirs = getattr(sys.modules[file], name)
    if hasattr(theirs, "own_rule"):
        return
    ours = rule(theirs)

    @wraps(theirs)
    def chosen(*args, own_rule: bool = False, **kwargs):
        return (ours if own_rule else theirs)(*args, **kwargs)

    chosen.own_rule = True  # type: ignore[attr-defined]
    setattr(sys.modules[file], name, chosen)
