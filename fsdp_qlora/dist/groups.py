"""Where ranks meet: their store, the process groups, and the meshes of a strategy.

A script's own default group may serve GPUs alone, as accelerate's and `init_process_group("nccl")` do, and
what host memory holds must travel all the same: then gloo gets a group of its own.
"""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import rank_store
from .rank_store import ErrorKey, RankStore
from .ranks import Ranks, check_ranks, is_kept_by_launcher, ranks_from_env
from .store_connection import RENDEZVOUS_TIMEOUT, common_store


class _Holder(Protocol):
    """What must let go of a process group before it ends."""

    def release(self): ...


_TO_SAY_AN_ERROR = timedelta(seconds=10)  # for the connection that it needs

_rendezvous_count = itertools.count()


@contextmanager
def process_group(device: torch.device, timeout_minutes: float = 30.0) -> Iterator[None]:
    """The default process group for the life of the block.

    On CUDA it serves both devices: NCCL for the GPU, gloo for host tensors (counts, and gradient
    norms under CPU offload). The timeout counts from when all ranks are there: one that prepares
    its data or fetches the model for longer makes the others wait and fails nothing. Raises
    ValueError with the error of a rank that will not come.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, world_size = rendezvous()
    store.set_timeout(timeout)
    _rank_stores.append(RankStore(store, rank, world_size))
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    try:
        yield
        # gloo's threads free a finished collective's tensors a moment after its caller goes on, and
        # need the interpreter for it: a rank that ends in that moment aborts. A barrier has no
        # tensors, and while this rank waits for it they free the last ones.
        dist.barrier()
    finally:
        for holder in list(_holders):
            holder.release()
        _rank_stores.pop()
        dist.destroy_process_group()


@contextmanager
def simulated_world(world_size: int, gpus_per_node: int):
    """This process as rank 0 of ranks that do not exist, for the life of the block.

    torch's fake process group: a collective returns at once and moves nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    of_rank_0 = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=gpus_per_node)
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in of_rank_0.items()})
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        yield
    finally:
        dist.destroy_process_group()
        for name in of_rank_0:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in of_rank_0 if name in before})


_rank_stores: list[RankStore] = []  # of the process group that is open, last


def open_rank_store() -> RankStore:
    """The store of the group that `process_group` has made. Raises ValueError in any other group."""
    if not _rank_stores:
        raise ValueError(
            "a run needs the group of `with fsdp_qlora.process_group(device):`, whose store tells ranks of "
            "stops and checkpoints; use it in place of init_process_group, or call fsdp_qlora.train_step "
            "in a loop of your own"
        )
    return _rank_stores[-1]


def rendezvous() -> tuple[dist.Store, int, int]:
    """The ranks' common store once every rank has come to it; this rank, and how many there are.

    Raises ErrorOnAnotherRank with what a rank says that will not come.
    """
    ranks = ranks_from_env()
    rank, world_size = ranks.rank, ranks.world_size
    # A rank alone needs no port.
    store = dist.HashStore() if world_size == 1 else common_store(RENDEZVOUS_TIMEOUT)
    store = dist.PrefixStore("fsdp_qlora", store)
    errors = ErrorKey(store, is_new=not is_kept_by_launcher())
    store = dist.PrefixStore(f"rendezvous {next(_rendezvous_count)}", store)  # ranks count alike
    store = rank_store.rendezvous(store, rank, world_size, RENDEZVOUS_TIMEOUT, errors)
    return store, rank, world_size


def broadcast_error(text: str):
    """Send an error to every rank, and wait until each has printed one, before this rank ends.

    A launcher ends the others when this rank ends. Without one they would wait for it: rank 0's end is
    seen by ranks that are connected to its store, and another's error stays there.
    """
    with suppress(RuntimeError, ValueError):  # the variables are the error, or rank 0 is gone
        check_ranks()
        if (ranks := ranks_from_env()).world_size > 1:
            store = dist.PrefixStore("fsdp_qlora", common_store(_TO_SAY_AN_ERROR))
            rank_store.broadcast_error(store, ranks.rank, ranks.world_size, text)


def broadcast_by_main(answer: Callable[[], str]) -> str:
    """What `answer` gives on rank 0, on every rank; works before there is a process group."""
    store, rank, _ = rendezvous()
    if rank == 0:
        store.set("told", answer())
    return store.get("told").decode()


def _backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """A group's backend for each type of device that it serves."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def main_device_type() -> str:
    """The device that the process group is for: CUDA wherever that has a backend of its own, as NCCL."""
    backends = _backends()
    return "cuda" if backends.get("cuda") not in (None, backends.get("cpu")) else "cpu"


_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def host_group() -> dist.ProcessGroup:
    """All ranks, for tensors in host memory: the default group, or gloo's where that serves GPUs alone.

    gloo's is made where all ranks first need it, waits as long for a rank, and ends with the default.
    """
    backends, default = _backends(), dist.group.WORLD
    assert default is not None  # or `_backends` would have raised
    if "cpu" in backends:
        return default
    if default not in _host_groups:
        options = default._get_backend(torch.device(next(iter(backends)))).options
        _host_groups[default] = dist.new_group(backend="gloo", timeout=options._timeout)
    return _host_groups[default]


@atexit.register
def _end_host_groups():
    """Wait for gloo's threads, as the end of `process_group` does: scripts rarely end their groups."""
    while _host_groups:
        with suppress(ValueError):  # it ended with its default group, which something still holds
            dist.destroy_process_group(_host_groups.popitem()[1])


def serves_host(mesh: DeviceMesh) -> bool:
    """Whether tensors in host memory can travel over a mesh."""
    return all("cpu" in _backends(group) for group in mesh.get_all_groups())


_holders: WeakSet[_Holder] = WeakSet()


def hold_collectives(holder: _Holder):
    """Call `holder.release()` before the process group ends.

    For what has captured the group's collectives: NCCL waits for all graphs that hold one.
    """
    _holders.add(holder)


def shard_mesh(device: torch.device) -> DeviceMesh:
    """All ranks in one shard group: shape (world,)."""
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("shard",))


def hybrid_mesh(device: torch.device, shard_group_size: int) -> DeviceMesh:
    """Replicas of shard groups: shape (replicas, shard_group_size). A group is consecutive ranks."""
    shape = (dist.get_world_size() // shard_group_size, shard_group_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def resolve_shard_group_size(requested: int, ranks: Ranks, strategy: str) -> int:
    """GPUs per shard group of a hybrid strategy; -1 = a node's, or half of a single node's.

    A size that was asked for may be that of the whole world: one group is left where other nodes are
    lost. Raises ValueError if the world cannot be cut into groups of two or more.
    """
    size = requested
    if size == -1:
        size = ranks.local_world_size if ranks.nodes > 1 else ranks.world_size // 2
    if size < 2 or ranks.world_size % size:
        raise ValueError(
            f"--sharding_strategy {strategy} needs shard groups of 2 or more GPUs; "
            f"{ranks.world_size} ranks with --shard_group_size {requested} can't be divided like "
            f"this; give a --shard_group_size that divides {ranks.world_size}, or use full_shard or "
            "shard_grad_op"
        )
    return size
