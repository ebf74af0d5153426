"""What a machine can do at most: products, memory, links and host copies, in well under a minute.

Every rank measures its own device at the same time, for cards that work together also share power and
the host. The slowest rank's figure counts. The CPU measures the same with small tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ..dist import all_gather_rows, gather_over_ranks, ranks_from_env, reduce_scatter_rows
from ..quantization.formats import dequantize_rows, quantize_rows
from ..quantization.fp8 import fp8_problem, quantize_tokens, scaled_product

# (N, I, O) of products: tokens by the layers of models of 8 and of 70 billion weights.
_PRODUCTS = ((8192, 4096, 4096), (8192, 4096, 14336), (4096, 8192, 28672))
_SMALL_PRODUCTS = ((256, 256, 256), (256, 256, 704))
SECONDS = 0.25  # of each measurement, after it has run once
GB = 1e9


def _seconds_of(work: Callable, device: torch.device, at_least: float = SECONDS) -> float:
    """Seconds of one call, over as many as take `at_least`; the device is waited for."""
    work()
    count, taken = 1, 0.0
    while True:
        wait_for(device)
        start = time.perf_counter()
        for _ in range(count):
            work()
        wait_for(device)
        taken = time.perf_counter() - start
        if taken >= at_least / 2:
            return taken / count
        count = max(2 * count, int(count * at_least / max(taken, 1e-6)))


def wait_for(device: torch.device):
    """Until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _product_tflops(device: torch.device, fp8: bool = False) -> float:
    """The highest rate of bf16 products, or of fp8 ones with a scale per row."""
    shapes = _PRODUCTS if device.type == "cuda" else _SMALL_PRODUCTS
    return max(
        2 * n * wide * out / _seconds_of(product(n, wide, out, device, fp8), device) / 1e12
        for n, wide, out in shapes
    )


def product(n: int, wide: int, out: int, device: torch.device, fp8: bool) -> Callable:
    """x W^T of random x (n, wide) and W (out, wide), as a call."""
    x, w = (torch.randn(rows, wide, device=device, dtype=torch.bfloat16) for rows in (n, out))
    if not fp8:
        return lambda: x @ w.t()
    x, x_scale = quantize_tokens([x], [1.0])
    w, w_scale = quantize_tokens([w], [1.0])
    return lambda: scaled_product(x, x_scale, w, w_scale, torch.bfloat16)


def copy_gb_s(device: torch.device, gib: float) -> float:
    """Bytes read and written per second by a copy within one memory."""
    source = torch.zeros(int(gib * 2**30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / _seconds_of(lambda: target.copy_(source), device) / GB


def unpack_gb_s(device: torch.device) -> float:
    """Bytes read and written per second where NF4 weights become bf16 ones."""
    rows, wide = (14336, 4096) if device.type == "cuda" else (256, 256)
    packed, absmax = quantize_rows(torch.randn(rows, wide, device=device, dtype=torch.bfloat16))

    def unpack():
        return dequantize_rows(packed, absmax, wide, "nf4", torch.bfloat16)

    moved = packed.nbytes + absmax.nbytes + 2 * rows * wide
    return moved / _seconds_of(unpack, device) / GB


def _host_copies_gb_s(device: torch.device, gib: float) -> dict[str, float]:
    """Bytes per second to the GPU and from it, through page-locked memory; nothing on the CPU."""
    if device.type != "cuda":
        return {}
    host = torch.empty(int(gib * 2**30), dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    ways = dict(
        to_gpu=lambda: there.copy_(host, non_blocking=True),
        from_gpu=lambda: host.copy_(there, non_blocking=True),
    )
    return {name: len(host) / _seconds_of(copy, device) / GB for name, copy in ways.items()}


def _collectives_gb_s(device: torch.device, mib: float) -> dict[str, dict[int, float]]:
    """Bus bandwidth of all-gather and reduce-scatter over the first 2, 4, ... ranks, and all of them.

    That is (n - 1)/n of the gathered bytes per second, on the slowest of the n ranks. Every rank
    must call it.
    """
    world = dist.get_world_size()
    counts = sorted({2**i for i in range(1, world.bit_length()) if 2**i <= world} | {world} - {1})
    found: dict[str, dict[int, float]] = dict(all_gather={}, reduce_scatter={})
    for n in counts:
        group = dist.new_group(list(range(n)))
        if ranks_from_env().rank < n:
            size = int(mib * 2**20 / 4) // n * n
            part, whole = (torch.zeros(length, device=device) for length in (size // n, size))
            for name, work in (
                ("all_gather", partial(all_gather_rows, part, group)),
                ("reduce_scatter", partial(reduce_scatter_rows, whole, group)),
            ):
                taken = _seconds_of_all(work, device, group)
                found[name][n] = (n - 1) / n * whole.nbytes / taken / GB
        dist.barrier()
    return found


def _seconds_of_all(work: Callable, device: torch.device, group, count: int = 10) -> float:
    """Seconds of one collective, which all ranks of the group must call equally often."""
    for _ in range(2):
        work()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(count):
        work()
    wait_for(device)
    taken = torch.tensor([(time.perf_counter() - start) / count])
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
    return taken.item()


def measure_ceilings(device: torch.device) -> dict:
    """All of it, the slowest rank's figures, on every rank."""
    large = device.type == "cuda"
    with_fp8 = large and fp8_problem(device) is None
    own = dict(
        bf16_tflops=_product_tflops(device),
        fp8_tflops=_product_tflops(device, True) if with_fp8 else None,
        copy_gb_s=copy_gb_s(device, 1.0 if large else 0.03),
        unpack_gb_s=unpack_gb_s(device),
        host=_host_copies_gb_s(device, 0.25),
        host_memory_gb_s=copy_gb_s(torch.device("cpu"), 0.25 if large else 0.03),
    )
    collectives = _collectives_gb_s(device, 256 if large else 1)
    everyones = gather_over_ranks(own)
    return {name: slowest([rank[name] for rank in everyones]) for name in own} | gather_over_ranks(
        collectives
    )[0]


def slowest(values: list):
    """The lowest of the ranks' figures; by name, where each is a dict; None where none was measured."""
    if isinstance(values[0], dict):
        return {name: min(v[name] for v in values) for name in values[0]}
    return None if values[0] is None else min(values)
