"""Mixers that carry a state along a line of tokens, over packed rows: each row by itself.

Gated delta nets, Mamba's mixers and short convolutions know no mask, and what transformers computes where
their kernels are missing does not look at where rows begin. So a mixer is given the rows of a batch one
below the other instead of one behind the other, padded on the right, where nothing of theirs looks. Rows
of about one length go together, so that padding is never more than the rows are.

Shapes: B bins, T tokens of a bin, N rows, L tokens of the longest of them, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..config.delta_kernels import has_flash_linear_attention, why_on_plain_torch
from ..own_forward import compute_by
from .delta_nets import is_hopper
from .own_rules import has_own_rule

_SHORTEST = 16  # tokens; rows that are shorter go with those of this length
_WITHOUT_CONVOLUTION = ("MiniMaxLightningAttention",)
_BY_CHUNKS = ("Delta", "Lightning")  # parts of the names of mixers whose code loops over chunks,
_BY_TOKENS = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer")  # over tokens


@dataclass(frozen=True)
class Rows:
    """Rows of one batch of about one length: where their tokens are in (B * T), and which are padding."""

    index: Tensor  # (N, L)
    inside: Tensor  # (N, L, 1) bool


@dataclass
class Borders:
    """Where the rows of the batch begin that is in the forward now; what its blocks recompute sees it too."""

    groups: tuple[Rows, ...] = ()
    back: Tensor | None = None  # (B * T,): where each token is among the rows, group after group

    def begin(self, positions: Tensor | None):
        """positions (B, T): where they start again, a row begins; None of rows that are alone."""
        self.groups, self.back = (), None
        if positions is None:
            return
        flat = positions.flatten()
        starts = (flat == 0).nonzero().flatten().tolist()  # one wait for the GPU in a forward
        self.set([*starts, len(flat)], flat.device)

    def set(self, ends: list[int], device: torch.device):
        """ends: where rows begin among all tokens, and the end of the last."""
        by_size: dict[int, list[tuple[int, int]]] = {}
        for start, end in pairwise(ends):
            if end > start:
                size = max(end - start - 1, _SHORTEST - 1).bit_length()
                by_size.setdefault(size, []).append((start, end))
        self.groups = tuple(_rows(rows, device) for rows in by_size.values())
        places = torch.cat([g.index[g.inside[..., 0]] for g in self.groups])
        padded = torch.cat([g.inside.flatten() for g in self.groups]).nonzero().flatten()
        self.back = torch.empty_like(places).index_put_((places,), padded)


def _rows(rows: list[tuple[int, int]], device: torch.device) -> Rows:
    starts, ends = torch.tensor(rows, device=device).unbind(1)
    offsets = torch.arange(max(end - start for start, end in rows), device=device)
    index = starts[:, None] + offsets
    inside = index < ends[:, None]
    return Rows(index.where(inside, starts[:, None]), inside[..., None])


def row_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model that carry a state along the tokens, by name: those with a convolution."""
    return {
        name: m
        for name, m in model.named_modules()
        if any(isinstance(part, nn.Conv1d) for part in m.children())
        or type(m).__name__ in _WITHOUT_CONVOLUTION
    }


def check_kernels(model: nn.Module, device: torch.device):
    """Refuse gated delta nets whose kernels have a wrong backward on this device, if no op replaces them."""
    if device.type != "cuda" or not has_flash_linear_attention() or not is_hopper():
        return
    mixers = [m for m in row_mixers(model).values() if not has_own_rule(m)]
    gated = [name for m in mixers if "Gated" in (name := type(m).__name__)]
    if gated and (wrong := why_on_plain_torch(on_hopper=True, by_channel=False)):
        reason, remedy = wrong
        raise ValueError(f"{gated[0]}: {reason}; {remedy}, or uninstall flash-linear-attention")


def leave_uncompiled(model: nn.Module):
    """Keep mixers that go over a row step by step out of torch.compile, in place; blocks then run eager.

    It would unroll them: 64 chunks of each block at 4,096 tokens, or each token. Kernels that do it at once
    can't be compiled either. Delta nets with an op of ours can (delta_rule.py).
    """
    for mixer in row_mixers(model).values():
        name = type(mixer).__name__
        by_steps = any(part in name for part in _BY_CHUNKS) or name in _BY_TOKENS
        if by_steps and not has_own_rule(mixer):
            compute_by(mixer, _left_uncompiled)


@torch.compiler.disable
def _left_uncompiled(mixer: nn.Module, own, *args, **kwargs):
    return own(mixer, *args, **kwargs)


def mix_rows_apart(model: nn.Module):
    """Let the mixers of a model see each packed row by itself, in place, also on meta."""
    borders = Borders()
    model.get_decoder().register_forward_pre_hook(partial(_begin, borders), with_kwargs=True)
    for mixer in row_mixers(model).values():
        mixer.row_borders = borders
        compute_by(mixer, _mix)


def _begin(borders: Borders, decoder: nn.Module, args: tuple, kwargs: dict):
    borders.begin(kwargs.get("position_ids"))


def mix_lines_apart(model: nn.Module):
    """The same of lines that come with `cu_seq_lens_q`, as those of padding_free.py; in place.

    Forwards may be in any order, and recomputed blocks see the borders that they were given. What comes
    without is mixed as transformers does it.
    """
    for mixer in row_mixers(model).values():
        compute_by(mixer, _mix_line)


def _mix_line(mixer: nn.Module, own, *args, **kwargs):
    ends = kwargs.get("cu_seq_lens_q")
    if ends is None:
        return own(mixer, *args, **kwargs)
    return _mix_rows_of_line(ends, mixer, own, *args, **kwargs)


@torch.compiler.disable
def _mix_rows_of_line(ends: Tensor, mixer: nn.Module, own, *args, **kwargs):
    return _mix_rows(_borders_of(ends), mixer, own, *args, **kwargs)


def _borders_of(ends: Tensor) -> Borders:
    """The borders of a line, made for the first mixer that asks and kept with the tensor."""
    found = getattr(ends, "borders", None)
    if found is None:
        found = Borders()
        found.set(ends.tolist(), ends.device)
        ends.borders = found  # type: ignore[attr-defined]
    return found


@torch.compiler.disable
def _mix(mixer: nn.Module, own, hidden_states: Tensor, *args, **kwargs):
    return _mix_rows(mixer.row_borders, mixer, own, hidden_states, *args, **kwargs)


def _mix_rows(
    borders: Borders, mixer: nn.Module, own, hidden_states: Tensor, *args, **kwargs
) -> Tensor | tuple:
    """A mixer's forward of hidden states (B, T, D), row by row: what it gives of (B, T, D)."""
    if not borders.groups:
        return own(mixer, hidden_states, *args, **kwargs)
    kwargs |= {name: None for name in _OF_THE_LINE if name in kwargs}
    line = hidden_states.flatten(0, 1)

    def of_rows(value, rows: Rows):
        """What is given for each token, such as positions, in rows."""
        per_token = isinstance(value, Tensor) and value.shape[:2] == hidden_states.shape[:2]
        return value.flatten(0, 1)[rows.index] if per_token else value

    made = [
        own(
            mixer,
            line[rows.index] * rows.inside,
            *(of_rows(value, rows) for value in args),
            **{name: of_rows(value, rows) for name, value in kwargs.items()},
        )
        for rows in borders.groups
    ]
    first = made[0]
    if isinstance(first, tuple):
        return _joined([m[0] for m in made], borders, hidden_states), *first[1:]
    return _joined(made, borders, hidden_states)


# What tells a mixer of the whole line: masks of padding, borders.
_OF_THE_LINE = (
    "attention_mask",
    "seq_idx",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)


def _joined(made: list[Tensor], borders: Borders, like: Tensor) -> Tensor:
    """Rows (N, L, D) of each group, as the line (B, T, D) that they came from."""
    rows = torch.cat([m.flatten(0, 1) for m in made])
    return rows[borders.back].unflatten(0, like.shape[:2])
