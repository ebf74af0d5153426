"""Run a function on real gloo ranks and bring back what each returned.

Ranks are forked from a server that has the heavy imports done, so a spawn costs about a second; put
several cases into one function all the same. On a machine of fewer GPUs than ranks they share GPUs.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import queue
import signal
import time
import traceback
from contextlib import nullcontext, suppress

import torch

from fsdp_qlora.dist import free_port
from tests.patience import patience

PRELOAD = [
    "pytest",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "fsdp_qlora.cli",
    "fsdp_qlora.training.trainer",
    "matplotlib.pyplot",
    "matplotlib.backends.backend_agg",
    "tests.warm",
]


def run_ranks(
    function,
    world_size: int,
    *args,
    timeout: float = 300,
    grouped: bool = True,
    device: str = "cpu",
) -> list:
    """`function(*args)` on every rank; the results by rank. Raises if any rank failed.

    `grouped` makes the process group; without it the function meets the world as train.py does. Ranks
    of which one has crashed (SIGSEGV) are started once more.
    """
    for tries_left in (1, 0):
        outcomes, codes = _outcomes(function, world_size, args, timeout, grouped, device)
        # A thread of torch's gloo has crashed in malloc, once in thousands of spawns (docs/LOG.md).
        if -signal.SIGSEGV not in codes.values() or not tries_left:
            break
        print("a rank crashed; the ranks start once more")
    missing = {rank: code for rank, code in codes.items() if rank not in outcomes}
    assert not missing, f"no result; exit codes by rank: {missing}"
    failures = [f"rank {r}:\n{v}" for r, (ok, v) in sorted(outcomes.items()) if not ok]
    assert not failures, "\n".join(failures)
    return [_unpacked(outcomes[r][1]) for r in range(world_size)]


def _outcomes(function, world_size, args, timeout, grouped, device) -> tuple[dict, dict]:
    """By rank: whether it ended well with what it returned or its error, and its exit code."""
    # A forked process can't use CUDA once the imports have touched the driver.
    on_gpu_machine = torch.cuda.device_count() > 0
    context = multiprocessing.get_context("spawn" if on_gpu_machine else "forkserver")
    if not on_gpu_machine:
        context.set_forkserver_preload(PRELOAD)
    results, port = context.Queue(), free_port()
    shared = (world_size, port, results, function, args, grouped, device)
    ranks = [context.Process(target=_rank, args=(rank, *shared)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    outcomes: dict[int, tuple] = {}
    deadline = time.monotonic() + patience(timeout)
    try:
        while len(outcomes) < world_size and time.monotonic() < deadline:
            # What a rank that has ended said may still be on its way.
            ended = all(p.exitcode is not None for r, p in enumerate(ranks) if r not in outcomes)
            with suppress(queue.Empty):
                rank, outcome = results.get(timeout=2)
                outcomes[rank] = outcome
                continue
            if ended:
                break
        for process in ranks:
            process.join(timeout=patience(20))
    finally:  # at Ctrl-C too, or Python would wait for them
        for process in ranks:
            process.kill()
            process.join()
    return outcomes, {rank: process.exitcode for rank, process in enumerate(ranks)}


def _rank(rank, world_size, port, results, function, args, grouped, device):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    if device == "cuda" and torch.cuda.device_count() < world_size:
        share_gpus(rank, torch.cuda.device_count())
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


def share_gpus(rank: int, gpus: int):
    """Give this rank one of too few GPUs, by the environment.

    NCCL refuses two ranks on one GPU unless it takes them for ranks of two machines; they talk over a socket.
    """
    os.environ.update(LOCAL_RANK=str(rank % gpus), NCCL_HOSTID=f"rank {rank}", NCCL_NET="Socket")


def _packed(result) -> bytes:
    """Results as bytes: tensors in a queue would live in the memory of a rank that is gone."""
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)
