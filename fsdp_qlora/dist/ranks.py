"""Who this process is among the ranks of a run: the only reader of RANK, WORLD_SIZE, LOCAL_RANK and
LOCAL_WORLD_SIZE."""

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
