"""Rows whose tokens are spread over ranks: each computes its part of every row.

Linear layers, norms and the loss need no token but their own. Attention does: before it, an all-to-all
turns the part of the tokens that a rank has of all heads into all tokens of its part of the heads, and
after it another turns them back ("DeepSpeed Ulysses", https://arxiv.org/abs/2309.14509). In between,
rows are whole, so any attention takes them, packed or not, with windows, caps and sinks.

Where n doesn't divide the heads, only u of n ranks exchange, the most that do; each such circle of ranks has
a part of the row's queries, and keys and values go round to all n / u circles ("context parallelism" of
https://arxiv.org/abs/2407.21783, whose keys and values are gathered, too). A circle's queries are two spans,
one from the row's start and one from its end, so that under a causal mask all have as much to compute.

A batch has whole rows, equal on all ranks of a group; `SequenceParallel.part` cuts it before the decoder.
What it adds to the arguments that the decoder hands to its attention is what makes an exchange happen: a
forward without it, such as one that generates, has whole rows already.

Shapes: n ranks of a group, u of a circle, r = n / u circles, B rows, T tokens of a whole row, H heads, K
key-value heads, D head size.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    all_to_all_single_autograd,
)
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..dist import ranks_from_env
from .attention import (
    drops_scores,
    layers_of_another_kind,
    makes_no_masks,
    masks_of_rows,
    takes_backends,
)
from .attention_kernels import (
    FA4,
    FA4_PACKED,
    TORCH_FA,
    TORCH_FA_PACKED,
    VARLEN,
    attend_span,
    in_tiles,
)
from .blocks import base_model
from .part_probe import why_no_parts

_EAGER = "eager"
_TAKE_SPANS = (
    "sdpa",
    VARLEN,
    FA4,
    FA4_PACKED,
    TORCH_FA,
    TORCH_FA_PACKED,
)  # whose queries may be a part of the row's
_CUT = "sequence_parallel"  # the argument that the decoder hands on to its attention
_IGNORE = -100


class SequenceParallel:
    """This rank's part of rows that the ranks of its group share.

    Groups are of consecutive ranks, `size` each; so are circles within them, whose ranks share `heads`.
    Making one is a collective call of all ranks.
    """

    def __init__(self, size: int, heads: int):
        self.size, self.circle = size, gcd(size, heads)
        self.circles = size // self.circle
        self.group, _ = dist.new_subgroups(self.circle)
        self.rank = dist.get_rank(self.group)
        self.turn, self.others = dist.get_rank() % size // self.circle, None
        self.last: Tensor | None = None  # position in the rows that are cut now
        if self.circles > 1:
            first = range(0, dist.get_world_size(), size)
            ranks = [range(a + i, a + size, self.circle) for a in first for i in range(self.circle)]
            self.others, _ = dist.new_subgroups_by_enumeration([list(r) for r in ranks])

    def part(
        self, config: PretrainedConfig, input_ids: Tensor, labels: Tensor, arguments: dict
    ) -> tuple[Tensor, Tensor, dict]:
        """Of a batch of whole rows (B, T): its ids, its labels (B, T / n), and the decoder's arguments.

        labels: already moved by one, as the last token of a part predicts the first one of the next.
        T is filled up to a multiple of n. Raises ValueError for a batch with a mask, and for packed rows
        that are no multiple of n.
        """
        tokens = input_ids.shape[1]
        if tokens % self.size and "position_ids" in arguments:
            raise ValueError(
                f"packed rows of {tokens} tokens can't be shared by {self.size} ranks; give "
                f"collate_packed pad_to_multiple_of={self.size}"
            )
        input_ids, labels = self._whole(input_ids), self._whole(labels, _IGNORE)
        if arguments.get("attention_mask") is not None:
            raise ValueError(
                "sequence_parallel takes rows that begin at their first token; give no attention_mask"
            )
        positions = arguments.get("position_ids")
        masks = _whole_masks(config, input_ids, positions)
        if positions is None:  # what fills rows up is at the last token's place
            whole = torch.arange(input_ids.shape[1], device=input_ids.device)
            positions = whole.clamp(max=tokens - 1)[None]
        self.last = positions.max()
        given = dict(position_ids=self._own(positions), attention_mask=masks, **{_CUT: self})
        return (
            self._own(input_ids),
            self._own(labels),
            arguments | given,
        )

    def own(self, values: Tensor) -> Tensor:
        """This rank's columns of values of a batch's tokens (B, T), which are 0 where T is filled up."""
        return self._own(self._whole(values))

    def _whole(self, values: Tensor, fill: int = 0) -> Tensor:
        """Columns filled up to a multiple of n."""
        return nn.functional.pad(values, (0, -values.shape[1] % self.size), value=fill)

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's columns."""
        of_circle = torch.cat([whole[:, span] for span in self.spans(whole.shape[1])], 1)
        return of_circle.chunk(self.circle, 1)[self.rank].contiguous()

    def spans(self, tokens: int, turn: int | None = None) -> list[slice]:
        """The tokens of a row of `tokens` whose queries a circle has; of this rank's own one, or another."""
        if self.circles == 1:
            return [slice(0, tokens)]
        turn, both = self.turn if turn is None else turn, tokens // self.circles
        early, late = both // 2, both - both // 2
        start = self.circles * early + (self.circles - 1 - turn) * late
        return [slice(turn * early, (turn + 1) * early), slice(start, start + late)]

    def heads_for_tokens(self, states: Tensor) -> Tensor:
        """(B, H, T / n, D) of all heads to (B, H / u, T / r, D) of all tokens of the circle."""
        b, h, t, d = states.shape
        # By receiving rank first: its heads. What arrives is by sending rank: its tokens.
        sent = states.reshape(b, self.circle, h // self.circle, t, d).permute(1, 3, 0, 2, 4)
        got = self._exchanged(sent)  # (u, T / n, B, H / u, D)
        return got.flatten(0, 1).permute(1, 2, 0, 3)

    def tokens_for_heads(self, states: Tensor) -> Tensor:
        """(B, T / r, H / u, D) of all tokens of the circle to (B, T / n, H, D) of all heads."""
        b, t, h, d = states.shape
        sent = states.reshape(b, self.circle, t // self.circle, h, d).transpose(0, 1)
        got = self._exchanged(sent)  # (u, B, T / n, H / u, D)
        return got.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def of_all_circles(self, states: Tensor) -> Tensor:
        """(B, K, T / r, D) of this circle's tokens to (B, K, T, D) of the whole row, in its order."""
        got = all_gather_tensor_autograd(states.contiguous()[None], 0, self.others)
        early = states.shape[2] // 2
        starts, ends = got[:, :, :, :early].unbind(0), got[:, :, :, early:].unbind(0)
        return torch.cat([*starts, *reversed(ends)], 2)

    def own_heads(self, values: Tensor) -> Tensor:
        """(H / u,) of (H,), a value for each head."""
        return values.chunk(self.circle)[self.rank]

    def _exchanged(self, sent: Tensor) -> Tensor:
        """The parts (u, ...) that the ranks of the circle have for this one, in their order."""
        return all_to_all_single_autograd(sent.contiguous(), None, None, self.group)


def apply_sequence_parallel(model: nn.Module, size: int) -> SequenceParallel | None:
    """Let a model's attention exchange heads for tokens in groups of `size` ranks; None for 1.

    The model's loss must cut its batches (`memory.chunked_cross_entropy`). Raises ValueError, before
    any rank waits for another, for a model that can't.
    """
    check_sequence_parallel(model, size, ranks_from_env().world_size)
    if size == 1:
        return None
    config = model.config.get_text_config()
    name = config._attn_implementation
    for shown in (_exchanging(name), _unmasked(name)):
        AttentionInterface.register(shown, partial(_attention, name))
    if name in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(_exchanging(name), ALL_MASK_ATTENTION_FUNCTIONS[name])
    config._attn_implementation = _exchanging(name)
    sequence = SequenceParallel(size, config.num_attention_heads)
    for module in model.modules():
        if _depends_on_length(module):
            module.forward = partial(_angles_of_whole_rows, sequence, module.forward)
    return sequence


def _depends_on_length(module: nn.Module) -> bool:
    """Whether a module rotates by other frequencies in longer rows."""
    kinds = getattr(module, "rope_type", None) or ""
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def _angles_of_whole_rows(
    sequence: SequenceParallel, forward: Callable, x: Tensor, position_ids: Tensor, *args, **kwargs
) -> tuple[Tensor, ...]:
    """Cosines and sines (B, T / n, D) at this rank's positions, by the frequencies of whole rows.

    Those follow from the largest position that the module sees, so it sees the rows' last one, too.
    """
    if sequence.last is None:
        return forward(x, position_ids, *args, **kwargs)
    last = sequence.last.expand(*position_ids.shape[:-1], 1)
    seen = torch.cat([position_ids, last], -1)
    return tuple(angles[:, :-1] for angles in forward(x, seen, *args, **kwargs))


def check_sequence_parallel(model: nn.Module, size: int, world_size: int):
    """Raise ValueError, with the remedy, where `size` of so many ranks can't share a model's rows."""
    if size == 1:
        return
    if world_size % size:
        raise ValueError(
            f"--sequence_parallel {size}: {world_size} ranks are not a multiple of it; start as many, or "
            "leave it out"
        )
    if problem := _why_not(base_model(model), size):
        raise ValueError(f"--sequence_parallel {size}: {problem}")


def _why_not(model: nn.Module, size: int) -> str:
    """What keeps a model's rows on one rank; empty if nothing does."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    if others := layers_of_another_kind(config):
        return (
            f"{config.model_type} has layers of {others}, which can't be computed from a part of a row; "
            "leave it out"
        )
    if not heads or not takes_backends(type(config)):
        return f"the code of {config.model_type} takes no other attention; leave it out"
    name = base_attention(config)
    fit = [n for n in range(2, heads + 1) if heads % n == 0]
    if heads % size and name not in (_EAGER, *_TAKE_SPANS):
        return (
            f"{config.model_type} has {heads} heads to divide with {name}; use one of {fit}, or "
            "--attn_implementation sdpa"
        )
    if heads % size and drops_scores(config):
        return (
            f"{config.model_type} has attention dropout, with which ranks share whole heads, of which it "
            f"has {heads}; use one of {fit}"
        )
    return why_no_parts(model, _CUT)


def base_attention(config: PretrainedConfig) -> str:
    """The name of the attention that computes on whole rows."""
    return config.get_text_config()._attn_implementation.split(":")[0]


@contextmanager
def rows_are_cut(config: PretrainedConfig, sequence: SequenceParallel):
    """Within it the decoder is given a part of a batch, and makes no masks: its are those of whole rows."""
    config = config.get_text_config()
    name = config._attn_implementation
    config._attn_implementation = _unmasked(base_attention(config))
    try:
        yield
    finally:
        config._attn_implementation, sequence.last = name, None


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
    """Attention `name` over whole rows: (B, T / n, H, D) of query (B, H, T / n, D), key and value.

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
    key, value = (_repeated(x, sequence_parallel.circle, groups) for x in (key, value))
    if (sinks := kwargs.get("s_aux")) is not None:
        kwargs["s_aux"] = sequence_parallel.own_heads(sinks)
    query, key, value = map(sequence_parallel.heads_for_tokens, (query, key, value))
    part = _OfHeads(module, query.shape[1] // key.shape[1], sequence_parallel)
    if sequence_parallel.circles > 1:
        key, value = map(sequence_parallel.of_all_circles, (key, value))
        kernel = partial(_attend_spans, kernel, sequence_parallel.spans(key.shape[2]))
    out, _ = kernel(part, query, key, value, attention_mask, **kwargs)
    return sequence_parallel.tokens_for_heads(out), None


def _attend_spans(
    kernel: Callable,
    spans: list[slice],
    module: _OfHeads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention of queries (B, H, T / r, D) of these spans over a whole row's keys and values."""
    queries = query.split([span.stop - span.start for span in spans], 2)
    parts = []
    for q, span in zip(queries, spans, strict=True):
        seen = key[:, :, : span.stop], value[:, :, : span.stop]
        if attention_mask is None:
            attend = partial(attend_span, start=span.start, row=key.shape[2])
            out, _ = in_tiles(attend, module, q, *seen, None, **kwargs)
        else:
            mask = attention_mask[..., span, : span.stop]
            out, _ = kernel(module, q, *seen, mask, **kwargs)
        parts.append(out)
    return torch.cat(parts, 1), None


def _repeated(states: Tensor, size: int, groups: int) -> Tensor:
    """Key-value heads as often as the ranks of a group need: each has its queries' own."""
    heads, times = states.shape[1], 1
    while heads * times % size:  # math.lcm would keep a block of dynamic shapes from being compiled
        times += 1
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
    if name == _EAGER:
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
