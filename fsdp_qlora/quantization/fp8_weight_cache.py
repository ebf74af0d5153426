"""What fp8 products make of frozen weights once and keep, where weights stay in place.

The scales of a weight's rows always: they are a few KB, and making them anew is up to four launches of
a product's nine, which the host pays for where no CUDA graph is replayed. If asked, the weight's whole
forms too: a product takes it in another form than it is stored in, and making that anew in each forward
and backward is a tenth of a short step. The forms of all layers take two bytes a weight.

Ops look up what is kept by the addresses of the weights that they are given, as these are all that reaches
an opaque op, compiled or not. What is kept changes no result, so torch.compile and autograd need not know.
It is of no use when a weight was moved or changed where it is, and is made anew then: the weight's own
address and version tell, but for changes through `.data`, after which `forget_fp8_weight` must be called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Fp8Weight = tuple[Tensor, list[Tensor]]  # weights in fp8, and the scales of each one's rows
Made = TypeVar("Made", Tensor, Fp8Weight)
_Address = tuple[torch.device, int, torch.Size]
_CACHES: WeakValueDictionary[_Address, Fp8WeightCache] = WeakValueDictionary()


class Fp8WeightCache:
    """What is kept of a model's weights: the scales of rows, and with `forms` the weights in fp8.

    Whoever has it keeps them. A form is one for the forward and one for the backward of each.
    """

    def __init__(self, weights: Iterable[Tensor], forms: bool = True):
        self.weights, self.forms = {_address(weight): weight for weight in weights}, forms
        # by use and weight: for which call, and what
        self.kept: dict[tuple, tuple[tuple, Tensor | Fp8Weight]] = {}
        _CACHES.update(dict.fromkeys(self.weights, self))

    def tensors(self) -> list[Tensor]:
        """All that is kept by now."""
        kept = [
            [made] if isinstance(made, Tensor) else [made[0], *made[1]]
            for _, made in self.kept.values()
        ]
        return [*{id(tensor): tensor for tensors in kept for tensor in tensors}.values()]

    def find(self, use: str, weights: list[Tensor], columns: int, make: Callable[[], Made]) -> Made:
        """What `make` gives for these weights, kept. A second one of the same use is not kept."""
        places = [_address(weight) for weight in weights]
        versions = [self._version(place) for place in places]
        call, keys = (columns, *places, *versions), [(use, place) for place in places]
        found, made = self.kept.get(keys[0], (None, None))
        if found == call:
            return made
        # What a graph allocates in its capture is the graph's, and is filled only when it is replayed.
        capturing = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or None in versions or any(key in self.kept for key in keys):
            return make()
        with torch.inference_mode(False):
            made = make()  # or training could not write into it
        self.kept.update(dict.fromkeys(keys, (call, made)))
        return made

    def forget(self, place: _Address):
        """Drop all that was made of the weight at an address."""
        self.kept = {key: kept for key, kept in self.kept.items() if place not in kept[0]}

    def _version(self, place: _Address) -> int | None:
        """How often a weight was changed in place; None if it is no longer there, but another may be."""
        weight = self.weights.get(place)
        return None if weight is None or _address(weight) != place else weight._version


def cached_row_scales(weight: Tensor, use: str, make: Callable[[], Tensor]) -> Tensor:
    """What `make` gives: the scales of a weight's rows, in one of the `use`s that a product has of them.

    Kept from the first call on, if someone keeps what is made of the weight.
    """
    cache = _CACHES.get(_address(weight))
    return make() if cache is None else cache.find(use, [weight], 0, make)


def cached_fp8_weight(
    use: str, weights: list[Tensor], columns: int, make: Callable[[], Fp8Weight]
) -> Fp8Weight:
    """What `make` gives for these weights side by side behind `columns` of an adapter.

    Kept from the first call on, if someone keeps forms of them. `use` is "forward" or "backward".
    """
    cache = _CACHES.get(_address(weights[0]))
    keeps = cache is not None and cache.forms
    return cache.find(use, weights, columns, make) if keeps else make()


def forget_fp8_weight(weight: Tensor):
    """Drop what is kept of a weight whose numbers change where they are, if someone keeps it."""
    place = _address(weight)
    if cache := _CACHES.get(place):
        cache.forget(place)


def _address(weight: Tensor) -> _Address:
    """What tells a weight from every other that lives."""
    return weight.device, weight.data_ptr(), weight.shape
