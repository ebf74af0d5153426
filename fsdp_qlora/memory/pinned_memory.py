"""Host memory for what is off the GPU: one region of pages per use, page-locked as a whole.

torch's allocator of pinned memory rounds every tensor up to a power of two: 36 GB in the tensors of
a 70B model become 50. Here a region is mapped once, locked once (`cudaHostRegister`) and cut into
tensors, and it goes back to the system with the last of them.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..dist import ranks_from_env

_ALIGNMENT = 256  # bytes, as the GPU's own allocator starts tensors
_FAULTED_IN = 2**26  # bytes that a thread asks the system for at a time
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU


class _Pages(mmap.mmap):
    """Private anonymous pages that are unlocked before they are unmapped."""

    address = 0  # where they were locked

    def __new__(cls, size: int):
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __del__(self):
        if not self.address or sys.is_finalizing():
            return
        torch.cuda.synchronize()  # a copy may be under way
        torch.cuda.cudart().cudaHostUnregister(self.address)


def host_bytes(size: int, pinned: bool) -> Tensor:
    """`size` bytes of host memory as a uint8 tensor, zero.

    Raises OSError if the system can't give or, for `pinned`, lock that much.
    """
    pages = _Pages(max(1, size))
    with suppress(OSError, AttributeError):  # where the system has them
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    buffer = torch.frombuffer(pages, dtype=torch.uint8)  # keeps `pages` alive
    if pinned:
        fault_in(buffer)
        failed = int(
            torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), len(buffer), _PORTABLE)
        )
        if failed:
            raise OSError(
                f"CUDA can't lock {size / 2**30:.1f} GiB of host memory (error {failed}); "
                "free host memory, or raise the container's limit"
            )
        pages.address = buffer.data_ptr()
    return buffer[:size]


def fault_in(buffer: Tensor):
    """Have the system give all pages of a new region now, to several threads at once.

    Locking takes them one after the other, at 0.2 to 0.3 GiB/s on a virtual machine that gets its memory
    on first use: a minute for the 16 GB of a 30B model.
    """
    threads = max(1, min(8, (os.cpu_count() or 1) // ranks_from_env().local_world_size))
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: part[:: mmap.PAGESIZE].zero_(), buffer.split(_FAULTED_IN)))


def host_tensors(like: Iterable[Tensor], pinned: bool) -> list[Tensor]:
    """Contiguous host tensors of the shapes and dtypes of `like`, cut from one region."""
    like = list(like)
    starts, end = [], 0
    for t in like:
        starts.append(end)
        end += aligned(t.numel() * t.element_size())
    region = host_bytes(end, pinned)
    return [typed(region[start:], t.shape, t.dtype) for start, t in zip(starts, like, strict=True)]


def empty_on_host(parameters: list[Tensor], pinned: bool) -> list[Tensor]:
    """Host tensors for meta parameters; of a sharded one, for this rank's rows."""
    is_sharded = [isinstance(p, DTensor) for p in parameters]
    shards = [p.to_local() if d else p for p, d in zip(parameters, is_sharded, strict=True)]
    made = host_tensors(shards, pinned)
    # Not DTensor.from_local, which would move the shard to the mesh's device.
    return [
        DTensor(t, p._spec, requires_grad=False) if d else t
        for p, t, d in zip(parameters, made, is_sharded, strict=True)
    ]


def aligned(size: int) -> int:
    """Bytes up to where the next tensor may start."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def typed(region: Tensor, shape, dtype: torch.dtype) -> Tensor:
    """The start of a region of bytes as a tensor."""
    return region[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
