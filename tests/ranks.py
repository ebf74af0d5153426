"""Run a function on real gloo ranks and bring back what each returned.

Ranks are forked from a server that has the heavy imports done, so a spawn costs about a second; put
several cases into one function all the same.
"""
from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from contextlib import nullcontext

import torch

from fsdp_qlora.dist import free_port

PRELOAD = ["torch", "transformers", "peft", "bitsandbytes", "torch.distributed.fsdp",
           "transformers.models.llama.modeling_llama", "fsdp_qlora.cli", "fsdp_qlora.training.trainer",
           "matplotlib.pyplot"]


def run_ranks(function, world_size: int, *args, timeout: float = 300, grouped: bool = True,
              device: str = "cpu") -> list:
    """`function(*args)` on every rank; the results by rank. Raises if any rank failed.

    `grouped` makes the process group; without it the function meets the world as train.py does.
    """
    # A forked process can't use CUDA once the imports have touched the driver.
    on_gpu_machine = torch.cuda.device_count() > 0
    context = multiprocessing.get_context("spawn" if on_gpu_machine else "forkserver")
    if not on_gpu_machine: context.set_forkserver_preload(PRELOAD)
    results, port = context.Queue(), free_port()
    shared = (world_size, port, results, function, args, grouped, device)
    ranks = [context.Process(target=_rank, args=(rank, *shared)) for rank in range(world_size)]
    for process in ranks: process.start()
    try:
        collected = dict(results.get(timeout=timeout) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=20)
            process.kill()
    failures = [f"rank {r}:\n{v}" for r, (ok, v) in sorted(collected.items()) if not ok]
    assert not failures, "\n".join(failures)
    return [_unpacked(collected[r][1]) for r in range(world_size)]


def _rank(rank, world_size, port, results, function, args, grouped, device):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="localhost",
                      MASTER_PORT=str(port))
    from fsdp_qlora.dist import process_group, rank_device
    torch.set_num_threads(1)
    try:
        with process_group(rank_device(device), timeout_minutes=2) if grouped else nullcontext():
            results.put((rank, (True, _packed(function(*args)))))
    except BaseException:  # noqa: BLE001  reported by the parent
        results.put((rank, (False, traceback.format_exc())))
        results.close()
        results.join_thread()
        os._exit(1)


def _packed(result) -> bytes:
    """Results as bytes: tensors in a queue would live in the memory of a rank that is gone."""
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)
