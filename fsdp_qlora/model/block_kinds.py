"""How many kinds of decoder blocks a model has, each of which torch.compile makes graphs of its own for."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from torch import nn

from .blocks import decoder_blocks

_PLAIN = (bool, int, float, str, type(None))
_PLACES = ("idx", "index", "number")  # in names of attributes that say only which block it is


def num_block_kinds(model: nn.Module) -> int:
    """Kinds of decoder blocks: what they consist of, what is trained in them, what they keep."""
    return len({_kind(block) for block in decoder_blocks(model)})


def _kind(block: nn.Module) -> Hashable:
    return tuple((name, _facts(module)) for name, module in block.named_modules())


def _facts(module: nn.Module) -> Hashable:
    """What a graph depends on of one module alone."""
    weights = tuple(
        (name, p.shape, p.dtype, p.requires_grad)
        for name, p in module._parameters.items()
        if p is not None
    )
    settings = tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and not any(place in name for place in _PLACES)
    )
    forward = vars(module).get("forward")
    given = forward.args if isinstance(forward, partial) else ()
    policy = tuple(value for value in given if isinstance(value, _PLAIN))
    return type(module), weights, settings, policy
