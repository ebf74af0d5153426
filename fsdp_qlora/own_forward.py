"""Modules that compute in another way than their class does, and go on to share compiled code.

torch.compile looks at what a module's `forward` is. An attribute is another object on each module: blocks
that are alike would each be compiled, and after eight of them torch runs all others eager, in silence. A
class that is made once for all modules of a kind is the same for them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

from torch import nn


def compute_by(module: nn.Module, forward: Callable):
    """Let a module compute `forward(module, own, ...)`, in place; `own(module, ...)` is its class's way.

    forward: a function of a file, not one made for the module; what it needs is the module's.
    """
    assert "forward" not in vars(module), "an attribute would hide the class's forward"
    module.__class__ = _class_with(type(module), forward)


@cache
def _class_with(kind: type[nn.Module], forward: Callable) -> type[nn.Module]:
    """A class of the same name, since some code knows modules by it."""

    @wraps(kind.forward)
    def by_forward(self, *args, **kwargs):
        return forward(self, kind.forward, *args, **kwargs)

    names = dict(__module__=kind.__module__, __qualname__=kind.__qualname__, __doc__=kind.__doc__)
    return type(kind.__name__, (kind,), names | dict(forward=by_forward))
