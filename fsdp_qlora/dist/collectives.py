"""What ranks send each other: the only caller of collectives over all ranks.

Tensors travel over the group of the device where they are, numbers and small values through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import host_group
from .ranks import ranks_from_env

T = TypeVar("T")


def _group_for(tensor: Tensor) -> dist.ProcessGroup | None:
    """All ranks, for a tensor where it is; None is the default group."""
    return host_group() if tensor.device.type == "cpu" else None


def all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM):
    """Sum a tensor over all ranks, or reduce it by another `op`, in place, on the GPU or the host."""
    dist.all_reduce(tensor, op, group=_group_for(tensor))


def broadcast(tensor: Tensor, owner: int = 0):
    """Give every rank the tensor of rank `owner`, in place, on the GPU or the host."""
    dist.broadcast(tensor, owner, group=_group_for(tensor))


def from_rank(
    owner: int,
    tensor: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The tensor that rank `owner` gives, on every rank."""
    if tensor is None or dist.get_rank() != owner:
        tensor = torch.empty(shape, dtype=dtype, device=device)
    broadcast(tensor, owner)
    return tensor


# torch 2.13 renames both, and warns of the old names.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_rows(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks of a group below each other; all are of one shape."""
    gathered = part.new_empty(group.size() * part.shape[0], *part.shape[1:])
    gather_into(gathered, part.contiguous(), group=group)
    return gathered


def reduce_scatter_rows(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the sum of all ranks' `parts`, which hold one part per rank."""
    own = parts.new_empty(parts.shape[0] // group.size(), *parts.shape[1:])
    reduce_into(own, parts.contiguous(), group=group)
    return own


def sum_over_ranks(*counts: int) -> list[int]:
    """Sum of whole numbers over all ranks, through host memory (the GPU is not waited for)."""
    total = torch.tensor(counts, dtype=torch.int64)
    all_reduce(total)
    return total.tolist()


def max_over_ranks(*counts: int) -> list[int]:
    """The largest of whole numbers over all ranks, each by itself, through host memory."""
    largest = torch.tensor(counts, dtype=torch.int64)
    all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def gather_over_ranks(value) -> list:
    """A small picklable value of every rank, in the order of ranks, through host memory."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


def from_rank_in(group: dist.ProcessGroup, owner: int, value):
    """A small picklable value of one rank of a group, on all of them, through host memory."""
    values = [value]
    dist.broadcast_object_list(values, owner, group=group)
    return values[0]


def from_main(function: Callable[[], T]) -> T:
    """What `function` gives on rank 0, on every rank; so is its ValueError or OSError."""
    given, error = None, None
    if ranks_from_env().is_main:
        try:
            given = function()
        except (ValueError, OSError) as caught:
            error = caught
    message: list = [given, (isinstance(error, ValueError), str(error)) if error else None]
    dist.broadcast_object_list(message, src=0, group=host_group())
    if error:
        raise error
    if message[1]:
        raise (ValueError if message[1][0] else OSError)(message[1][1])
    return message[0]


class WriteError(OSError):
    """A rank could not write, and every rank has heard of it."""


@contextmanager
def main_only():
    """Run the block's file writing on rank 0; a failure there is raised on every rank.

    The block runs on all ranks and must write only `if ranks_from_env().is_main`. Without this the
    others would wait for a rank that is gone. Any exception counts: safetensors reports a full disk
    with one of its own.
    """
    error = None
    try:
        yield
    except WriteError:  # of a block inside of this one
        raise
    except Exception as caught:
        error = caught
    message = [f"{type(error).__name__}: {error}" if error else None]
    if dist.is_initialized():
        dist.broadcast_object_list(message, src=0, group=host_group())
    if message[0]:
        raise WriteError(f"rank 0 could not write: {message[0]}") from error
    if error:
        raise error


@contextmanager
def each_writes():
    """Run the block's file writing on every rank; the first rank's failure is raised on every rank.

    No rank may wait for another inside of the block. Any exception counts, as in `main_only`.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    said = gather_over_ranks(f"{type(error).__name__}: {error}" if error else None)
    if failed := [f"rank {rank} could not write: {text}" for rank, text in enumerate(said) if text]:
        raise WriteError(failed[0]) from error
