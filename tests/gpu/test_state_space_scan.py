"""Mamba 2's scan on a GPU: TF32 for what came in 16 bits, exact for fp32, compiled and not; one GPU."""

from __future__ import annotations

import pytest
import torch

from tests.test_delta_rule import off
from tests.test_state_space_scan import given, ours, theirs, token_by_token

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_device(tensors):
    return [x.detach().to(DEVICE).requires_grad_() for x in tensors]


def gradients(out, tensors):
    """For one output's gradient on any device."""
    torch.manual_seed(1)
    return torch.autograd.grad(out, tensors, torch.randn(out.shape).to(out))


@pytest.mark.parametrize("tokens", [50, 1000])
@pytest.mark.parametrize("dtype, allowed", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_what_it_gives_and_its_gradients_are_those_of_the_recurrence(dtype, allowed, tokens):
    """In 16 bits it is no further from fp64 than transformers' own code, or by TF32's rounding at most."""
    tensors = given(tokens, dtype)
    exact = token_by_token(*tensors)
    here = on_device(tensors)
    found, plain = ours(*here), theirs(*here)
    assert off(found.cpu().double(), exact) < max(allowed, 1.5 * off(plain.cpu().double(), exact))
    expected = gradients(exact, tensors)
    for a, b, c in zip(gradients(found, here), gradients(plain, here), expected, strict=True):
        at_most = max(allowed, 1.5 * off(b.cpu().double(), c.double()))
        assert off(a.cpu().double(), c.double()) < at_most


def test_compiled_it_gives_the_same():
    here = on_device(given(300, torch.bfloat16))
    torch.testing.assert_close(torch.compile(ours)(*here), ours(*here))
