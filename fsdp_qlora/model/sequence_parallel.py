"""Rows whose tokens are spread over ranks: each computes its part of every row.

Linear layers, norms and the loss need no token but their own. Attention does: before it, an all-to-all
turns the part of the tokens that a rank has of all heads into all tokens of its part of the heads, and
after it another turns them back ("DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509). In between,
rows are whole, so any attention takes them, packed or not, with windows, caps and sinks.

A batch has whole rows, equal on all ranks of a group; `SequenceParallel.part` cuts it before the decoder.
What it adds to the arguments that the decoder hands to its attention is what makes an exchange happen: a
forward without it, such as one that generates, has whole rows already.

Shapes: n ranks of a group, B rows, T tokens of a whole row, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..dist import ranks_from_env
from .attention import layers_with_a_state, makes_no_masks, masks_of_rows, takes_backends

_CUT = "sequence_parallel"  # the argument that the decoder hands on to its attention
_IGNORE = -100


class SequenceParallel:
    """This rank's part of rows that the ranks of its group share.

    Groups are of consecutive ranks, `size` each. Making one is a collective call of all ranks.
    """

    def __init__(self, size: int):
        self.size = size
        self.group, _ = dist.new_subgroups(size)
        self.rank = dist.get_rank(self.group)

    def part(
        self, config: PretrainedConfig, input_ids: Tensor, labels: Tensor, arguments: dict
    ) -> tuple[Tensor, Tensor, dict]:
        """Of a batch of whole rows (B, T): its ids, its labels (B, T / n), and the decoder's arguments.

        labels: already moved by one, as the last token of a part predicts the first one of the next.
        T is filled up to a multiple of n. Raises ValueError for a batch with a mask, and for packed rows
        that are no multiple of n.
        """
        more = -input_ids.shape[1] % self.size
        if more and "position_ids" in arguments:
            raise ValueError(
                f"packed rows of {input_ids.shape[1]} tokens can't be shared by {self.size} ranks; give "
                f"collate_packed pad_to_multiple_of={self.size}"
            )
        input_ids = nn.functional.pad(input_ids, (0, more))
        labels = nn.functional.pad(labels, (0, more), value=_IGNORE)
        if arguments.get("attention_mask") is not None:
            raise ValueError(
                "sequence_parallel takes rows that begin at their first token; give no attention_mask"
            )
        positions = arguments.get("position_ids")
        masks = _whole_masks(config, input_ids, positions)
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        given = dict(position_ids=self._own(positions), attention_mask=masks, **{_CUT: self})
        return (
            self._own(input_ids),
            self._own(labels),
            arguments | given,
        )

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's columns."""
        return whole.chunk(self.size, 1)[self.rank].contiguous()

    def heads_for_tokens(self, states: Tensor) -> Tensor:
        """(B, H, T / n, D) of all heads to (B, H / n, T, D) of all tokens."""
        b, h, t, d = states.shape
        # By receiving rank first: its heads. What arrives is by sending rank: its tokens.
        sent = states.reshape(b, self.size, h // self.size, t, d).permute(1, 3, 0, 2, 4)
        got = self._exchanged(sent)  # (n, T / n, B, H / n, D)
        return got.flatten(0, 1).permute(1, 2, 0, 3)

    def tokens_for_heads(self, states: Tensor) -> Tensor:
        """(B, T, H / n, D) of all tokens to (B, T / n, H, D) of all heads."""
        b, t, h, d = states.shape
        sent = states.reshape(b, self.size, t // self.size, h, d).transpose(0, 1)
        got = self._exchanged(sent)  # (n, B, T / n, H / n, D)
        return got.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def own_heads(self, values: Tensor) -> Tensor:
        """(H / n,) of (H,), a value for each head."""
        return values.chunk(self.size)[self.rank]

    def _exchanged(self, sent: Tensor) -> Tensor:
        """The parts (n, ...) that the ranks of the group have for this one, in their order."""
        return all_to_all_single_autograd(sent.contiguous(), None, None, self.group)


def apply_sequence_parallel(model: nn.Module, size: int) -> SequenceParallel | None:
    """Let a model's attention exchange heads for tokens in groups of `size` ranks; None for 1.

    The model's loss must cut its batches (`memory.chunked_cross_entropy`). Raises ValueError, before
    any rank waits for another, for a model that can't.
    """
    check_sequence_parallel(model, size)
    if size == 1:
        return None
    config = model.config.get_text_config()
    name = config._attn_implementation
    for shown in (_exchanging(name), _unmasked(name)):
        AttentionInterface.register(shown, partial(_attention, name))
    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(_exchanging(name), ALL_MASK_ATTENTION_FUNCTIONS[name])
    config._attn_implementation = _exchanging(name)
    return SequenceParallel(size)


def check_sequence_parallel(model: nn.Module, size: int):
    """Raise ValueError, with the remedy, where `size` ranks can't share a model's rows."""
    if size == 1:
        return
    if ranks_from_env().world_size % size:
        raise ValueError(
            f"--sequence_parallel {size}: {ranks_from_env().world_size} ranks are not a multiple of it; "
            "start as many, or leave it out"
        )
    if problem := _why_not(model.config.get_text_config(), size):
        raise ValueError(f"--sequence_parallel {size}: {problem}")


def _why_not(config: PretrainedConfig, size: int) -> str:
    """What keeps a model's rows on one rank; empty if nothing does."""
    heads = config.num_attention_heads
    if others := layers_with_a_state(config):
        return (
            f"{config.model_type} has layers of {others}, which carry a state along the tokens; "
            "leave it out"
        )
    if not takes_backends(type(config)):
        return f"the code of {config.model_type} takes no other attention; leave it out"
    if heads % size:
        fit = [n for n in range(2, heads + 1) if heads % n == 0]
        return f"{config.model_type} has {heads} heads to divide; use one of {fit}"
    return ""


def base_attention(config: PretrainedConfig) -> str:
    """The name of the attention that computes on whole rows."""
    return config.get_text_config()._attn_implementation.split(":")[0]


@contextmanager
def masks_are_given(config: PretrainedConfig):
    """Within it the decoder makes no masks: those that it is given are of whole rows."""
    config = config.get_text_config()
    name = config._attn_implementation
    config._attn_implementation = _unmasked(base_attention(config))
    try:
        yield
    finally:
        config._attn_implementation = name


def _exchanging(name: str) -> str:
    return f"{name}:exchanging"


def _unmasked(name: str) -> str:
    """The same where no mask is asked for."""
    return f"{name}:unmasked"


def _attention(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_parallel: SequenceParallel | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention `name` of whole rows: (B, T / n, H, D) of query (B, H, T / n, D), key and value.

    Without `sequence_parallel`, rows are whole already. Raises ValueError where it is missing in training.
    """
    kernel = _kernel(name, type(module).__module__)
    if sequence_parallel is None:
        if module.training:
            raise ValueError(
                f"--sequence_parallel: {type(module).__name__} is not told that rows are cut; "
                "leave it out"
            )
        return kernel(module, query, key, value, attention_mask, **kwargs)
    groups = query.shape[1] // key.shape[1]
    key, value = (_repeated(x, sequence_parallel.size, groups) for x in (key, value))
    if (sinks := kwargs.get("s_aux")) is not None:
        kwargs["s_aux"] = sequence_parallel.own_heads(sinks)
    query, key, value = map(sequence_parallel.heads_for_tokens, (query, key, value))
    part = _OfHeads(module, query.shape[1] // key.shape[1], sequence_parallel)
    out, _ = kernel(part, query, key, value, attention_mask, **kwargs)
    return sequence_parallel.tokens_for_heads(out), None


def _repeated(states: Tensor, size: int, groups: int) -> Tensor:
    """Key-value heads as often as the ranks of a group need: each has its queries' own."""
    heads = states.shape[1]
    times = lcm(heads, size) // heads
    if groups % times:
        times = groups  # of no use to share them out evenly: each query head gets its own
    return states.repeat_interleave(times, 1)


class _OfHeads:
    """An attention module as one that has this rank's heads only."""

    def __init__(self, module: nn.Module, groups: int, sequence: SequenceParallel):
        self._module, self._sequence, self.num_key_value_groups = module, sequence, groups

    def __getattr__(self, name: str):
        found = getattr(self._module, name)
        return self._sequence.own_heads(found) if name == "sinks" else found


def _kernel(name: str, code: str) -> Callable:
    """The attention of a name; of a model's own code where it is eager."""
    if name == "eager":
        return sys.modules[code].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _whole_masks(config: PretrainedConfig, input_ids: Tensor, positions: Tensor | None):
    """Masks of whole rows, by kind of layer where a model has several; None where none is needed."""
    config = copy.copy(config.get_text_config())
    config._attn_implementation = base_attention(config)
    packed = positions is not None
    if makes_no_masks(config) and not (packed and config._attn_implementation == "sdpa"):
        return None
    return masks_of_rows(config, input_ids.shape, config.dtype, input_ids.device, positions)
