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
        for each in due: self.update(*each)

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every weight that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad(): loss = closure()
        self.update_all(self.due())
        return loss

    def due(self) -> Iterator[tuple[Tensor, dict[str, Tensor], dict, int]]:
        """Each weight that has a gradient, with its states, group and salt; its steps are counted."""
        numbers = count()  # through all groups, or the same chances would round two weights
        for group in self.param_groups:
            for p, number in zip(group["params"], numbers, strict=False):
                if p.grad is None: continue
                state = self.state[p]
                if not state: state.update(step=torch.zeros(()), **self.new_state(p))
                state["step"] += 1
                yield p, state, group, int32(int(state["step"]) * 1000003 + number * 7919)

    def load_state_dict(self, state_dict):
        """Load as torch does, and keep the dtypes: torch casts every state to the weight's."""
        super().load_state_dict(state_dict)
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            saved = state_dict["state"].get(number, {})
            self.state[p].update({name: value.to(p.device) for name, value in saved.items()
                                  if name != "step"})


def zeros_beside(p: Tensor, tail: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of p's shape but for the last dimensions, at most p's, which are `tail`; sharded as p is.

    Made by slicing p: `DTensor.from_local` would move them to the mesh's device, and under CPU offload
    p is not there.
    """
    like = p.detach()
    for dim, size in enumerate(tail, p.dim() - len(tail)):
        if size != p.shape[dim]: like = like.narrow(dim, 0, size)
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def sent(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A few numbers as a tensor on `device`, without waiting for it."""
    numbers = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return numbers.to(device, non_blocking=True)


def int32(number: int) -> int:
    """The lowest 32 bits as a signed number."""
    return (number + 2**31) % 2**32 - 2**31
