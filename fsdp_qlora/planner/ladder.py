"""The escalation guide: what to try, in which order, when a run does not fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..catalog.arch import ModelShape
from ..catalog.machine import Machine
from ..choices import STRATEGIES
from ..config import RunConfig
from ..config.settings import shown
from ..estimate import Estimate, Rows, estimate


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: fields of RunConfig, on top of those of the rungs before."""

    name: str
    changes: dict
    why: str


_KEPT = dict(activation_policy="keep_all")
_RECOMPUTED = dict(activation_policy="recompute_all")
_AGAIN = (
    "blocks are computed again in the backward: at most a third of the speed for most activations"
)
LADDER = (
    Rung(
        "ddp, all activations kept",
        dict(
            sharding_strategy="ddp",
            **_KEPT,
            use_cpu_offload=False,
            use_activation_cpu_offload=False,
        ),
        "each GPU holds the whole model, and nothing is computed twice",
    ),
    Rung("ddp + gradient checkpointing", _RECOMPUTED, _AGAIN),
    Rung(
        "shard_grad_op, all activations kept",
        dict(sharding_strategy="shard_grad_op", **_KEPT),
        "gradients and optimizer states are split; gathered weights stay until the backward, so it "
        "saves memory only where much is trained, as in full fine-tuning",
    ),
    Rung("shard_grad_op + gradient checkpointing", _RECOMPUTED, _AGAIN),
    Rung(
        "full_shard, all activations kept",
        dict(sharding_strategy="full_shard", **_KEPT),
        "weights are split too, and gathered twice for each block",
    ),
    Rung("full_shard + gradient checkpointing", _RECOMPUTED, _AGAIN),
    Rung(
        "full_shard + CPU offload",
        dict(use_cpu_offload=True),
        "weights wait in host memory, and travel while the block before computes",
    ),
    Rung(
        "full_shard + CPU offload + activation offload",
        dict(use_activation_cpu_offload=True),
        "what recomputed blocks keep waits in host memory too",
    ),
)

_OFF = dict(sequence_parallel="1", shard_group_size="-1")
# What to try after the ladder: below it where nothing fits, beside it where something does.
BEYOND = (
    Rung(
        "shorter rows",
        dict(context_length=1024),
        "activations shrink with the tokens of a row; the report of the data says how many rows "
        "would be truncated",
    ),
    Rung("more GPUs", {}, "each then holds a smaller share: climb again from full_shard"),
    Rung(
        "a larger batch",
        dict(batch_size=4),
        "once something fits: fewer gathers and transfers for each row; leave a gibibyte or two free",
    ),
    Rung(
        "the next gather after the backward",
        dict(backward_prefetch="backward_post"),
        "two gathered units are whole only for a moment, and less overlaps",
    ),
    Rung(
        "no prefetch",
        dict(backward_prefetch="none"),
        "the least memory; each unit waits for its gather",
    ),
    Rung(
        "forward prefetch",
        dict(forward_prefetch=True),
        "helps only if the host is too slow to run ahead",
    ),
    Rung(
        "hybrid_shard_grad_op, on several machines",
        dict(sharding_strategy="hybrid_shard_grad_op"),
        "shard_grad_op inside each machine; only gradients travel between machines",
    ),
    Rung(
        "hybrid_full_shard, on several machines",
        dict(sharding_strategy="hybrid_full_shard"),
        "full_shard inside each machine; only gradients travel between machines",
    ),
)


def flags_of(changes: dict) -> str:
    """Settings as they are typed, the strategy first; what is off is left out."""
    order = sorted(changes, key=lambda name: (name != "sharding_strategy", name))
    return " ".join(
        f"--{name} {shown(changes[name])}"
        for name in order
        if shown(changes[name]) not in ("false", _OFF.get(name))
    )


def rungs() -> list[tuple[Rung, dict]]:
    """Each rung of the ladder with its changes and those of the rungs before it."""
    changes: dict = {}
    return [(rung, changes := changes | rung.changes) for rung in LADDER]


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
    return [climbed(rung, changes, shape, machine, config, rows) for rung, changes in rungs()]


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
