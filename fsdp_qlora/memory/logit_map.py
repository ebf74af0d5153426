"""What a causal language model does to its head's output before that is its logits, found by trying.

Granite divides, Cohere multiplies, Gemma 2 caps. No table says so: the model's forward is run once on a
stand-in for the decoder and one for the head, which costs nothing, and what comes out is compared with
what went in.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..model.blocks import output_head

_PROBE_TOKENS, _PROBE_VOCABULARY = 2, 64  # of the stand-ins


class _DecoderOutputs(tuple):
    """A decoder's outputs of which there is only the last hidden state."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def logit_map(causal: nn.Module) -> tuple[float, float | None] | None:
    """(scale, cap) with logits = cap tanh(scale x / cap) of the head's x, or scale x without a cap.

    None if the model does something else between its decoder's output and its logits.
    """
    hidden = torch.linspace(-1, 1, _PROBE_TOKENS * _width(causal)).view(1, _PROBE_TOKENS, -1)
    given = torch.linspace(-8, 8, _PROBE_TOKENS * _PROBE_VOCABULARY).view(
        1, _PROBE_TOKENS, _PROBE_VOCABULARY
    )
    try:
        taken, logits = _logits_of(causal, hidden, given)
    except Exception:  # noqa: BLE001  a forward of another kind, which is left as it is
        return None
    if not torch.equal(taken, hidden) or logits.shape != given.shape:
        return None
    cap = getattr(causal.config.get_text_config(), "final_logit_softcapping", None)
    scale = _slope(given, logits, cap)
    expected = given * scale
    if cap:
        expected = cap * torch.tanh(expected / cap)
    return (scale, cap) if torch.allclose(logits, expected, rtol=1e-4, atol=1e-5) else None


def decoder(causal: nn.Module) -> nn.Module:
    """What gives the head its input. Llama 4's class says that it is its own base model."""
    base: Any = causal.base_model
    return causal.get_decoder() if base is causal else base


def _width(causal: nn.Module) -> int:
    """D of the head's input."""
    head = output_head(causal)
    return getattr(head, "in_features", 1)


def _slope(given: Tensor, logits: Tensor, cap: float | None) -> float:
    """What the logits may have been multiplied by, found at a small one; 1 if rounding is all."""
    at = given.abs().argmin()
    value = logits.flatten()[at]
    if cap:
        value = cap * torch.atanh(value / cap)
    found = (value / given.flatten()[at]).item()
    return 1.0 if abs(found - 1) < 1e-4 else found


@torch.no_grad()
def _logits_of(causal: nn.Module, hidden: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """The head's input and the model's logits, if the decoder gives `hidden` and the head `given`."""
    taken = []

    def head(x: Tensor) -> Tensor:
        taken.append(x)
        return given

    with ExitStack() as stack:
        stack.enter_context(
            _standing_in(decoder(causal), lambda *_, **__: _DecoderOutputs((hidden,)))
        )
        stack.enter_context(_standing_in(output_head(causal), head))
        logits = causal(input_ids=torch.zeros(1, _PROBE_TOKENS, dtype=torch.long)).logits
    (x,) = taken
    return x, logits.float()


@contextmanager
def _standing_in(module: nn.Module, forward):
    """Let a module compute something else for a while."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
