"""Mamba 2's mixers of a model that compute by this project's op: those without kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

from torch import Tensor, nn

from ..config.scan_kernels import why_mamba2_on_plain_torch
from .own_rules import functions_called, has_own_rule, use_own_rule
from .state_space_scan import state_space_scan

_SCAN = (
    "mamba2_chunk_scan"  # in transformers, and the mixer as a whole where mamba-ssm is installed
)
_WHOLE = "mamba2_split_conv1d_scan_combined"


def apply_state_space_scan(model: nn.Module):
    """Let a model's mixers of Mamba 2 compute by this file's op if kernels are missing, in place.

    Also on meta. Steps of generation, whose state comes from a cache or goes into one, stay transformers'.
    """
    if why_mamba2_on_plain_torch() is None:
        return
    for mixer in model.modules():
        called = functions_called(type(mixer))
        if _SCAN in called and not has_own_rule(mixer):
            rules = {_SCAN: _own_scan} | ({_WHOLE: _no_kernel} if _WHOLE in called else {})
            use_own_rule(mixer, rules)


@cache
def _no_kernel(theirs: Callable) -> Callable:
    """mamba-ssm's, which fails without causal-conv1d: None is what transformers' own gives."""
    return lambda *args, **kwargs: None


@cache
def _own_scan(theirs: Callable) -> Callable:
    """This file's scan, called as transformers'; with a state to go on from, or to give, it is theirs."""

    @wraps(theirs)
    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **more,
    ):
        stateless = initial_states is None and not return_final_states
        if stateless and dt_softplus and D is not None and dt_bias is not None:
            # inductor can't keep views whose first stride is a number of tokens that may change, so rows
            # come one behind the other.
            given = (x.contiguous().flatten(0, 1) for x in (hidden_states, dt, B, C))
            out = state_space_scan(*given, A, D, dt_bias, len(dt), *map(float, dt_limit))
            return out.unflatten(0, dt.shape[:2])
        more |= dict(D=D, dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus)
        more |= dict(dt_limit=dt_limit, return_final_states=return_final_states)
        return theirs(hidden_states, dt, A, B, C, chunk_size, **more)

    return scan
