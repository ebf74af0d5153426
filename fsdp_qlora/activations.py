"""Which activations are kept for the backward, and which are computed again.

A policy replaces the `forward` of a block and nothing else: no wrapper module, so parameter names
stay those of transformers and PEFT, and FSDP's hooks stay outside of what is recomputed.
"""
from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from .blocks import base_model, decoder_blocks

ACTIVATION_POLICIES = ("keep_all", "recompute_all")


def apply_activation_policy(model: nn.Module, policy: str, reentrant: bool = False) -> nn.Module:
    """Make every decoder block follow `policy`, in place.

    keep_all stores what autograd saves; recompute_all stores each block's input and runs the block
    again in backward. Raises ValueError for an unknown policy.
    """
    if policy not in ACTIVATION_POLICIES:
        raise ValueError(f"activation policy {policy!r}: choose {', '.join(ACTIVATION_POLICIES)}")
    if policy == "keep_all": return model
    base_model(model).config.use_cache = False  # a second forward would fill the cache twice
    for block in decoder_blocks(model):
        block.forward = partial(recomputed, block.forward, reentrant)
    # Reentrant checkpointing gives no gradient unless an input needs one, and the embedding that
    # makes the first block's input is frozen.
    if reentrant: base_model(model).enable_input_require_grads()
    return model


def recomputed(forward, reentrant: bool, hidden, *args, **kwargs):
    """`forward(hidden, ...)` whose activations are recomputed in backward."""
    return checkpoint(partial(forward, **kwargs), hidden, *args, use_reentrant=reentrant)
