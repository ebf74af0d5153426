"""fp8 forms of frozen weights that are made once and kept, where weights stay in place.

A product of a frozen weight takes it in another form than it is stored in, and making that anew in each
forward and backward is a tenth of a short step. Kept, the forms of all layers take two bytes a weight.

Ops look a form up by the addresses of the weights that they are given, as these are all that reaches an
opaque op, compiled or not. What is kept changes no result, so torch.compile and autograd need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Fp8Weight = tuple[Tensor, list[Tensor]]  # weights in fp8, and the scales of each one's rows
_Address = tuple[torch.device, int, torch.Size]
_CACHES: WeakValueDictionary[_Address, Fp8WeightCache] = WeakValueDictionary()


class Fp8WeightCache:
    """The forms of a model's weights: one for the forward and one for the backward of each.

    Whoever has it keeps them; it holds on to the weights, so that no others get their addresses.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self.weights = [*weights]
        # by use and weight: for which call, and what
        self.forms: dict[tuple, tuple[tuple, Fp8Weight]] = {}
        _CACHES.update({_address(weight): self for weight in self.weights})

    def tensors(self) -> list[Tensor]:
        """All that is kept by now."""
        forms = {id(form): form for _, form in self.forms.values()}
        return [tensor for w8, scales in forms.values() for tensor in (w8, *scales)]

    def find(
        self, use: str, weights: list[Tensor], columns: int, make: Callable[[], Fp8Weight]
    ) -> Fp8Weight:
        """`cached_fp8_weight` for these weights. A second form of one that has one already is not kept."""
        places = [(use, _address(weight)) for weight in weights]
        call = (columns, *places)
        found, form = self.forms.get(places[0], (None, None))
        if found == call:
            return form
        # What a graph allocates in its capture is the graph's, and is filled only when it is replayed.
        capturing = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or any(place in self.forms for place in places):
            return make()
        with torch.inference_mode(False):
            form = make()  # or training could not write into it
        self.forms.update(dict.fromkeys(places, (call, form)))
        return form


def cached_fp8_weight(
    use: str, weights: list[Tensor], columns: int, make: Callable[[], Fp8Weight]
) -> Fp8Weight:
    """What `make` gives for these weights side by side behind `columns` of an adapter.

    Kept from the first call on, if someone keeps forms of them. `use` is "forward" or "backward".
    """
    cache = _CACHES.get(_address(weights[0]))
    return make() if cache is None else cache.find(use, weights, columns, make)


def forget_fp8_weight(weight: Tensor):
    """Drop the forms of a weight whose numbers change where they are, if someone keeps them."""
    place = _address(weight)
    if cache := _CACHES.get(place):
        cache.forms = {
            key: (call, form)
            for key, (call, form) in cache.forms.items()
            if not _is_in(place, call)
        }


def _is_in(place: _Address, call: tuple) -> bool:
    return any(place == where for _, where in call[1:])


def _address(weight: Tensor) -> _Address:
    """What tells a weight from every other that lives."""
    return weight.device, weight.data_ptr(), weight.shape
