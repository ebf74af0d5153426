"""What a user's own script does with a model that is sharded: done by rows, or refused in one line.

All of it would go wrong unseen, or end deep in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..dist import local_rows, split_as


def check_storage(model: nn.Module):
    """Refuse bitsandbytes 4-bit weights whose storage FSDP would gather in a wrong way.

    Raises ValueError: quant_storage must be the dtype of the model's other weights.
    """
    from bitsandbytes.nn import Params4bit

    packed = {p.dtype for p in model.parameters() if isinstance(p, Params4bit)}
    if packed and not all(dtype.is_floating_point for dtype in packed):
        raise ValueError(
            "bitsandbytes weights are stored as integers, which FSDP can't shard with "
            "the rest; load with BitsAndBytesConfig(bnb_4bit_quant_storage=<the "
            "model's dtype>)"
        )


def check_first_forwards(model: nn.Module):
    """Look, in a sharded model's first forward and its first with autograd, for what would go wrong."""
    _refuse_inference_tensors(model)
    _refuse_untrained(model)


def _refuse_inference_tensors(model: nn.Module):
    """Raise ValueError if the first forward is in inference mode, in which FSDP would make its buffers.

    No gradient could pass them later.
    """

    def check(*_):
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "the first forward of a sharded model can't be in torch.inference_mode, or "
                "training would fail later; use torch.no_grad"
            )
        handle.remove()

    handle = model.register_forward_pre_hook(check, prepend=True)


def _refuse_untrained(model: nn.Module):
    """Raise ValueError in the first forward with autograd for what FSDP does not see.

    A weight that came later, whose gradient no rank would average, and a hook on a shard's gradient:
    autograd knows the gathered weight, so it would never run.
    """

    def check(*_):
        if not torch.is_grad_enabled():
            return
        for name, p in model.named_parameters():
            if not isinstance(p, DTensor) and p.requires_grad and dist.get_world_size() > 1:
                raise ValueError(
                    f"{name} came after apply_sharding, so nothing would average its gradients over "
                    "ranks; give it to the model first"
                )
            if isinstance(p, DTensor) and p._backward_hooks:
                raise ValueError(
                    f"{name} has a hook of register_hook, which never runs on a sharded weight; use "
                    "register_post_accumulate_grad_hook, which is given the weight with its gradient"
                )
        handle.remove()

    handle = model.register_forward_pre_hook(check, prepend=True)


def take_whole_tensors(model: nn.Module, free: Callable[[nn.Module], None]):
    """Let `load_state_dict` take whole tensors, of which each rank keeps its rows.

    PEFT's `load_adapter` gives such to an adapter that the model has already. `free` lets the model hold
    shards alone.
    """

    def split(module, state: dict, prefix: str, *_):
        free(model)  # or a block would take them into what is freed after its next use
        for name, p in model.named_parameters(remove_duplicate=False):
            whole = state.get(prefix + name)
            if not isinstance(p, DTensor) or whole is None or isinstance(whole, DTensor):
                continue
            if whole.shape == p.shape:  # else torch names both
                _, start, stop = local_rows(p)
                state[prefix + name] = split_as(whole[start:stop], p)

    model.register_load_state_dict_pre_hook(split)
