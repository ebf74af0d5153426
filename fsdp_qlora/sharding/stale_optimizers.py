"""Refuse an optimizer whose weights a model no longer has.

Sharding and loading put other parameters in the place of a model's. An optimizer that was built before
would update those that are gone, and the model would never change. A hook that torch runs before the
step of any optimizer finds out.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

hooks: list = []  # torch's handle of the hook, once there is one
checked: WeakSet[Optimizer] = WeakSet()  # since parameters were last replaced


def refuse_to_train(replaced: Iterable[nn.Parameter]):
    """From now on an optimizer that holds one of these parameters raises ValueError in its step."""
    for p in replaced:
        p.is_replaced = True  # type: ignore[attr-defined]
    checked.clear()
    if not hooks:
        hooks.append(register_optimizer_step_pre_hook(_check_weights))


def train_instead(
    optimizer: Optimizer, before: dict[nn.Parameter, str], after: dict[str, nn.Parameter]
):
    """Give an optimizer, in place, the parameters that now have the names of those that it holds.

    Raises ValueError if it has states already, which are of whole weights.
    """
    if optimizer.state:
        raise ValueError(
            "the optimizer has made steps already, and its states are of whole weights; shard the "
            "model before the first step"
        )
    for group in optimizer.param_groups:
        group["params"] = [after[before[p]] if p in before else p for p in group["params"]]


def _check_weights(optimizer: Optimizer, *_):
    """Raises ValueError if the optimizer holds a parameter that no model computes with any more."""
    if optimizer in checked:
        return
    if any(_is_gone(p) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the optimizer holds weights that the model no longer has, and would train "
            "nothing; build it after apply_sharding and materialize, and not between a "
            "forward and its backward"
        )
    checked.add(optimizer)


def _is_gone(p: nn.Parameter) -> bool:
    """Whether a parameter was replaced, has no values, or is a gathered copy that FSDP has freed."""
    if isinstance(p, DTensor):
        return False
    return (
        hasattr(p, "is_replaced") or p.is_meta or (p.numel() > 0 and not p.untyped_storage().size())
    )
