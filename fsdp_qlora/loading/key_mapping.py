"""What a checkpoint calls the tensors of a model, where the two differ.

Published files are older than the code that reads them: GPT-2's lack the `transformer.` before each
name, Mixtral's hold every expert by itself. transformers keeps a list of such conversions, which is
asked here; none is written down a second time. A tensor that has to be put together is described by
where its rows lie, so that each rank still reads only its own.

Shapes: I inputs, O outputs, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ..experts import stacked_weights
from ..model.conv1d import transposed_weights
from ..model.wrappers import wrapper_of
from .weight_files import Checkpoint, FileSpan

_BESIDE_A_WEIGHT = re.compile(r"(?<=\.weight)\..*")  # what bitsandbytes stores with a 4-bit one


@dataclass(frozen=True)
class _Transposed:
    """A weight (O, I) whose file holds (I, O); read whole, as its rows are columns there."""

    stored: FileSpan

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[::-1]

    @property
    def numbers(self) -> tuple[FileSpan, ...]:
        return (self.stored,)

    def spans(self, start: int, stop: int) -> list[FileSpan]:
        return [self.stored]

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        return tensors[0].t()[start:stop]


@dataclass(frozen=True)
class _Stacked:
    """Rows of several tensors of one width below each other, as of all experts of a block."""

    parts: tuple  # FileSpan, or weights of native_formats.py

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]

    @property
    def numbers(self) -> tuple[FileSpan, ...]:
        return tuple(part for part in self.parts if isinstance(part, FileSpan))

    def inside(self, start: int, stop: int) -> Iterator[tuple[Any, int, int, list[FileSpan]]]:
        """Each part of which some rows are wanted, with these and what must be read for them."""
        first = 0
        for part in self.parts:
            begin, end = max(start - first, 0), min(stop - first, part.shape[0])
            if begin < end:
                is_stored = isinstance(part, FileSpan)
                spans = [part.rows(begin, end)] if is_stored else part.spans(begin, end)
                yield part, begin, end, spans
            first += part.shape[0]

    def spans(self, start: int, stop: int) -> list[FileSpan]:
        return [span for *_, spans in self.inside(start, stop) for span in spans]

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        left, found = iter(tensors), []
        for part, begin, end, spans in self.inside(start, stop):
            read = list(islice(left, len(spans)))
            found.append(read[0] if isinstance(part, FileSpan) else part.rows(read, begin, end))
        return torch.cat(found) if found else torch.empty(0, *self.shape[1:])


@dataclass(frozen=True)
class _TransposedStack:
    """Rows (E O, I) of experts whose file holds (E, I, O); an expert is read whole for any of its rows."""

    stored: Any  # in a file, or made of what is there

    @property
    def numbers(self) -> tuple[FileSpan, ...]:
        return (self.stored,) if isinstance(self.stored, FileSpan) else self.stored.numbers

    @property
    def shape(self) -> tuple[int, ...]:
        experts, inputs, outputs = self.stored.shape
        return experts * outputs, inputs

    def experts(self, start: int, stop: int) -> tuple[int, int]:
        """Those whose rows these are."""
        outputs = self.stored.shape[2]
        return start // outputs, -(-stop // outputs)

    def spans(self, start: int, stop: int) -> list[FileSpan]:
        experts = self.experts(start, stop)
        if isinstance(self.stored, FileSpan):
            return [self.stored.rows(*experts)]
        return self.stored.spans(*experts)

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        experts = self.experts(start, stop)
        is_stored = isinstance(self.stored, FileSpan)
        each = tensors[0] if is_stored else self.stored.rows(tensors, *experts)
        first = experts[0] * self.stored.shape[2]
        return each.transpose(1, 2).flatten(0, 1)[start - first : stop - first]


def match_names(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Let a checkpoint know its tensors by the names and shapes of a transformers model, in place.

    The model is as transformers makes it: no adapters yet, nothing quantized.
    """
    if wrapper := wrapper_of(model):
        wrapper.files = checkpoint
        wrapper.others = tower_tensors(model, checkpoint)
    wanted = {name: p.shape for name, p in model.named_parameters()}
    checkpoint.unused = _unused_names(model, checkpoint)
    if not wanted.keys() <= checkpoint.shapes.keys():
        checkpoint.rename(_new_names(model, checkpoint))
    _untie_other_head(model, checkpoint)
    for name in transposed_weights(model) & checkpoint.stored.keys():
        stored = checkpoint.stored[name]  # bitsandbytes' 4-bit weights lie as W does
        if stored.shape == wanted[name][::-1]:
            checkpoint.made[name] = _Transposed(stored)
    _join_parts(model, checkpoint, wanted)
    _stack_experts(model, checkpoint)
    return checkpoint


def _untie_other_head(model: nn.Module, checkpoint: Checkpoint):
    """Give a tied model a head of its own, in place, if the files hold another one, as transformers does."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    names = {id(m): f"{name}.weight" for name, m in model.named_modules()}
    ends = names[id(embedding)], names[id(head)]
    if all(end in checkpoint.stored for end in ends) and checkpoint.differ(*ends):
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
        model.config.get_text_config().tie_word_embeddings = False


def _join_parts(model: nn.Module, checkpoint: Checkpoint, wanted: Container[str]):
    """Let a checkpoint know weights whose rows are those of several of its tensors, as q, k and v."""
    converters = _by_pattern(model)
    parts: dict[str, dict[int, str]] = {}
    for name, (new, pattern) in renamed(model, checkpoint.stored).items():
        if pattern is None or new not in wanted or new in checkpoint.shapes:
            continue
        converter = converters[pattern]
        if all(isinstance(op, Concatenate) and op.dim == 0 for op in converter.operations):
            parts.setdefault(new, {})[converter.source_patterns.index(pattern)] = name
    for new, names in parts.items():
        checkpoint.made[new] = _Stacked(tuple(checkpoint.stored[names[i]] for i in sorted(names)))


def _stack_experts(model: nn.Module, checkpoint: Checkpoint):
    """Let a checkpoint know the stacked experts of a model, from one tensor of all or one of each."""
    stacks = stacked_weights(model)
    if not stacks:
        return
    parts = parts_of_stacks(model, checkpoint)
    for name, stack in stacks.items():
        whole = checkpoint.stored.get(stack.stored_name)
        any_whole = whole or checkpoint.made.get(stack.stored_name)
        if any_whole and stack.transposed:
            checkpoint.made[name] = _TransposedStack(any_whole)
        elif whole:  # (E, O, I)
            checkpoint.stored[name] = whole.seen_as(whole.dtype, (-1, whole.shape[-1]))
        elif found := parts.get(stack.stored_name):
            known = checkpoint.stored | checkpoint.made
            checkpoint.made[name] = _Stacked(tuple(known[part] for part in found))


def parts_of_stacks(model: nn.Module, checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """For each weight of experts by its name in transformers: the names of its parts in the files.

    Expert by expert; one name where a tensor holds them all.

    Raises ValueError where they do not simply lie below each other.
    """
    converters = _by_pattern(_whole(model))
    found: dict[str, dict[tuple[int, int], str]] = {}
    wanted = {stack.stored_name for stack in stacked_weights(model).values()}
    for name, (new, pattern) in renamed(model, checkpoint.shapes).items():
        if new not in wanted:
            continue
        if pattern is None:
            found[new] = {(0, 0): name}
            continue
        converter = converters[pattern]
        _check_stackable(converter, name, checkpoint)
        expert = int(re.findall(r"\.(\d+)\.", name)[-1])
        found.setdefault(new, {})[expert, converter.source_patterns.index(pattern)] = name
    return {new: tuple(names[place] for place in sorted(names)) for new, names in found.items()}


def _check_stackable(converter: WeightConverter, name: str, checkpoint: Checkpoint):
    """Refuse a tensor that is no plain part of a stack. Raises ValueError naming --model_name."""
    merge, *rest = converter.operations
    plain = (
        isinstance(merge, MergeModulelist)
        and merge.dim == 0
        and all(isinstance(op, Concatenate) and op.dim == 1 for op in rest)
    )
    scaled = any(other in checkpoint.stored for other in (f"{name}_scale_inv", f"{name}.absmax"))
    if plain and not scaled:
        return
    fault = "experts that are already quantized" if scaled else "experts in an unknown order"
    raise ValueError(f"--model_name {checkpoint.folder}: {name}: {fault}; give the 16-bit model")


def _unused_names(model: nn.Module, checkpoint: Checkpoint) -> list[str]:
    """Tensors of a checkpoint that are no part of the model, but for those that its class expects."""
    own = {
        name
        for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    }
    own |= {stack.stored_name for stack in stacked_weights(model).values()}
    others = checkpoint.shapes.keys() - own - tower_tensors(model, checkpoint)
    whole = _whole(model)
    expected = [*(getattr(whole, "_keys_to_ignore_on_load_unexpected", None) or ()), r"\.inv_freq$"]
    return sorted(
        old
        for old, (new, _) in renamed(model, others).items()
        if _BESIDE_A_WEIGHT.sub("", new) not in own
        and not any(re.search(pattern, new) for pattern in expected)
    )


def _new_names(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """The model's name of every tensor of a checkpoint that has another one there."""
    return {
        old: new
        for old, (new, part_of) in renamed(model, checkpoint.shapes).items()
        if old != new and part_of is None
    }


def renamed(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """For each name in a checkpoint, the model's, and the pattern of the conversion if there is one.

    What a wrapper's files hold beside the language model keeps its name.
    """
    found = _renamed_in(_whole(model), names)
    if not (wrapper := wrapper_of(model)):
        return found
    inside = {name: (wrapper.inner(new), pattern) for name, (new, pattern) in found.items()}
    return {
        name: (new, pattern) if new else (name, None) for name, (new, pattern) in inside.items()
    }


def tower_tensors(model: nn.Module, checkpoint: Checkpoint) -> set[str]:
    """Names in the files of what a wrapper has beside its language model."""
    if not (wrapper := wrapper_of(model)):
        return set()
    known = wrapper.whole.state_dict().keys()
    return {
        name
        for name, (new, _) in _renamed_in(wrapper.whole, checkpoint.shapes).items()
        if _BESIDE_A_WEIGHT.sub("", new) in known and not wrapper.inner(new)
    }


def _renamed_in(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, str | None]]:
    """`renamed` of a whole model."""
    renamings, converters = (
        _conversions(model, WeightRenaming),
        _conversions(model, WeightConverter),
    )
    state, prefix = model.state_dict(), model.base_model_prefix
    state |= {stack.stored_name: stack for stack in stacked_weights(model).values()}

    def new_name(name: str) -> tuple[str, str | None]:
        new, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if new not in state and name in state:  # a pattern that means another tensor
            return rename_source_key(name, [], [], prefix, state)
        return new, pattern

    return {name: new_name(name) for name in names}


def _whole(model: nn.Module) -> nn.Module:
    """The model that the files are of."""
    wrapper = wrapper_of(model)
    return wrapper.whole if wrapper else model


def _by_pattern(model: nn.Module) -> dict[str, WeightConverter]:
    """Each conversion that puts tensors together, by the patterns of their names."""
    return {
        pattern: converter
        for converter in _conversions(model, WeightConverter)
        for pattern in converter.source_patterns
    }


def _conversions(model: nn.Module, kind: type) -> list:
    """transformers' conversions of one kind for a model's files."""
    return [t for t in get_model_conversion_mapping(model) if isinstance(t, kind)]
