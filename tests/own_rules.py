"""What holds of every mixer that computes by an op of this project, beside transformers' own model."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_qlora.model.own_rules import has_own_rule

from .families import SIZES


def counted(monkeypatch, module, name: str) -> list:
    """A list that gets an entry for each call of a module's op by that name."""
    calls, op = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a: calls.append(1) or op(*a))
    return calls


def assert_padded_rows_as_transformers(changed: nn.Module, plain: nn.Module, calls: list):
    """Logits and gradients of two padded rows are equal, and each mixer of `changed` called the op once."""
    ids = torch.randint(3, SIZES["vocab_size"], (2, 75))
    mask = torch.ones_like(ids)
    mask[0, 60:] = mask[1, :9] = 0
    found, expected = (
        m(ids, attention_mask=mask, use_cache=False).logits[mask.bool()] for m in (changed, plain)
    )
    mixers = sum(has_own_rule(m) for m in changed.modules())
    assert len(calls) == mixers > 0  # and none of the plain model's
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for logits in (found, expected):
        logits.square().mean().backward()
    for (name, p), q in zip(changed.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-4 * q.grad.norm() + 1e-7, name


def assert_answers_as_transformers(changed: nn.Module, plain: nn.Module):
    ids = torch.randint(3, SIZES["vocab_size"], (1, 70))
    found, expected = (m.generate(ids, max_new_tokens=4, do_sample=False) for m in (changed, plain))
    assert torch.equal(found, expected)
