"""What to train one model with on one machine: the ladder, the search and the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..catalog.arch import ModelShape
from ..catalog.machine import Machine
from ..config import AUTO, RunConfig
from ..estimate import Estimate, Rows
from .ladder import LADDER, Climbed, climb
from .search import search

_PLANNED = (
    "sharding_strategy",
    "shard_group_size",
    "activation_policy",
    "use_cpu_offload",
    "use_activation_cpu_offload",
    "sequence_parallel",
)
_FIXES_POLICY = ("activation_policy", "use_gradient_checkpointing", "reentrant_checkpointing")


@dataclass(frozen=True)
class Proposal:
    """What was found, and what to do."""

    shape: ModelShape
    machine: Machine
    config: RunConfig  # the settings asked for, with 1 row where that is free
    free: frozenset[str]  # settings that it chooses
    rungs: list[Climbed]
    fitting: list[Estimate]  # by the search, fastest first
    closest: Estimate | None  # where nothing fits: what needs least
    longest: int = 0  # the context length that would fit then; 0: not even a short one
    more_gpus: int = 0  # GPUs on which it would; 0: no number helps
    rows: Rows | None = None  # the data's, where they are known

    @property
    def choice(self) -> Estimate | None:
        """The first of what fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def changes(self) -> dict:
        """Fields of RunConfig that the choice sets."""
        if self.choice is None:
            return {}
        return {name: getattr(self.choice.config, name) for name in sorted(self.free)}


def free_settings(
    config: RunConfig, given: set[str], everything: bool = False, rows: Rows | None = None
) -> frozenset[str]:
    """The settings that a proposal may choose: those that are auto, and what follows from them.

    `given` are the flags that the user typed, which are kept. `everything` frees what is not given,
    as `fsdp-qlora plan` does. Whether to pack is free where `rows` of the data are known; for a run only
    if a step keeps its rows (--global_batch_size) or has those of --batch_size auto anyway.
    """
    free = set()
    if everything or config.sharding_strategy == "auto":
        free = {name for name in _PLANNED if name not in given}
        if config.sharding_strategy == "auto":
            free.add("sharding_strategy")
        if given & set(_FIXES_POLICY):
            free.discard("activation_policy")
        if "sharding_strategy" not in free and not config.strategy.is_hybrid:
            free.discard("shard_group_size")
    if config.activation_budget_gib is not None:
        free.add("activation_policy")
    if config.batch_size == AUTO or everything and "batch_size" not in given:
        free.add("batch_size")
    keeps_rows = config.sharding_strategy == "auto" and config.global_batch_size != AUTO
    takes_any = config.batch_size == AUTO and config.units_per_step == AUTO
    may_pack = everything or keeps_rows or takes_any
    if rows and rows.can_pack and "packing" not in given and may_pack:
        free.add("packing")
    if free and config.compute_dtype == "fp8" and config.keep_fp8_weights is None:
        free.add("keep_fp8_weights")
    return frozenset(free)


def settled(config: RunConfig, free: frozenset[str]) -> RunConfig:
    """The configuration with a plain value in place of each free one."""
    changes: dict = dict(batch_size=1) if "batch_size" in free else {}
    if config.sharding_strategy == "auto":
        changes["sharding_strategy"] = "full_shard"
    if config.activation_budget_gib is not None:
        changes |= dict(activation_budget_gib=None, activation_policy="recompute_all")
    return replace(config, **changes)


def propose(
    shape: ModelShape,
    machine: Machine,
    config: RunConfig,
    free: frozenset[str],
    rows: Rows | None = None,
) -> Proposal:
    """Climb the ladder and search. Raises ValueError for what no setting could repair."""
    if config.activation_budget_gib is not None and config.activation_budget_gib > 0:
        machine = replace(machine, memory_gib=min(machine.memory_gib, config.activation_budget_gib))
    config = settled(config, free)
    found = search(shape, machine, config, free, rows)
    proposal = Proposal(
        shape,
        machine,
        config,
        free,
        climb(shape, machine, config, rows),
        found.fitting,
        found.closest,
        rows=rows,
    )
    if proposal.fitting:
        return proposal
    return replace(
        proposal, longest=_longest_that_fits(proposal), more_gpus=gpus_that_fit(proposal)
    )


def _longest_that_fits(proposal: Proposal) -> int:
    """The longest context, in steps of 128 tokens, that the search finds room for; 0 if none."""
    low, high = 0, proposal.config.context_length // 128
    while high - low > 1:
        middle = (low + high) // 2
        shorter = replace(proposal.config, context_length=128 * middle)
        low, high = (middle, high) if fits(proposal, proposal.machine, shorter) else (low, middle)
    return 128 * low


def gpus_that_fit(proposal: Proposal) -> int:
    """The fewest GPUs of the same kind, to 64, on which the search finds room; 0 if none."""
    if proposal.machine.nodes > 1:
        return 0
    counts = [n for n in (2, 3, 4, 6, 8, 16, 32, 64) if n > proposal.machine.gpus]
    return next(
        (n for n in counts if fits(proposal, replace(proposal.machine, gpus=n), proposal.config)), 0
    )


def fits(proposal: Proposal, machine: Machine, config: RunConfig) -> bool:
    """Whether the search finds anything, with one row at a time."""
    free = proposal.free - {"batch_size"}
    return bool(search(proposal.shape, machine, config, free, proposal.rows).fitting)


__all__ = ["LADDER", "Proposal", "free_settings", "propose", "settled"]
