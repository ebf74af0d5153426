"""The ranks of a run: the process group, the meshes, and which rows of a tensor a rank holds.

The only reader of RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. One rank is a world like any
other: the same code runs with a group of one, so there is no second path to keep right.

The only caller of collectives over all ranks, too. A script's own default group may serve GPUs alone,
as accelerate's and `init_process_group("nccl")` do, and what host memory holds must travel all the same.
"""

from __future__ import annotations

import atexit
import itertools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from . import rank_store
from .rank_store import ErrorKey, RankStore
from .redact import redact

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """Who this process is among the ranks that torchrun started; a world of one without torchrun."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    def share_of_rows(self, ranks_per_row: int) -> tuple[int, int]:
        """Which share of a step's rows this rank computes, of how many: one of its group's."""
        return self.rank // ranks_per_row, self.world_size // ranks_per_row


def ranks_from_env() -> Ranks:
    """Rank, world size and their numbers on this machine, as torchrun exported them, or one rank.

    Ranks that something else started (torch's `mp.spawn`) are those of their process group, of one
    machine unless the environment says more.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=int(os.environ.get("LOCAL_RANK", rank % local_world_size)),
        local_world_size=local_world_size,
    )


def launched() -> bool:
    """True inside a rank that torchrun, or our own launcher, started."""
    return "RANK" in os.environ


def run_on_node() -> str:
    """What the ranks of a run on this node have in common, and no other ranks."""
    variables = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    return " ".join(os.environ.get(name, "") for name in variables)


def rank_device(device_type: str, ranks: Ranks | None = None) -> torch.device:
    """This rank's device; `device_type` is auto, cpu or cuda.

    ranks: those of the environment if not given. Raises ValueError if there is no GPU for this rank.
    """
    ranks = ranks or ranks_from_env()
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "--device cuda: no CUDA device is visible; use --device cpu, or check the "
            "driver and CUDA_VISIBLE_DEVICES"
        )
    if ranks.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"rank {ranks.rank} has no GPU: {ranks.local_world_size} ranks were started on a "
            f"machine with {torch.cuda.device_count()} visible GPUs; lower --nproc_per_node"
        )
    return torch.device("cuda", ranks.local_rank)


class _Holder(Protocol):
    """What must let go of a process group before it ends."""

    def release(self): ...


_RENDEZVOUS_TIMEOUT = timedelta(
    hours=6
)  # how long the first rank waits for one that still tokenizes
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


def _backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """A group's backend for each type of device that it serves."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def main_device_type() -> str:
    """The device that the process group is for: CUDA wherever that has a backend of its own, as NCCL."""
    backends = _backends()
    return "cuda" if backends.get("cuda") not in (None, backends.get("cpu")) else "cpu"


_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _host_group() -> dist.ProcessGroup:
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


def _group_for(tensor: Tensor) -> dist.ProcessGroup | None:
    """All ranks, for a tensor where it is; None is the default group."""
    return _host_group() if tensor.device.type == "cpu" else None


_holders: WeakSet[_Holder] = WeakSet()


def hold_collectives(holder: _Holder):
    """Call `holder.release()` before the process group ends.

    For what has captured the group's collectives: NCCL waits for all graphs that hold one.
    """
    _holders.add(holder)


def rendezvous() -> tuple[dist.Store, int, int]:
    """The ranks' common store once every rank has come to it; this rank, and how many there are.

    Raises ErrorOnAnotherRank with what a rank says that will not come.
    """
    if launched():
        store, rank, world_size = next(dist.rendezvous("env://", timeout=_RENDEZVOUS_TIMEOUT))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1  # of this process alone: no port is open
    store = dist.PrefixStore("fsdp_qlora", store)
    errors = ErrorKey(store)
    store = dist.PrefixStore(f"rendezvous {next(_rendezvous_count)}", store)  # ranks count alike
    store = rank_store.rendezvous(store, rank, world_size, _RENDEZVOUS_TIMEOUT, errors)
    return store, rank, world_size


def broadcast_error(text: str):
    """Send an error to every rank, and wait until each has printed one, before this rank ends.

    Only where the launcher keeps the store: it ends the others when this rank ends.
    """
    ranks = ranks_from_env()
    if ranks.world_size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    with suppress(RuntimeError):
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=10)))
        rank_store.broadcast_error(dist.PrefixStore("fsdp_qlora", store), rank, world_size, text)


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


def broadcast_by_main(answer: Callable[[], str]) -> str:
    """What `answer` gives on rank 0, on every rank; works before there is a process group."""
    store, rank, _ = rendezvous()
    if rank == 0:
        store.set("told", answer())
    return store.get("told").decode()


def free_port(host: str = "localhost", port: int = 0) -> int:
    """A TCP port of this machine that nothing listens on now: `port`, or any if that is 0.

    Raises OSError or OverflowError if it is taken, or the host is not this machine.
    """
    with socket.socket() as s:
        s.bind((host, port))
        return s.getsockname()[1]


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


def local_rows(parameter: Tensor) -> tuple[Tensor, int, int]:
    """This rank's part of a parameter: its tensor, and its rows (start, stop) of the whole.

    An unsharded parameter (O, ...) gives itself, 0 and O; the tensor shares the parameter's memory.
    """
    if not isinstance(parameter, DTensor):
        return parameter.data, 0, parameter.shape[0]
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    start = offset[0] if shape[0] else 0
    return parameter.to_local().data, start, start + shape[0]


def is_first_copy(tensor: Tensor) -> bool:
    """True on one of the ranks that hold the same rows of a tensor; a plain tensor is rank 0's."""
    if not isinstance(tensor, DTensor):
        return ranks_from_env().is_main
    return all(
        place == 0
        for place, placement in zip(
            tensor.device_mesh.get_coordinate(), tensor.placements, strict=True
        )
        if placement.is_replicate()
    )


def full_tensor(parameter: Tensor) -> Tensor:
    """The whole of a sharded parameter, on the device of its rows; every rank must call it."""
    if not isinstance(parameter, DTensor):
        return parameter
    local, mesh = parameter.to_local(), parameter.device_mesh
    if local.device.type == mesh.device_type or serves_host(mesh):
        return parameter.full_tensor()
    # Offloaded, and the mesh is for GPUs alone: it travels through the GPU.
    there = DTensor.from_local(
        local.to(torch.device(mesh.device_type, torch.cuda.current_device())),
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return there.full_tensor().to(local.device)


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


def split_as(local: Tensor, parameter: Tensor) -> Tensor:
    """This rank's rows as a tensor that is split, or whole, as a parameter of its shape is."""
    local = local.to(local_rows(parameter)[0].device)
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


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
    dist.all_gather_object(values, value, group=_host_group())
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
    dist.broadcast_object_list(message, src=0, group=_host_group())
    if error:
        raise error
    if message[1]:
        raise (ValueError if message[1][0] else OSError)(message[1][1])
    return message[0]


def print_main(*args, **kwargs):
    """Print on rank 0 only, without secrets."""
    if ranks_from_env().is_main:
        print(*(redact(str(arg)) for arg in args), **kwargs, flush=True)


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
    except Exception as caught:
        error = caught
    message = [f"{type(error).__name__}: {error}" if error else None]
    dist.broadcast_object_list(message, src=0, group=_host_group())
    if message[0]:
        raise OSError(f"rank 0 could not write: {message[0]}") from error
    if error:
        raise error
