"""What a step moves between ranks, and what a rank holds: counted on real ranks and simulated ones alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# By the name of torch's operator, in the c10d and the _c10d_functional namespace.
_NAMES = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast",
}


class Collectives(TorchDispatchMode):
    """Within it, `counts` gets [calls, bytes] of each collective that this rank takes part in.

    Bytes are those of the larger side: what an all-gather gives, what a reduce-scatter takes.
    """

    def __init__(self):
        super().__init__()
        self.counts: dict[str, list[int]] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor comes first: its own collectives are seen then
        result = operator(*args, **(kwargs or {}))
        if (name := _NAMES.get(operator._schema.name.rpartition("::")[2])) and (
            "c10d" in operator.namespace
        ):
            found = self.counts.setdefault(name, [0, 0])
            found[0] += 1
            found[1] += max(_bytes_of(side) for side in (*args, result))
        return result


def _bytes_of(side) -> int:
    """Bytes of the tensors in an argument or a result."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(side) if isinstance(t, Tensor))


def memory_by_part(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of one rank's part of all weights, gradients that there are now, and optimizer states."""
    weights = list(model.named_parameters())
    scales = [p for name, p in weights if name.endswith("absmax")]
    frozen = [p for name, p in weights if not (p.requires_grad or name.endswith("absmax"))]
    trained = [p for _, p in weights if p.requires_grad]
    states = [
        t
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, Tensor) and t.dim()  # not the number of steps
    ]
    return dict(
        frozen=_local_bytes(frozen),
        scales=_local_bytes(scales),
        adapters=_local_bytes(trained),
        gradients=_local_bytes(p.grad for p in trained if p.grad is not None),
        optimizer=_local_bytes(states),
    )


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's part of tensors."""
    return _bytes_of([t.to_local() if isinstance(t, DTensor) else t for t in tensors])
