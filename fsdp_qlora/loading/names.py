"""What a checkpoint calls the tensors of a model, where the two differ.

Published files are older than the code that reads them: GPT-2's lack the `transformer.` before each
name, Mixtral's hold every expert by itself. transformers keeps a list of such conversions, which is
asked here; none is written down a second time. A tensor that has to be put together is described by
where its rows lie, so that each rank still reads only its own.

Shapes: I inputs, O outputs, E experts.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..model.conv1d import transposed_weights
from .weight_files import Checkpoint, Stored


@dataclass(frozen=True)
class Transposed:
    """A weight (O, I) whose file holds (I, O); read whole, as its rows are columns there."""
    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1]

    def spans(self, start: int, stop: int) -> list[Stored]:
        return [self.stored]

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        return tensors[0].t()[start:stop]


def match_names(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Let a checkpoint know its tensors by the names and shapes of a transformers model, in place.

    The model is as transformers makes it: no adapters yet, nothing quantized.
    """
    wanted = {name: p.shape for name, p in model.named_parameters()}
    if not wanted.keys() <= checkpoint.shapes.keys(): checkpoint.rename(new_names(model, checkpoint))
    for name in transposed_weights(model) & checkpoint.stored.keys():
        stored = checkpoint.stored[name]  # bitsandbytes' 4-bit weights lie as W does
        if stored.shape == wanted[name][::-1]: checkpoint.made[name] = Transposed(stored)
    return checkpoint


def new_names(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """The model's name of every tensor of a checkpoint that has another one there."""
    found = {old: new for old, (new, _) in renamed(model, checkpoint.shapes).items()}
    return {old: new for old, new in found.items() if old != new}


def renamed(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """For each name in a checkpoint, the model's, and the pattern of the conversion if there is one."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    return {name: rename_source_key(name, renamings, converters, prefix, state) for name in names}
