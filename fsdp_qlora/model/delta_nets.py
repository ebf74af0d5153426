"""Delta nets of a model that compute by this project's op: those without kernels, or with wrong ones here."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

import torch
from torch import Tensor, nn

from ..config.delta_kernels import has_flash_linear_attention, why_on_plain_torch
from .delta_rule import delta_rule
from .own_rules import functions_called, has_own_rule, use_own_rule

_BY_CHANNEL = "chunk_kimi_delta_attention"
_OF_FILES = ("torch_chunk_gated_delta_rule", _BY_CHANNEL)  # in transformers
_OF_MIXERS = "chunk_gated_delta_rule"  # an attribute, in its older versions


def apply_delta_rule(model: nn.Module):
    """Let a model's delta nets compute by this file's op if they have no kernels, or wrong ones, in place.

    Also on meta.
    """
    for mixer in model.modules():
        theirs = getattr(mixer, _OF_MIXERS, None)
        name = _OF_MIXERS if theirs else _rule_of(type(mixer))
        if name is None or has_own_rule(mixer) or not _on_plain_torch(name):
            continue
        if theirs:
            mixer.chunk_gated_delta_rule = _own_rule(theirs)
            mixer.has_own_rule = True
        else:
            use_own_rule(mixer, {name: _own_rule})


def _on_plain_torch(name: str) -> bool:
    """Whether the rule of this name has no right kernels here."""
    on_hopper = has_flash_linear_attention() and is_hopper()
    return why_on_plain_torch(on_hopper, by_channel=name == _BY_CHANNEL) is not None


def is_hopper() -> bool:
    """Whether this process's GPU is an H100, H200 or the like."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def _rule_of(kind: type[nn.Module]) -> str | None:
    """The name by which a mixer's code calls the rule."""
    return next((name for name in _OF_FILES if name in functions_called(kind)), None)


@cache
def _own_rule(theirs: Callable) -> Callable:
    """This file's rule, called as transformers'; with a state to go on from, or to give, it is theirs."""

    @wraps(theirs)
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **more,
    ) -> tuple[Tensor, Tensor | None]:
        if initial_state is None and not output_final_state:
            # A slice would keep all that the convolution gave. inductor can't keep views whose first stride
            # is a number of tokens that may change, so rows come one behind the other.
            given = (x.contiguous().flatten(0, 1) for x in (query, key, value, g, beta))
            out = delta_rule(*given, len(query), use_qk_l2norm_in_kernel)
            return out.unflatten(0, query.shape[:2]), None
        state = dict(initial_state=initial_state, output_final_state=output_final_state)
        more |= state | dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        return theirs(query, key, value, g=g, beta=beta, **more)

    return rule
