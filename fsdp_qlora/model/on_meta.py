"""Modules whose parameters are on the meta device from the start, and whose buffers are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import init_empty_weights
from torch.overrides import TorchFunctionMode

_LARGE = 2**28  # values; no buffer has as many


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within it, modules are made without memory for their parameters; buffers are computed as usual."""
    with init_empty_weights(include_buffers=False), _LargeOnMeta():
        yield


class _LargeOnMeta(TorchFunctionMode):
    """Makes large tensors on meta: accelerate moves parameters there only when a module is given them.

    The experts of one block of a mixture are up to 77 GB by then, which not every machine grants.
    """

    _MAKES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self._MAKES and kwargs.get("device") is None:
            on_meta = func(*args, **kwargs | dict(device="meta"))
            if on_meta.numel() >= _LARGE:
                return on_meta
        return func(*args, **kwargs)
