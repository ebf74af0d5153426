"""A reference policy that rounds as the policy does.

DPO, KTO and GRPO compare the trained policy with the same model while its adapters are off. As long as
adapters are zero, the two should be equal to the bit. But torch.compile makes one graph of a block for
training and another for a forward without autograd, which fuse other operations and so round at other
places; summed over the tokens of a row, this moves DPO's first loss away from ln 2. Here a block in
training mode runs its graph of training also without autograd, and lets go at once of what it keeps for
a backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..model.blocks import decoder_blocks, final_norm, gets_cache

_Names = list[tuple[nn.Module, str]]


def compute_as_trained(model: nn.Module) -> nn.Module:
    """Let compiled blocks without autograd round as they do in training, in place.

    Comes after compile, and before activation offload, which then leaves these forwards alone.
    """
    for block in decoder_blocks(model):
        block.forward = partial(_as_trained, block, block.forward, _trained_names(block), True)
    if norm := final_norm(model):
        norm.forward = partial(_as_trained, norm, norm.forward, _trained_names(norm), False)
    return model


def _as_trained(module: nn.Module, forward, trained: _Names, goes_on: bool, *args, **kwargs):
    """`forward` by the graph of training, whose outputs carry no history.

    goes_on: the next block, too, is to see that its input takes a gradient.
    """
    if torch.is_grad_enabled() or not module.training or gets_cache(*args, **kwargs):
        return forward(*args, **kwargs)
    with torch.enable_grad(), _taking_gradients(trained):
        out = forward(*args, **kwargs)

    def without_history(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(goes_on and tensor.requires_grad)

    return tree_map_only(Tensor, without_history, out)


def _trained_names(module: nn.Module) -> _Names:
    """Where the trained parameters are; looked up in each call, since FSDP puts others in their place."""
    return [
        (part, name)
        for part in module.modules()
        for name, p in part._parameters.items()
        if p is not None and p.requires_grad
    ]


@contextmanager
def _taking_gradients(trained: _Names) -> Iterator[None]:
    """PEFT freezes adapters that are off, and a graph is made for what takes gradients."""
    frozen = [
        p
        for part, name in trained
        if not (p := part._parameters[name]).requires_grad  # type: ignore
    ]
    for p in frozen:
        p.requires_grad_()
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
