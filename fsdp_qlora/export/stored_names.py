"""A whole model's tensors under the names of its files, as transformers' own `save_pretrained` writes them.

transformers 5 keeps the experts of a block in one tensor, and others under new names. vLLM, llama.cpp and
transformers 4 read files in which each expert is by itself, as makers publish them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from ..model.wrappers import wrapper_of

_BLOCK = re.compile(r".*?\.\d+\.")


def by_block(named: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Tensors of a block together, which is all that a name of a file can be made of."""

    def block(pair: tuple[str, Tensor]) -> str:
        found = _BLOCK.match(pair[0])
        return found[0] if found else pair[0]

    for _, group in groupby(named, block):
        yield dict(group)


def under_stored_names(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A block's tensors, by their names in the model that the files are of, as the files have them."""
    wrapper = wrapper_of(model)
    stored = revert_weight_conversion(wrapper.whole if wrapper else model, tensors)
    made = {name: tensor.clone() for name, tensor in stored.items() if name not in tensors}
    return {**stored, **made}  # what was cut out of a tensor does not keep all of it
