"""Every strategy, offload and micro-batch, each with its fastest mix of activation policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from ..catalog.arch import ModelShape
from ..catalog.llama_pro import expanded_shape
from ..catalog.machine import Machine
from ..choices import STRATEGIES, Strategy
from ..config import AUTO, RunConfig, plan_batches
from ..config.run import row_shares
from ..estimate import Estimate, Rows, estimate, room_of
from ..estimate.question import why_not_shared
from ..estimate.resolve import hybrid_groups

_MOST_ROWS = 64  # of a micro-batch, where no --global_batch_size limits it
_SAME_SPEED = 0.01  # predictions closer than this are equal: the simpler one is taken
_OFFLOAD_GAIN = 0.025  # what each offload must bring: as much as predictions of time are off by
_ENOUGH_ROWS = 0.02  # a larger micro-batch must be faster by more, if rows per step follow from it


@dataclass(frozen=True)
class _Search:
    """What was tried: the estimates that fit, fastest first, and the least need of what did not."""

    fitting: list[Estimate]
    closest: Estimate | None  # where nothing fits: what needs least


def search(
    shape: ModelShape,
    machine: Machine,
    config: RunConfig,
    free: frozenset[str],
    rows: Rows | None = None,
) -> _Search:
    """All combinations of the `free` settings; the others stay as in `config`. rows: the data's.

    GPUs share rows only where no other plan fits, or where a step has fewer rows than GPUs.
    """
    found = _search(shape, machine, config, free, rows)
    if "sequence_parallel" not in free or (found.fitting and not _few_rows(machine, config)):
        return found
    shared = _shared_rows(shape, machine, config)
    searches = [found, *(_search(shape, machine, tried, free, rows) for tried in shared)]
    fitting = [e for each in searches for e in each.fitting]
    closest = min(
        (each.closest for each in searches if each.closest),
        key=lambda e: e.memory.total,
        default=None,
    )
    return _Search(_ranked(fitting, config, free), None if fitting else closest)


def _few_rows(machine: Machine, config: RunConfig) -> bool:
    """Whether a step has fewer rows than there are GPUs, some of which would wait."""
    return AUTO != config.units_per_step < machine.world_size


def _shared_rows(shape: ModelShape, machine: Machine, config: RunConfig) -> list[RunConfig]:
    """The configuration with rows shared by 2 or more GPUs of one machine, where these can.

    As many as divide the heads: what more of them exchange would be keys and values of whole rows.
    """
    found, heads = [], gcd(*(kind.heads for kind in shape.kinds or (shape,)))
    sizes = [n for n in range(2, machine.gpus + 1) if heads % n == 0]
    for size in sizes if shape.known_family else ():
        try:
            tried = replace(config, sequence_parallel=size)
        except ValueError:
            continue  # the rows are no multiple of it
        if not why_not_shared(shape, machine, tried):
            found.append(tried)
    return found


def _search(
    shape: ModelShape,
    machine: Machine,
    config: RunConfig,
    free: frozenset[str],
    rows: Rows | None,
) -> _Search:
    """All combinations in which as many GPUs share a row as `config` says."""
    shape = expanded_shape(shape, config)
    fitting: list[Estimate] = []
    failed: list[Estimate] = []
    shardings = [
        (*combination, group)
        for combination in offload_combinations(machine, config, free)
        for group in _group_sizes(STRATEGIES[combination[0]], machine, config, free)
    ]
    layouts = product(_packings(config, free), shardings)
    for packing, (strategy, offload, activations, group) in layouts:
        for size in micro_batches(machine, config, free):
            tried = replace(
                config,
                sharding_strategy=strategy,
                shard_group_size=group,
                use_cpu_offload=offload,
                use_activation_cpu_offload=activations,
                batch_size=size,
                packing=packing,
            )
            found = _best_policies(shape, machine, tried, free, rows)
            if activations != found.plan.memory.activation_offload:
                continue  # nothing is left to offload
            (fitting if found.fits else failed).append(found)
            if not found.fits:
                break  # more rows need more
    closest = min(failed, key=lambda e: e.memory.total, default=None) if not fitting else None
    return _Search(_ranked(fitting, config, free), closest)


def offload_combinations(
    machine: Machine, config: RunConfig, free: frozenset[str]
) -> list[tuple[str, bool, bool]]:
    """Strategies with or without offload of weights and of activations, that this version can do."""
    strategies = [config.sharding_strategy]
    if "sharding_strategy" in free:
        strategies = [s.name for s in STRATEGIES.values() if _suits(s, machine, config, free)]
    offloads = (False, True) if "use_cpu_offload" in free else (config.use_cpu_offload,)
    activations = (
        (False, True)
        if "use_activation_cpu_offload" in free
        else (config.use_activation_cpu_offload,)
    )
    found = []
    for strategy, offload, activation in product(strategies, offloads, activations):
        shards = STRATEGIES[strategy].shards
        if machine.world_size == 1 and shards and not offload and len(strategies) > 1:
            continue  # one GPU shards nothing
        tried: dict = dict(
            sharding_strategy=strategy,
            use_cpu_offload=offload,
            batch_size=1,
            use_activation_cpu_offload=activation,
        )
        if "activation_policy" in free:
            tried["activation_policy"] = "recompute_all"
        try:
            replace(config, **tried)
            found.append((strategy, offload, activation))
        except ValueError:
            continue  # ddp has nothing to offload
    return found


def _suits(strategy: Strategy, machine: Machine, config: RunConfig, free: frozenset[str]) -> bool:
    """Whether a strategy does something here that no simpler one does."""
    if strategy.is_hybrid:
        sizes = _group_sizes(strategy, machine, config, free)
        tried = (replace(config, shard_group_size=size) for size in sizes)
        return machine.nodes > 1 and any(hybrid_groups(machine, one) for one in tried)
    return machine.world_size > 1 or strategy.reshard_after_forward is not False


def _group_sizes(
    strategy: Strategy, machine: Machine, config: RunConfig, free: frozenset[str]
) -> list[int]:
    """GPUs of a shard group that are worth trying: parts of a machine, all of it, several machines."""
    if not strategy.is_hybrid or "shard_group_size" not in free:
        return [config.shard_group_size]
    inside = [n for n in range(2, machine.gpus + 1) if machine.gpus % n == 0]
    across = [n * machine.gpus for n in range(2, machine.nodes) if machine.nodes % n == 0]
    return [size for size in inside + across if size < machine.world_size]


def _packings(config: RunConfig, free: frozenset[str]) -> list[bool]:
    """Rows padded, or packed where that is free and goes with the other settings."""
    if "packing" not in free:
        return [config.packing]
    try:
        replace(config, packing=True)
    except ValueError:
        return [False]
    return [False, True]


def micro_batches(machine: Machine, config: RunConfig, free: frozenset[str]) -> list[int]:
    """Rows per GPU and forward that are worth trying, ascending."""
    if "batch_size" not in free:
        return [config.batch_size]
    most = _MOST_ROWS
    if config.units_per_step != AUTO:
        most = -(-config.units_per_step // row_shares(config, machine.world_size))
    sizes = sorted(
        {base << shift for base in (1, 3) for shift in range(20) if base << shift < most}
    )
    if most not in sizes:
        sizes.append(most)
    return sizes


def _best_policies(
    shape: ModelShape,
    machine: Machine,
    config: RunConfig,
    free: frozenset[str],
    rows: Rows | None = None,
) -> Estimate:
    """The estimate with the fastest mix of policies that fits, or with every block recomputed."""
    if "activation_policy" not in free:
        return estimate(shape, machine, config, rows)
    try:
        return estimate(shape, machine, config, rows, room_of(machine))
    except ValueError:  # nothing fits
        return estimate(shape, machine, replace(config, activation_policy="recompute_all"), rows)


def seconds_per_token(found: Estimate) -> float:
    """Predicted seconds of a step over the tokens that it trains on, on all GPUs: the rows' own."""
    batches = plan_batches(found.config, found.machine.world_size)
    full = batches.per_step * found.config.context_length
    return found.step.total / (found.batches.tokens if found.batches else full)


def cost(found: Estimate) -> float:
    """`seconds_per_token`, longer by what its offloads must bring."""
    offloads = found.config.use_cpu_offload + found.config.use_activation_cpu_offload
    return seconds_per_token(found) * (1 + _OFFLOAD_GAIN * offloads)


def _ranked(fitting: list[Estimate], config: RunConfig, free: frozenset[str]) -> list[Estimate]:
    """Fastest first, but the simplest of those as cheap as the cheapest before it.

    Simpler is: whole rows, no offload, a plainer strategy, fewer rows per micro-batch.
    """
    fitting = sorted(fitting, key=seconds_per_token)
    if not fitting:
        return []
    rows_follow = "batch_size" in free and config.units_per_step == AUTO
    near = min(map(cost, fitting)) * (1 + (_ENOUGH_ROWS if rows_follow else _SAME_SPEED))
    same = [found for found in fitting if cost(found) <= near]
    first = min(same, key=_simplicity)
    return [first, *(found for found in fitting if found is not first)]


def _simplicity(found: Estimate) -> tuple:
    """Sorts the simpler of two equally fast configurations first."""
    config = found.config
    return (
        config.sequence_parallel,
        config.use_activation_cpu_offload,
        config.use_cpu_offload,
        config.packing,
        config.batch_size,
        list(STRATEGIES).index(config.sharding_strategy),
        found.plan.sharding.shard_ranks > found.machine.gpus,  # it relies on the network
        found.memory.total,
    )
