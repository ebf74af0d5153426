"""Refuse ranks whose dropout would drop the same places.

Ranks that are seeded alike, as by `torch.manual_seed(0)` in a script, draw the same masks for different
rows: less noise than was asked for, and nothing shows it. Adapters of this project mix the rank into
their seeds (adapters/dropout.py); any other dropout draws from torch's generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from itertools import chain

import torch
from torch import nn

from ..adapters import LoraLinear
from ..dist import gather_over_ranks


def check_masks(model: nn.Module):
    """Compare the ranks' random states at the first training forward, where dropout draws from them.

    That forward raises ValueError, on every rank, if two are equal.
    """

    def check(*_):
        # Under CPU offload buffers are where the forward runs, and weights are not.
        on_gpu = next(chain(model.buffers(), model.parameters())).is_cuda
        if not model.training or on_gpu and torch.cuda.is_current_stream_capturing():
            return
        if (name := next(_dropouts(model), None)) is None:
            return handle.remove()
        state = torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()
        states = gather_over_ranks(sha256(state.numpy().tobytes()).hexdigest())
        twin = next((rank for rank, state in enumerate(states) if state in states[:rank]), None)
        if twin is not None:
            raise ValueError(
                f"ranks {states.index(states[twin])} and {twin} have the same random "
                f"state, so dropout in {name} would drop the same places on both; call "
                "torch.manual_seed(seed + rank) before training"
            )
        handle.remove()

    handle = model.register_forward_pre_hook(check)


def _dropouts(model: nn.Module) -> Iterator[str]:
    """Names of modules whose dropout draws from torch's generator: layers, or users of a share."""
    ours = {
        drop
        for layer in model.modules()
        if isinstance(layer, LoraLinear)
        for drop in layer.lora_dropout.values()
    }
    for name, module in model.named_modules():
        if module in ours:
            continue
        shares = [
            value for key, value in vars(module).items() if "dropout" in key or "pdrop" in key
        ]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            shares.append(module.p)
        if any(isinstance(share, float) and share > 0 for share in shares):
            yield name
