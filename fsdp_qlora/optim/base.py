"""What this project's own optimizers share: states beside sharded weights, in dtypes of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count

import torch
from torch import Tensor
from torch.optim import Optimizer


class ShardedOptimizer(Optimizer):
    """An optimizer that updates each rank's rows of a weight; a subclass says how.

    States are plain tensors or DTensors beside their weight, so that distributed checkpoints save them
    and cut them anew for another number of ranks.
    """

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """The states of a weight before its first update, without "step"."""
        raise NotImplementedError

    def update(self, p: Tensor, state: dict[str, Tensor], group: dict, salt: int):
        """Update a weight and its states in place. `salt` differs for each weight and step."""
        raise NotImplementedError

    def update_all(self, due: Iterable[tuple[Tensor, dict[str, Tensor], dict, int]]):
        """`update` of each; a subclass may take several together."""
        for each in due:
            self.update(*each)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every weight that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_all(self.due())
        return loss

    def due(self) -> Iterator[tuple[Tensor, dict[str, Tensor], dict, int]]:
        """Each weight that has a gradient, with its states, group and salt; its steps are counted."""
        numbers = count()  # through all groups, or the same chances would round two weights
        for group in self.param_groups:
            for p, number in zip(group["params"], numbers, strict=False):
                if p.grad is None:
                    continue
                self.make_state(p)
                state = self.state[p]
                state["step"] += 1
                yield p, state, group, int32(int(state["step"]) * 1000003 + number * 7919)

    def make_state(self, p: Tensor):
        """Make the states of a weight that has none."""
        if not self.state[p]:
            self.state[p].update(step=torch.zeros(()), **self.new_state(p))

    def load_state_dict(self, state_dict):
        """Load as torch does, and keep the dtypes: torch casts every state to the weight's."""
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            saved = state_dict["state"].get(number, {})
            self.state[p].update(
                {name: value.to(p.device) for name, value in saved.items() if name != "step"}
            )


def make_states(optimizer: Optimizer):
    """Make the states of all weights now, in place; the first update would.

    Then they take memory before activations do, and not the holes that the first step's leave: where
    those were, the next step's found none as large, and torch took as much anew from the driver. It
    is also known before the first forward whether they fit. Torch's optimizers make them in an update,
    here of learning rate 0 by gradients of 0, which changes no weight; no step is counted.
    """
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, ShardedOptimizer):
        for p in weights:
            optimizer.make_state(p)
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for p in weights:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    # A step's gradients are made in another stream under FSDP, and would not take their place.
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].zero_()


def zeros_beside(p: Tensor, tail: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of p's shape but for the last dimensions, at most p's, which are `tail`; sharded as p is.

    Made by slicing p: `DTensor.from_local` would move them to the mesh's device, and under CPU offload
    p is not there.
    """
    like = p.detach()
    for dim, size in enumerate(tail, p.dim() - len(tail)):
        if size != p.shape[dim]:
            like = like.narrow(dim, 0, size)
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def sent(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A few numbers as a tensor on `device`, without waiting for it."""
    numbers = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return numbers.to(device, non_blocking=True)


def int32(number: int) -> int:
    """The lowest 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
