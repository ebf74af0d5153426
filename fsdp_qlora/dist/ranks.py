"""Who this process is among the ranks of a run: the only reader of RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..redact import redact


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
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    local_world_size = _number("LOCAL_WORLD_SIZE", world_size)
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", rank % local_world_size),
        local_world_size=local_world_size,
    )


def _number(name: str, default: int) -> int:
    """A variable of the environment as a number; one that is set to nothing is not set."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise ValueError(
            f"{name}={text}: the environment variable is no number; start the "
            "ranks with torchrun, or unset RANK for a run of its own"
        )
    return int(text)


def launched() -> bool:
    """True inside a rank that torchrun, our own launcher or a script with RANK set started."""
    return bool(os.environ.get("RANK"))


def check_ranks():
    """Refuse variables of ranks that contradict each other. Raises ValueError naming them."""
    ranks = ranks_from_env()
    if not ranks.rank < ranks.world_size:
        raise ValueError(
            f"RANK={ranks.rank} WORLD_SIZE={ranks.world_size}: ranks count from 0, below WORLD_SIZE; "
            "start the ranks with torchrun"
        )
    if not ranks.local_rank < ranks.local_world_size:
        raise ValueError(
            f"LOCAL_RANK={ranks.local_rank} LOCAL_WORLD_SIZE={ranks.local_world_size}: ranks of a machine "
            "count from 0, below LOCAL_WORLD_SIZE; start the ranks with torchrun"
        )
    if ranks.world_size > 1:
        store_address()


def store_address() -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT: where ranks meet. Raises ValueError if one is not set."""
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT", 0)
    if not host or not 0 < port < 2**16:
        raise ValueError(
            f"MASTER_ADDR={host or ''} MASTER_PORT={port or ''}: RANK and WORLD_SIZE are set, and ranks need "
            "a host and a port to meet at; start them with torchrun, or unset RANK for a run of its own"
        )
    return host, port


def is_kept_by_launcher() -> bool:
    """Whether the ranks' store is in a process of the launcher's, which outlives any rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


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


def free_port(host: str = "localhost", port: int = 0) -> int:
    """A TCP port of this machine that nothing listens on now: `port`, or any if that is 0.

    Raises OSError or OverflowError if it is taken, or the host is not this machine.
    """
    with socket.socket() as s:
        s.bind((host, port))
        return s.getsockname()[1]


def print_main(*args, **kwargs):
    """Print on rank 0 only, without secrets."""
    if ranks_from_env().is_main:
        print(*(redact(str(arg)) for arg in args), **kwargs, flush=True)
