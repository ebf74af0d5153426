"""When a unit's weights are gathered: ahead of their use, or kept between micro-batches.

Names and meanings are FSDP1's, on FSDP2's modules (`FSDPModule`), which a caller has made with
`sharding.apply_sharding`. "Unit" is a module whose parameters are gathered together.

    backward_pre    the next unit is gathered before this one's backward: most overlap, two units at once
    backward_post   after this one's backward, beside the reduction of its gradients
    none            when it is needed
    forward_prefetch  the next unit is gathered before this one's forward is queued, for a slow host

https://docs.pytorch.org/docs/stable/fsdp.html#torch.distributed.fsdp.BackwardPrefetch
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

BackwardPrefetch = Literal["backward_pre", "backward_post", "none"]
_BACKWARD_PREFETCH = get_args(BackwardPrefetch)


def check_prefetch(when: str):
    """Raises ValueError, with the names there are, for an unknown one."""
    if when not in _BACKWARD_PREFETCH:
        raise ValueError(f"--backward_prefetch {when}: choose {', '.join(_BACKWARD_PREFETCH)}")


def apply_backward_prefetch(model: nn.Module, units: list[nn.Module], when: str):
    """Let the sharded `units` of `model` be gathered for the backward as `when` says, in place.

    `units` are those whose weights a backward needs: a frozen embedding is not one.
    """
    order = _backward_order(model, units)
    # FSDP2 gathers what came before in the forward: before the last of these, an unneeded embedding.
    _stop_implicit_prefetch(order[-1:] if when == "backward_pre" else [model, *order])
    if when == "backward_post":
        for unit, following in zip(order, order[1:], strict=False):
            _gather_after(unit, following)


def _stop_implicit_prefetch(units: list[nn.Module]):
    """Gather nothing ahead of these units' backward: FSDP2 takes a unit naming itself as that."""
    for unit in units:
        unit.set_modules_to_backward_prefetch([unit])


def _gather_after(unit: nn.Module, following: nn.Module):
    """Start gathering `following` when the gradient of `unit`'s input is known.

    Then the unit's own backward is done, and FSDP has not yet reduced its gradients: its function
    that does so comes before the hooked tensor in the backward's order.
    """

    def watch(module, args, kwargs):
        inputs = [
            t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad
        ]
        for t in inputs[:1]:
            t.register_hook(lambda grad: start(following))

    unit.register_forward_pre_hook(watch, with_kwargs=True)


def start(unit: nn.Module):
    """Gather a unit on the communication stream; its pre-backward hook waits for it."""
    unit.unshard(async_op=True)


def apply_forward_prefetch(model: nn.Module, units: list[nn.Module]):
    """Let each unit's forward start the gathering of the next one, in place."""
    order = [m for m in model.modules() if m is model or m in set(units)]
    for unit, following in zip(order, order[1:], strict=False):
        unit.set_modules_to_forward_prefetch([following])


def _backward_order(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    """The units in the order in which the backward meets their ends: the reverse of the forward's."""
    chosen = set(units)
    return [m for m in reversed(list(_outermost_last(model))) if m in chosen]


def _outermost_last(module: nn.Module) -> Iterator[nn.Module]:
    """Modules in the order in which their forwards end: what is inside comes first."""
    for child in module.children():
        yield from _outermost_last(child)
    yield module


def keep_gathered(model: nn.Module):
    """Gather each unit once per optimizer step, in place; freed at its end (`set_last_micro_batch`)."""
    model.set_reshard_after_forward(False)
    model.keeps_gathered = True


def set_last_micro_batch(model: nn.Module, last: bool):
    """Free gathered weights after the next backward only if it is the step's last."""
    if getattr(model, "keeps_gathered", False):
        model.set_reshard_after_backward(last)
