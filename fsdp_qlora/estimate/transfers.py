"""Seconds of what travels between GPUs, and to and from the host, beyond what compute hides."""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..catalog.gpu import Gpu
from ..choices import POLICIES
from ..choices.strategies import BUCKET_BYTES
from ..plan import Plan
from . import constants
from .activations import exchanged
from .compute import block_seconds
from .kept import offloaded, offloaded_of_blocks
from .vocabulary import embeddings_by_rows, head_bytes, travelling_rows
from .weights import (
    all_trained,
    average_gathered,
    average_trained,
    embedding_weights,
    gathered,
    root_weights,
)


def transfer_seconds(shape: ModelShape, gpu: Gpu, plan: Plan, link: float) -> tuple[float, float]:
    """Seconds of a step's gathers and reduce-scatters, and of its host copies, not hidden.

    Each micro-batch gathers each unit once, or again for its backward; or only the first does.
    """
    room = block_seconds(shape, gpu, plan)

    def one(first: int, again: int):
        return _exposed_seconds(shape, gpu, plan, *room, link, (first, again))

    first, others = one(1, int(plan.sharding.resharded)), plan.batch.accumulation - 1
    again = one(0, 0) if plan.sharding.gather_once else first
    return tuple(a + others * b for a, b in zip(first, again, strict=True))


def _exposed_seconds(
    shape: ModelShape,
    gpu: Gpu,
    plan: Plan,
    forward: float,
    backward: float,
    link: float,
    gathers: tuple[int, int],
) -> tuple[float, float]:
    """Seconds of one micro-batch's gathers and reduce-scatters, and of host copies, not hidden.

    A unit is gathered while the one before it computes, so what shows is what takes longer than
    that, the first units of a pass, and what a gather costs the compute stream. What waits on
    the host of blocks goes there and comes back beside a block's work.
    """
    n, several = plan.sharding.shard_ranks, plan.sharding.shard_ranks > 1
    host = gpu.shared_host_gb_s(plan.sharding.node_gpus)
    network = (n - 1) / n / (link * 1e9)  # seconds per gathered byte
    pcie = 1 / n / (host * 1e9) if plan.memory.cpu_offload else 0.0
    unit = average_gathered(shape, plan)
    outer = sum(gathered(w(shape, plan), plan) for w in (embedding_weights, root_weights))
    gather = unit * network + constants.COLLECTIVE_LATENCY * several
    gather += hops_seconds(n, plan.sharding.node_gpus)
    reduced, copies = average_trained(shape, plan, 1, "fp32"), gpu.reached_bandwidth_gb_s * 1e9
    reduce = reduced * network + hops_seconds(n, plan.sharding.node_gpus)
    # Gathered units are copied out of a flat buffer; gradients are copied into one, in fp32.
    waits = "REPLAYED_" * plan.replays(shape)
    copied = 2 * unit / (copies * getattr(constants, waits + "GATHER_SHARE")) * several
    filled = (average_trained(shape, plan, 1) + reduced) / copies * several
    moved = sum(offloaded_of_blocks(shape, plan, plan.memory.runs(shape))) / shape.layers
    moved /= host * 1e9
    # One pass over the blocks each: how often a unit is gathered, reduced, and what can hide it.
    # On one GPU blocks stream ahead of their use in both directions (memory/weight_streaming.py).
    passes = [
        (gathers[0], 0, forward),
        (gathers[1], 1, backward * ((plan.sharding.backward_prefetch != "none") or not several)),
    ]
    shown, from_host = gathers[0] * (outer * network + gather), gathers[0] * (outer + unit) * pcie
    head = head_bytes(shape, plan)
    if (
        plan.by_rows
    ):  # the head for the loss, and the rows of all ranks' tokens (memory/vocab_parallel.py)
        values = sum(
            travelling_rows(rows, plan) * width for rows, width in embeddings_by_rows(shape, plan)
        )
        shown += (head + values * plan.model.product_bytes) * network
    if plan.vocabulary_on_host:
        from_host += 2 * head / n / (host * 1e9)  # both shards pass
    if not plan.sharded:
        passes, shown = [], 0.0
    for count, reduces, room in passes:
        transfer = count * gather + reduces * reduce
        shown += shape.layers * (count * copied + reduces * filled + max(0.0, transfer - room))
        from_host += shape.layers * max(0.0, count * unit * pcie - max(0.0, room - transfer))
    weights = unit * pcie
    from_host += shape.layers * (
        max(0.0, moved - max(0.0, forward - gathers[0] * weights))
        + max(0.0, moved - max(0.0, backward - gathers[1] * weights))
    )
    return shown, from_host


def hides_attention_offload(shape: ModelShape, gpu: Gpu, plan: Plan) -> bool:
    """Whether a block under keep_attention runs forward for as long as its input and outputs are copied.

    Beside its share of the weights where these are on the host. The backward runs for longer.
    """
    moves = plan.change(
        activation_policy="keep_attention", activation_offload=True, attention_offload=True
    )
    copied = sum(offloaded(shape, moves, "keep_attention"))
    if plan.memory.cpu_offload:
        copied += average_gathered(shape, plan) / plan.sharding.shard_ranks
    host = gpu.shared_host_gb_s(plan.sharding.node_gpus) * 1e9
    return copied / host <= block_seconds(shape, gpu, moves)[0]


def hops_seconds(ranks: int, node_gpus: int) -> float:
    """What a ring's hops take beyond those of one machine, whose latency is measured.

    A chunk passes each of n - 1 links: one between each two machines, the others inside of them.
    """
    between = -(-ranks // node_gpus) - 1
    inside = ranks - 1 - between - (min(ranks, node_gpus) - 1)
    return between * constants.NETWORK_HOP + inside * constants.NVLINK_HOP


def exchange_seconds(shape: ModelShape, plan: Plan, link: float) -> float:
    """Seconds in which ranks that share rows exchange heads for tokens in a micro-batch.

    Forward, backward, and again where a block is recomputed; each waits for its own.
    """
    ranks = plan.batch.ranks_per_row
    times = sum(2 + POLICIES[policy].recomputes for policy in plan.memory.policies(shape))
    sent = exchanged(shape, plan) * (ranks - 1) / ranks / (link * 1e9)
    latency = 4 * constants.COLLECTIVE_LATENCY * (ranks > 1)
    return times * (sent + latency)


def once_per_step(shape: ModelShape, plan: Plan, link: float, internode_gb_s: float) -> float:
    """Seconds of all-reduce at the end: ddp's gradients, or those of the hybrid's replicas.

    A ring passes each byte twice, and so its hops.
    """
    sharding = plan.sharding
    replicas = sharding.world_size // sharding.shard_ranks
    if replicas < 2:
        return 0.0
    if sharding.world_size > sharding.node_gpus:
        link = min(link, internode_gb_s)
    size = all_trained(shape, plan, sharding.shard_ranks, "fp32" if sharding.facts.shards else "")
    calls = shape.layers if sharding.facts.shards else -(-size // BUCKET_BYTES)
    hops = hops_seconds(replicas, max(1, sharding.node_gpus // sharding.shard_ranks))
    return 2 * ((replicas - 1) / replicas * size / (link * 1e9) + calls * hops)
