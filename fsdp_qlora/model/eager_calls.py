"""Which calls of compiled blocks run eager: those whose graphs would serve no other call.

A graph that fills a cache is of one layer, and of an empty or a filled cache: torch would make two for each
layer, then give up, and run training eager too. A block that records what is inside of it (attentions,
router logits) does so in hooks of transformers
(https://github.com/huggingface/transformers/blob/main/src/transformers/utils/output_capturing.py), which
stay on its modules from the first such call on. A graph made earlier would leave them out, and one made
later would break at the ContextVar that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from transformers.utils import output_capturing

from .blocks import gets_cache

_OF_A_BLOCK = {"hidden_states", "_hidden_states_layers"}  # recorded outside of its forward
_EAGER = "force_eager"


class EagerCalls:
    """Sends calls of a model's compiled functions to their eager code where a graph would be of no other."""

    def __init__(self):
        self.of_block = False  # whether the block that ran last was eager

    def block(self, forward: Callable, *args, **kwargs):
        """A block's forward: eager, with the MLP inside of it, where it fills a cache or is recorded."""
        self.of_block = gets_cache(*args, **kwargs) or _is_recorded()
        with torch.compiler.set_stance(_EAGER) if self.of_block else _recording_nothing():
            return forward(*args, **kwargs)

    def norm(self, forward: Callable, *args, **kwargs):
        """The forward of the norm after the blocks: as theirs, of prompts and tokens of any number."""
        with torch.compiler.set_stance(_EAGER) if self.of_block else nullcontext():
            return forward(*args, **kwargs)


def _is_recorded() -> bool:
    """Whether the forward that this is a part of returns what is inside of blocks."""
    return bool((output_capturing._active_collector.get() or {}).keys() - _OF_A_BLOCK)


@contextmanager
def _recording_nothing() -> Iterator[None]:
    """Let hooks that record nothing now read a plain attribute, which torch can trace."""
    collector = output_capturing._active_collector
    if not hasattr(collector, "compiling"):  # a plain ContextVar in older transformers
        yield
        return
    was, collector.compiling = collector.compiling, True
    try:
        yield
    finally:
        collector.compiling = was
