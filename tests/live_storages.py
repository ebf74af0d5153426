"""The bytes of storages that are alive while something runs, looked at after every op.

FSDP2 frees what it has gathered by resizing storages to 0, so each storage that some op has given is asked
for its size. Not seen is what a kernel allocates inside of itself, and left out what gloo does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Within it, `peak` is the most bytes that were alive after an op, and `callers` what had called that.

    Names of functions with their modules, from the innermost on.
    """

    def __init__(self):
        super().__init__()
        self.storages: dict[int, weakref.ref] = {}
        self.forget_peak()

    def forget_peak(self):
        """Begin anew, with what is alive now."""
        self.peak, self.callers = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # to be asked again for what is done with this rank's part
        result, callers = func(*args, **(kwargs or {})), [*_callers()]
        if any(name.startswith(distributed_c10d.__name__) for name in callers):
            return result
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and not (x.is_meta or is_traceable_wrapper_subclass(x)):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        # Autograd adds two gradients in place, but within a mode into a third.
        if func is not torch.ops.aten.add.Tensor or not _called_by_autograd(callers):
            self._look(callers)
        return result

    def _look(self, callers: list[str]):
        alive = {key: ref() for key, ref in self.storages.items()}
        self.storages = {key: self.storages[key] for key, s in alive.items() if s is not None}
        total = sum(s.nbytes() for s in alive.values() if s is not None)
        if total > self.peak:
            self.peak, self.callers = total, callers


def _called_by_autograd(callers: list[str]) -> bool:
    """Whether no Python is between the engine and the op, but for what torch puts around a mode."""
    return any(name.endswith("._engine_run_backward") for name in callers[:3])


def _callers() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame:
        yield f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
        frame = frame.f_back
