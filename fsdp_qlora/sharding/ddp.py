"""ddp: the trained weights' gradients are averaged over the ranks after each backward.

Frozen weights are left alone. torch's DistributedDataParallel wants all weights when it is made, to
broadcast them, and here they are still on the meta device then.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..choices.strategies import BUCKET_BYTES
from ..dist import all_reduce


class GradientReducer:
    """Averages the trained weights' gradients over all ranks at the end of each backward, as DDP.

    The first weight that has its gradient asks the engine for a call when the backward is done, so it
    does not matter which module was called. Within reentrant checkpointing the engine would call at the
    end of each block's own backward, so the root's outputs ask first.

    Weights that a script unfreezes later, another adapter among them (`set_adapter`), are among the
    trained from the next forward of the root on; one that was trained stays, as a backward may still come.

    The model owns it. Hooks of weights hold it weakly: Python can't see what autograd holds, and would
    never free a model whose weights hold it.
    """

    def __init__(self, model: nn.Module):
        self.model, self.enabled, self.queued = model, True, False
        self.trained: dict[nn.Parameter, RemovableHandle] = {}
        self.watch()
        model.register_forward_pre_hook(self.begin)
        model.register_forward_hook(self.watch_outputs)

    def watch(self):
        """Look at the weights' gradients, once the weights exist: loading replaces those on meta."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if any(p.is_meta for p in trained):
            return
        for p in trained:
            if p not in self.trained:
                self.trained[p] = p.register_post_accumulate_grad_hook(_held_weakly(self.queue))

    def begin(self, *_):
        self.watch()
        self.queued = False  # an error in the last backward may have left it

    def watch_outputs(self, module, args, output):
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self.queue)

    def queue(self, _):
        if self.queued or not self.enabled:
            return
        self.queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self.reduce)

    def reduce(self):
        """Average over the ranks; a gradient that only some ranks have counts as zero on the others.

        One that no rank has stays missing, as in a single process, whose optimizer lets such a weight be.
        """
        self.queued = False
        if dist.get_world_size() == 1:
            return
        self.watch()
        for bucket in _buckets([*self.trained]):
            # A 1 behind the gradients for each that a rank has: no collective of its own, no wait.
            has = bucket[0].new_ones(len(bucket))
            missing = [i for i, p in enumerate(bucket) if p.grad is None]
            for i in missing:
                bucket[i].grad, has[i] = torch.zeros_like(bucket[i]), 0
            flat = torch.cat([*(p.grad.reshape(-1) for p in bucket), has])
            all_reduce(flat)
            flat /= dist.get_world_size()
            *parts, had = flat.split([*(p.numel() for p in bucket), len(bucket)])
            torch._foreach_copy_(
                [p.grad for p in bucket],
                [part.view_as(p) for p, part in zip(bucket, parts, strict=True)],
            )
            for i in missing:
                if not had[i]:
                    bucket[i].grad = None


def _held_weakly(method: Callable) -> Callable:
    """A bound method, called as long as its object lives; it does not keep it alive."""
    held = WeakMethod(method)

    def call(*args):
        if here := held():
            here(*args)

    return call


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in groups of one dtype and about BUCKET_BYTES."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        if not groups or size > BUCKET_BYTES or groups[-1][0].dtype != p.dtype:
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += p.numel() * p.element_size()
    return groups
