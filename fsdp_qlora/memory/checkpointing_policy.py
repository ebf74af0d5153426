"""Which activations are kept for the backward, and which are computed again.

A policy replaces the `forward` of a block and nothing else: no wrapper module, so parameter names
stay those of transformers and PEFT, and FSDP's hooks stay outside of what is recomputed.

Kept per block and token, with D hidden, F intermediate, K key-value width, for a Llama block:

    recompute_all   D                        the block's input
    keep_attention  2D + attention's inputs  and attention, whose time grows with the row's length
    keep_linears    4D + 2K + 2F             every large product; norms, rotation and gates again
    keep_all        all that autograd saves

Selective checkpointing is torch's: https://pytorch.org/blog/activation-checkpointing-techniques/
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ..adapters import LoraLinear  # which registers the ops named below
from ..choices import POLICIES, PolicyName
from ..dist import print_main
from ..model import attention_kernels  # noqa: F401  registers two more
from ..model.blocks import base_model, decoder_blocks, gets_cache
from ..model.input_gradients import asking_for_gradient

# It warns of in-place ops where a policy keeps some outputs; none of those named here is written to.
logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)

aten = torch.ops.aten
_ATTENTION_OPS = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.fsdp_qlora.flash_attention_4.default,
    torch.ops.fsdp_qlora.attention_with_sinks.default,
}
_LINEAR_OPS = {
    torch.ops.fsdp_qlora.adapted_linear.default,
    torch.ops.fsdp_qlora.adapted_inputs.default,
    torch.ops.fsdp_qlora.turned_linear.default,
    torch.ops.fsdp_qlora.frozen_linear.default,
    torch.ops.fsdp_qlora.grouped_linear.default,
    torch.ops.fsdp_qlora.adapted_experts.default,
    aten.mm.default,
    aten.addmm.default,
    aten.linear.default,
}
# Eager checkpointing draws the same seed again. A compiled block has to keep it: what torch does to draw
# it again fails in a CUDA graph.
_SEED_OPS = {torch.ops.fsdp_qlora.dropout_seed.default}
_KEPT_OPS = {
    name: (_ATTENTION_OPS if policy.keeps_attention else set())
    | (_LINEAR_OPS if policy.keeps_linears else set())
    | (_SEED_OPS if policy.is_selective else set())
    for name, policy in POLICIES.items()
}


def apply_activation_policy(
    model: nn.Module, policy: PolicyName | Sequence[str], reentrant: bool = False
) -> nn.Module:
    """Make the decoder blocks follow `policy`, one name for all or one per block, in place.

    Raises ValueError for an unknown policy, or a list that is not as long as the model.
    """
    blocks = decoder_blocks(model)
    policies = [policy] * len(blocks) if isinstance(policy, str) else policy
    _check_policies(policies, len(blocks), reentrant)
    for block, name in zip(blocks, policies, strict=True):
        if POLICIES[name].recomputes:
            block.forward = partial(recomputed, block.forward, name, reentrant, _draws_seeds(block))
            base_model(model).config.use_cache = False  # a second forward would fill it twice
    return model


def _check_policies(policies: list[str], blocks: int, reentrant: bool):
    """Refuse names that do not exist and lists of another length."""
    for name in policies:
        if name not in POLICIES:
            raise ValueError(f"activation policy {name!r}: choose {', '.join(POLICIES)}")
        if reentrant and POLICIES[name].is_selective:
            raise ValueError(f"--reentrant_checkpointing recomputes whole blocks; it can't {name}")
    if len(policies) != blocks:
        raise ValueError(f"{len(policies)} activation policies for {blocks} blocks")


def _draws_seeds(block: nn.Module) -> bool:
    """Whether a block has adapters with dropout."""
    return any(
        isinstance(drop, nn.Dropout) and drop.p > 0
        for layer in block.modules()
        if isinstance(layer, LoraLinear)
        for drop in layer.lora_dropout.values()
    )


def recomputed(forward, policy: str, reentrant: bool, draws: bool, hidden, *args, **kwargs):
    """`forward(hidden, ...)` that keeps what `policy` says and recomputes the rest in backward."""
    if gets_cache(*args, **kwargs):  # a second forward would fill it twice
        return forward(hidden, *args, **kwargs)
    ops = _KEPT_OPS[policy]
    if reentrant and any(isinstance(value, MutableMapping) for value in kwargs.values()):
        _say_not_reentrant()
        reentrant = False
    if draws and torch.compiler.is_compiling():
        ops = ops | _SEED_OPS
    if reentrant or not ops:
        # Reentrant checkpointing gives no gradient unless an input needs one.
        given = asking_for_gradient(hidden) if reentrant else hidden
        return checkpoint(partial(forward, **kwargs), given, *args, use_reentrant=reentrant)
    contexts = partial(_contexts, ops)
    return checkpoint(forward, hidden, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@cache
def _say_not_reentrant():
    """Blocks that put tensors into a mapping for later ones would lose these tensors' gradients."""
    print_main(
        "warning: --reentrant_checkpointing has no effect: blocks of this model share tensors, "
        "whose gradients it would lose; leave it out"
    )


def save_or_recompute(ops: set, ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """torch's question about one op: keep its output?"""
    return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE


# ---- what eager checkpointing keeps, packed ------------------------------------------------------

_kept_output_hooks: list[tuple[Callable, Callable]] = []


@contextmanager
def kept_output_hooks(pack: Callable, unpack: Callable) -> Iterator[None]:
    """Saved-tensors hooks for the outputs that an eager block's policy keeps, which torch's don't see.

    Selective checkpointing keeps them in a place of its own. Those of a compiled block are saved by its
    graph, as autograd saves tensors, and so torch's hooks see them.
    """
    _kept_output_hooks.append((pack, unpack))
    try:
        yield
    finally:
        _kept_output_hooks.pop()


def _contexts(ops: set):
    """torch's contexts, which graphs need; those of an eager block under hooks are ours.

    A graph asks for its contexts when it is made, after the block was traced: to some torches (2.11) that
    is not compiling any more.
    """
    if _kept_output_hooks and TracingContext.try_get() is None:
        return _packing_contexts(ops, *_kept_output_hooks[-1])
    return create_selective_checkpoint_contexts(partial(save_or_recompute, ops))


def _packing_contexts(ops: set, pack: Callable, unpack: Callable):
    """Contexts of a block's forward and of its recomputation, which takes the outputs of `ops` from it."""
    kept: deque = deque()
    return _Keeping(ops, pack, kept), _Reusing(ops, unpack, kept)


class _OutputsMode(TorchDispatchMode):
    """What an eager block's forward and its recomputation are run under."""

    supports_higher_order_operators = True  # flex attention is one

    def __init__(self, ops: set, hook: Callable, kept: deque):
        super().__init__()
        self.ops, self.hook, self.kept = ops, hook, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as torch's own


@dataclass(frozen=True)
class _Packed:
    """A tensor as a hook packed it, told from the numbers and the None that attention's kernels also give."""

    value: object


class _Keeping(_OutputsMode):
    """Keeps what some ops give, their tensors packed, in their order."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in self.ops:
            self.kept.append(tree_map_only(Tensor, lambda x: _Packed(self.hook(x.detach())), out))
        return out


class _Reusing(_OutputsMode):
    """Gives, in place of what these ops would, what was kept of them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in self.ops:
            return func(*args, **(kwargs or {}))
        if not self.kept:
            raise RuntimeError(
                "a block whose policy keeps outputs can be gone through backward once"
            )
        kept = self.kept.popleft()
        return tree_map_only(_Packed, lambda x: self.hook(x.value), kept)
