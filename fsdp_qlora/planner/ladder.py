"""The escalation guide: what to try, in which order, when a run does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..catalog.arch import ModelShape
from ..catalog.machine import Machine
from ..choices import STRATEGIES
from ..config import RunConfig
from ..estimate import Estimate, Rows, estimate


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: fields of RunConfig, on top of those of the rungs before."""

    name: str
    changes: dict
    why: str


_RECOMPUTED, KEPT = dict(activation_policy="recompute_all"), dict(activation_policy="keep_all")
LADDER = (
    Rung(
        "ddp, all activations kept",
        dict(
            sharding_strategy="ddp", **KEPT, use_cpu_offload=False, use_activation_cpu_offload=False
        ),
        "each GPU holds the whole model, and nothing is computed twice",
    ),
    Rung("+ gradient checkpointing", _RECOMPUTED, "blocks are computed again in the backward"),
    Rung(
        "shard_grad_op",
        dict(sharding_strategy="shard_grad_op", **KEPT),
        "gradients and optimizer states are split; gathered weights stay until the backward",
    ),
    Rung("+ gradient checkpointing", _RECOMPUTED, "blocks are computed again in the backward"),
    Rung(
        "full_shard",
        dict(sharding_strategy="full_shard", **KEPT),
        "weights are split too, and gathered twice for each block",
    ),
    Rung("+ gradient checkpointing", _RECOMPUTED, "blocks are computed again in the backward"),
    Rung("+ CPU offload", dict(use_cpu_offload=True), "weights wait in host memory"),
    Rung(
        "+ activation offload",
        dict(use_activation_cpu_offload=True),
        "activations wait in host memory",
    ),
)


def savings() -> dict[str, object]:
    """What each setting is at the ladder's end, in the order in which a rung first makes it so."""
    ends = {name: value for rung in LADDER for name, value in rung.changes.items()}
    order = [name for rung in LADDER for name, value in rung.changes.items() if value == ends[name]]
    return {name: ends[name] for name in order}


@dataclass(frozen=True)
class Climbed:
    """A rung with its estimate, or why there is none."""

    rung: Rung
    changes: dict  # of this rung and those before it
    found: Estimate | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """True if it is estimated to fit."""
        return self.found is not None and self.found.fits


def climb(
    shape: ModelShape, machine: Machine, config: RunConfig, rows: Rows | None = None
) -> list[Climbed]:
    """Every rung's estimate for these settings, the cumulative changes applied to them."""
    changes: dict = {}
    found = []
    for rung in LADDER:
        changes = changes | rung.changes
        found.append(climbed(rung, changes, shape, machine, config, rows))
    return found


def climbed(
    rung: Rung,
    changes: dict,
    shape: ModelShape,
    machine: Machine,
    config: RunConfig,
    rows: Rows | None = None,
) -> Climbed:
    """One rung's estimate. Settings that this version or machine refuses become its reason."""
    if (
        machine.world_size == 1
        and STRATEGIES[changes["sharding_strategy"]].shards
        and not changes["use_cpu_offload"]
    ):
        return Climbed(rung, changes, None, "one GPU has nothing to split: as above")
    try:
        return Climbed(rung, changes, estimate(shape, machine, replace(config, **changes), rows))
    except ValueError as error:
        return Climbed(rung, changes, None, str(error))
