"""The routers' balance loss, as transformers computes it: E times the sum of f P over the experts.

f is the share of tokens that an expert is among the best K of, P its mean probability, both over the
tokens of all blocks (arXiv:2101.03961, equations 4 to 6). So its gradient in one block asks for what all
blocks chose: a forward counts, and each router's gradient is added in the backward, when f is known. No
block keeps or returns anything for it, and one that is recomputed does not count again.

Shapes: N tokens, E experts, K experts of each.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from ..own_forward import compute_by

_NUMBERS = itertools.count()
_BALANCES: WeakValueDictionary[int, RouterBalance] = WeakValueDictionary()


class RouterBalance:
    """The loss of one micro-batch at a time; `share` is what it counts for in the step.

    That is an equal part of all micro-batches with rows: ranks without one have a filler of padding.
    """

    def __init__(self, coefficient: float, top_k: int):
        self.coefficient, self.top_k = coefficient, top_k
        self.share = torch.ones(())  # a tensor, as CUDA graphs read it again
        self.number, self.counting = next(_NUMBERS), False
        _BALANCES[self.number] = self

    def start(self, mask: Tensor | None):
        """Before a forward over the tokens of a mask (B, T), or all."""
        self.mask = None if mask is None or mask.dim() != 2 else mask.flatten().float()
        self.counts = self.probabilities = self.rows = 0
        self.counting = True

    def count(self, logits: Tensor):
        """Add what one router gives (N, E)."""
        if not self.counting:
            return
        probabilities = logits.float().softmax(-1)
        chosen = torch.zeros_like(probabilities)
        chosen.scatter_(1, probabilities.topk(self.top_k, dim=-1).indices, 1)
        mask = logits.new_ones(len(logits)).float() if self.mask is None else self.mask
        self.counts = self.counts + mask @ chosen
        self.probabilities = self.probabilities + mask @ probabilities
        self.rows = self.rows + mask.sum()

    def added_to(self, loss: Tensor) -> Tensor:
        """After the forward: its loss with this one."""
        self.counting, rows = False, self.rows.clamp(min=1)
        self.share = self.share.to(rows.device)
        weights = self.coefficient * self.share * len(self.counts) * self.counts / rows
        self.of_probabilities = weights / rows
        return _AddedLoss.apply(loss, (weights * self.probabilities / rows).sum(), self)

    def gradient(self, logits: Tensor) -> Tensor:
        """Of what one router gave (N, E)."""
        probabilities, of_each = logits.float().softmax(-1), self.of_probabilities * self.d_loss
        gradient = probabilities * (of_each - (probabilities @ of_each)[:, None])
        return (gradient if self.mask is None else gradient * self.mask[:, None]).to(logits.dtype)


class _AddedLoss(torch.autograd.Function):
    """loss + balance; the backward passes here before it reaches a block."""

    @staticmethod
    def forward(ctx, loss, value, balance):
        ctx.balance = balance
        return loss + value

    @staticmethod
    def backward(ctx, d_loss):
        ctx.balance.d_loss = d_loss.detach()
        return d_loss, None, None


@torch.library.custom_op("fsdp_qlora::balanced", mutates_args=())
def _balanced(scores: Tensor, logits: Tensor, number: int) -> Tensor:
    """The scores, of a router that gave these logits."""
    _BALANCES[number].count(logits)
    return scores.clone()


@torch.library.custom_op("fsdp_qlora::balance_gradient", mutates_args=())
def _balance_gradient(logits: Tensor, number: int) -> Tensor:
    return _BALANCES[number].gradient(logits)


@_balanced.register_fake
def _(scores, logits, number):
    return torch.empty_like(scores)


@_balance_gradient.register_fake
def _(logits, number):
    return torch.empty_like(logits)


def _save(ctx, inputs, output):
    _, logits, ctx.number = inputs
    ctx.save_for_backward(logits)


def _backward(ctx, d_scores):
    (logits,) = ctx.saved_tensors
    return d_scores, _balance_gradient(logits, ctx.number), None


_balanced.register_autograd(_backward, setup_context=_save)


def apply_router_balance(causal: nn.Module, coefficient: float) -> RouterBalance:
    """Add the balance loss of its routers to a causal model's loss while it trains, in place.

    Raises ValueError, naming the flag, for a model that transformers has no such loss for.
    """
    recorder = check_router_balance(causal, coefficient)
    balance = RouterBalance(coefficient, causal.config.get_text_config().num_experts_per_tok)
    for name, module in causal.named_modules():
        if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
            module.balanced_by = balance.number, recorder.index
            compute_by(module, _routed)
    causal.forward = partial(_balanced_forward, causal, causal.forward, balance)
    return balance


def check_router_balance(causal: nn.Module, coefficient: float) -> OutputRecorder:
    """Which modules a model's router logits come from. Raises ValueError as `apply_router_balance`."""
    recorder = _router_recorder(causal)
    if recorder is None:
        raise ValueError(
            f"--router_aux_loss_coef {coefficient:g}: transformers has no balance loss for "
            f"{type(causal).__name__}; leave it out"
        )
    return recorder


def _router_recorder(causal: nn.Module) -> OutputRecorder | None:
    """Which modules transformers takes a model's router logits from, if it balances them."""
    if not hasattr(sys.modules[type(causal).__module__], "load_balancing_loss_func"):
        return None
    found = (getattr(type(causal), "_can_record_outputs", None) or {}).get("router_logits")
    if isinstance(found, type):
        found = OutputRecorder(found)
    return found if isinstance(found, OutputRecorder) else None


def _routed(router: nn.Module, own, *args, **kwargs):
    """A router's forward, whose scores carry the gradient of the balance to its logits."""
    given, (number, index) = own(router, *args, **kwargs), router.balanced_by
    if isinstance(given, Tensor):
        return _balanced(given, given, number)
    scores = next(
        i
        for i, part in enumerate(given)
        if i != index and isinstance(part, Tensor) and part.is_floating_point()
    )
    carried = _balanced(given[scores], given[index], number)
    return tuple(carried if i == scores else part for i, part in enumerate(given))


def _balanced_forward(causal, forward, balance, *args, **kwargs):
    """A causal model's forward with the balance in its loss.

    A batch has real_tokens (B, T) where some are padding, and transformers' own has its attention_mask.
    """
    real = kwargs.pop("real_tokens", None)
    if not causal.training or kwargs.get("labels") is None:
        return forward(*args, **kwargs)
    balance.start(kwargs.get("attention_mask") if real is None else real)
    given = forward(*args, **kwargs)
    given.loss = balance.added_to(given.loss)
    return given
