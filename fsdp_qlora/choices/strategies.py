"""Sharding strategies: what --sharding_strategy can be. `sharding/fsdp.py` carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

BUCKET_BYTES = 128 * 2**20  # gradients that are reduced together where nothing is sharded
PIECE_BYTES = 2**27  # of rows of a sharded embedding that travel at a time


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to place a model on the ranks."""

    name: str
    shards: bool  # weights are split over the ranks of a shard group
    replicates: bool  # there are several copies, whose gradients are averaged
    reshard_after_forward: bool | None  # free a unit's gathered weights after its forward
    fsdp1: str  # the name in FSDP1, which guides and papers use
    summary: str

    @property
    def is_hybrid(self) -> bool:
        """Whether several shard groups hold one copy each."""
        return self.shards and self.replicates

    @property
    def mesh(self) -> str:
        """replicate, shard (world,), or hybrid (replicas, group)."""
        return "hybrid" if self.is_hybrid else "shard" if self.shards else "replicate"

    @property
    def mesh_dims(self) -> int:
        """Dimensions of the device mesh; 0 is no mesh."""
        return self.shards + self.is_hybrid


# From the simplest on: of equally fast ones the planner takes the first.
_ROWS = (
    Strategy(
        name="ddp",
        shards=False,
        replicates=True,
        reshard_after_forward=None,
        fsdp1="NO_SHARD",
        summary="every rank holds everything",
    ),
    Strategy(
        name="shard_grad_op",
        shards=True,
        replicates=False,
        reshard_after_forward=False,
        fsdp1="SHARD_GRAD_OP",
        summary="weights are gathered for a forward and freed after its backward",
    ),
    Strategy(
        name="full_shard",
        shards=True,
        replicates=False,
        reshard_after_forward=True,
        fsdp1="FULL_SHARD",
        summary="weights are gathered for each forward and backward of a block",
    ),
    Strategy(
        name="hybrid_shard_grad_op",
        shards=True,
        replicates=True,
        reshard_after_forward=False,
        fsdp1="_HYBRID_SHARD_ZERO2",
        summary="shard_grad_op in a group, replicas of groups",
    ),
    Strategy(
        name="hybrid_full_shard",
        shards=True,
        replicates=True,
        reshard_after_forward=True,
        fsdp1="HYBRID_SHARD",
        summary="full_shard in a group, replicas of groups",
    ),
)
STRATEGIES = {row.name: row for row in _ROWS}


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Name = Literal["ddp", "shard_grad_op", "full_shard", "hybrid_shard_grad_op", "hybrid_full_shard"]
_FSDP1Name = Literal[
    "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD"
]
StrategyName = _Name | _FSDP1Name | _Named  # a `_Named`: a member of torch's ShardingStrategy


def strategy_named(name: StrategyName) -> Strategy:
    """The row of a strategy's name, of its FSDP1 name, or of a torch `ShardingStrategy`.

    Raises ValueError, with the names there are, for another.
    """
    text = getattr(name, "name", name)
    by_name = STRATEGIES | {row.fsdp1: row for row in _ROWS}
    if text not in by_name:
        raise ValueError(f"--sharding_strategy {text}: choose {', '.join(STRATEGIES)}")
    return by_name[text]


def resharding(name: str) -> str:
    """The strategy on the same mesh that frees gathered weights after each forward."""
    mesh = STRATEGIES[name].mesh
    return next(s.name for s in _ROWS if s.mesh == mesh and s.reshard_after_forward)
