"""Seconds of a step: products, passes over memory, transfers that compute does not hide, the host.

What each part moves is counted in `flops.py` and `passes.py`; here it meets the GPU's rates.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..catalog.arch import ModelShape
from ..catalog.gpu import Gpu
from ..catalog.machine import INTERNODE_GB_S
from ..choices import OPTIMIZERS, POLICIES
from ..choices.optimizers import TOGETHER
from ..choices.strategies import BUCKET_BYTES
from ..plan import BYTES, Plan
from . import constants
from .activations import exchanged
from .experts import adapted_experts, routings
from .flops import adapted_linears, flops_per_token
from .kept import offloaded, offloaded_of_blocks
from .kinds import mean_of_blocks
from .memory_traffic import (
    activation_traffic,
    adapter_traffic,
    magnitude_traffic,
    quantize_traffic,
    rerun_traffic,
    tile_traffic,
    unpack_traffic,
)
from .mixers import mixer_launches, mixer_seconds
from .vocabulary import embeddings_by_rows, head_bytes, travelling_rows
from .weights import (
    all_trained,
    average_gathered,
    average_trained,
    block_weights,
    embedding_weights,
    gathered,
    optimizer_bytes,
    root_weights,
    trained_on_host,
    trained_tensors,
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part, none hidden behind another."""

    parts: dict[str, float]
    tokens_per_gpu: float  # in one optimizer step
    calibrated: bool  # False where only the GPU's datasheet is known

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_gpu / self.total

    def table(self) -> str:
        """The parts in lines for people; empty ones are left out."""
        lines = [
            f"{name:<14} {seconds:8.3f} s"
            for name, seconds in self.parts.items()
            if seconds >= 0.0005
        ]
        note = "" if self.calibrated else "; uncalibrated: from the GPU's datasheet"
        return "\n".join(
            lines
            + [
                f"{'step':<14} {self.total:8.3f} s  "
                f"{self.tokens_per_second_per_gpu:,.0f} tok/s per GPU{note}"
            ]
        )


def step_seconds(
    shape: ModelShape,
    gpu: Gpu,
    plan: Plan | None = None,
    *,
    link_gb_s: float | None = None,
    internode_gb_s: float = INTERNODE_GB_S,
    **changes,
) -> StepTime:
    """Predicted time of one optimizer step, with its parts.

    Products and attention over their rates, passes over memory over its own, then what transfers and
    the CPU's launches take beyond that. `link_gb_s` replaces the GPU's link between peers,
    `internode_gb_s` is that between machines, per GPU.
    """
    plan = (plan or Plan()).change(**changes)
    link = link_gb_s or gpu.peer_gb_s(plan.sharding.node_gpus)
    if plan.sharding.shard_ranks > plan.sharding.node_gpus:
        link = min(link, internode_gb_s)
    parts = {
        name: plan.batch.accumulation * seconds
        for name, seconds in compute_parts(shape, gpu, plan).items()
    }
    transfers = _transfer_seconds(shape, gpu, plan, link)
    busy = sum(parts.values()) + sum(transfers)
    waits = max(0.0, plan.batch.accumulation * launch_seconds(shape, plan) - busy)
    parts["launches"] = waits + constants.STEP_SECONDS
    parts["communication"], parts["offload"] = transfers
    parts["communication"] += _once_per_step(shape, plan, link, internode_gb_s)
    parts["communication"] += plan.batch.accumulation * _exchange_seconds(shape, plan, link)
    parts["optimizer"] = _optimizer_seconds(shape, gpu, plan)
    return StepTime(parts, plan.batch.tokens * plan.batch.accumulation, gpu.calibrated)


def compute_parts(shape: ModelShape, gpu: Gpu, plan: Plan) -> dict[str, float]:
    """Seconds of one micro-batch's kernels."""
    flops, n, layers = flops_per_token(shape, plan), plan.batch.tokens, shape.layers
    rate = _product_rate(gpu, plan)
    frozen_rate = _fp8_rate(gpu) if plan.quantization.compute_dtype == "fp8" else rate
    attention = n / _attention_rate(gpu, plan)
    copies = gpu.reached_bandwidth_gb_s * 1e9
    ranks = max(
        n * flops.adapters / rate,
        layers * sum(adapter_traffic(shape, plan)) / (copies * constants.RANK_SHARE),
    )
    unpack, logits = unpack_traffic(shape, plan), n * shape.vocab * plan.model.product_bytes
    tiles = sum(
        count * tile_traffic(shape, plan, policy)
        for policy, count in Counter(plan.memory.policies(shape)).items()
    )
    return dict(
        linears=n * ((flops.linears - flops.head) / frozen_rate + flops.head / rate),
        attention=flops.attention * attention,
        adapters=ranks,
        recompute=n * flops.recompute_linears / frozen_rate
        + flops.recompute_attention * attention
        + _rerun_seconds(shape, gpu, plan),
        activations=layers * sum(activation_traffic(shape, plan)) / (copies * constants.COPY_SHARE)
        + layers * routings(shape, plan) * constants.ROUTING_SECONDS,
        dequantization=(
            layers * (2 * sum(unpack.values()) + sum(magnitude_traffic(shape, plan))) + tiles
        )
        / copies
        * _unpack_slowdown(gpu),
        quantization=layers * sum(map(sum, quantize_traffic(shape, plan).values())) / copies,
        mixers=layers * sum(mixer_seconds(shape, plan, gpu)),
        loss=7 * logits / copies,
    )  # seven passes of a fused kernel


def _product_rate(gpu: Gpu, plan: Plan) -> float:
    """FLOP/s of large products in the run's precision.

    In fp32 they run without tensor cores.
    """
    rate = gpu.reached_tflops * 1e12 * _precision_share(plan)
    return rate * constants.MATMUL_SHARE


def _precision_share(plan: Plan) -> float:
    return constants.FP32_RATE if plan.model.product_bytes == 4 else 1.0


def _fp8_rate(gpu: Gpu) -> float:
    """FLOP/s of fp8 products without what they need besides."""
    return (gpu.reached_fp8_tflops or gpu.reached_tflops) * 1e12 * constants.FP8_SHARE


def _attention_rate(gpu: Gpu, plan: Plan) -> float:
    """FLOP/s of attention: short rows reach less, for blocks on the diagonal are computed whole; so do
    very long ones, whose keys and values leave the cache.

    sdpa takes cuDNN's kernels on data-centre cards from Hopper on; elsewhere it is FlashAttention 2,
    as fast as others are. Eager attention is slow anywhere.
    """
    length, name = plan.batch.context_length, plan.model.attention
    share = constants.ATTENTION_SHARE * length / (length + constants.ATTENTION_RAMP)
    share /= 1 + length / constants.ATTENTION_FADE
    if gpu.fp8_tflops and gpu.nvlink_gb_s or name == "eager":
        share /= constants.ATTENTION_TIME.get(name, 1.0)
    return gpu.reached_tflops * 1e12 * share * _precision_share(plan)


def _unpack_slowdown(gpu: Gpu) -> float:
    """What unpacking takes over what its bytes would: 1, unless it was measured on this card."""
    if not gpu.measured_unpack_gb_s:
        return 1.0
    return gpu.reached_bandwidth_gb_s * constants.UNPACK_SHARE / gpu.measured_unpack_gb_s


def _rerun_seconds(shape: ModelShape, gpu: Gpu, plan: Plan) -> float:
    """Seconds of the passes that run again in the backwards of a micro-batch."""
    copies = gpu.reached_bandwidth_gb_s * 1e9
    share = dict(
        activations=constants.COPY_SHARE,
        adapters=constants.RANK_SHARE,
        unpack=1 / _unpack_slowdown(gpu),
        quantize=1.0,
    )
    counts = Counter(plan.memory.policies(shape))
    rerun = sum(count for policy, count in counts.items() if POLICIES[policy].recomputes)
    forward, _ = mixer_seconds(shape, plan, gpu)
    return rerun * (routings(shape, plan) * constants.ROUTING_SECONDS + forward) + sum(
        count * moved / (copies * share[kind])
        for policy, count in counts.items()
        for kind, moved in rerun_traffic(shape, plan, policy).items()
    )


def _block_seconds(shape: ModelShape, gpu: Gpu, plan: Plan) -> tuple[float, float]:
    """Seconds of one block's forward, and of its backward with recomputation: means of all blocks."""
    parts = compute_parts(shape, gpu, plan)
    busy = max(sum(parts.values()), launch_seconds(shape, plan)) / shape.layers
    forward = (busy - parts["recompute"] / shape.layers) / 3
    return forward, busy - forward


@mean_of_blocks
def launch_seconds(shape: ModelShape, plan: Plan) -> float:
    """Seconds that the CPU needs to launch one micro-batch: blocks and what runs again.

    None where CUDA graphs are replayed.
    """
    if plan.replays(shape):
        return 0.0
    once = constants.COMPILED_LAUNCH if plan.loop.compile else constants.EAGER_LAUNCH
    once += constants.ADAPTER_LAUNCH * (
        len(adapted_linears(shape, plan)) + len(adapted_experts(shape, plan))
    )
    if plan.quantization.quant != "none" and not plan.quantization.keep_fp8_weights:
        once += constants.UNPACK_LAUNCH
    in_fp8 = plan.quantization.compute_dtype == "fp8"
    once += constants.FP8_LAUNCH * in_fp8
    once += constants.EXPERTS_FP8_LAUNCH * (in_fp8 and shape.experts > 0)
    gathers = (1 + plan.sharding.resharded) * plan.sharded
    hooks = gathers * constants.SHARDED_LAUNCH * len(block_weights(shape, plan))
    # A compiled backward has what runs again in its graph: a forward's kernels, and no hooks.
    whole = 1.0 if plan.loop.compile else constants.RECOMPUTE_LAUNCH
    again = {
        name: (constants.RERUN_LAUNCH if policy.keeps_linears else whole) * policy.recomputes
        for name, policy in POLICIES.items()
    }
    forward, backward = (constants.TORCH_LAUNCH * found for found in mixer_launches(shape, plan))
    return sum(
        count * (once * (3 + again[policy]) + hooks)
        + count * (forward * (1 + POLICIES[policy].recomputes) + backward)
        for policy, count in Counter(plan.memory.policies(shape)).items()
    )


def waits_for_host(shape: ModelShape, gpu: Gpu, plan: Plan) -> bool:
    """Whether the host may hold up a micro-batch that it launches: it needs half of the GPU's time.

    Half, since hosts differ, and ranks of one host take cores from each other.
    """
    return launch_seconds(shape, plan) > 0.5 * sum(compute_parts(shape, gpu, plan).values())


def _transfer_seconds(shape: ModelShape, gpu: Gpu, plan: Plan, link: float) -> tuple[float, float]:
    """Seconds of a step's gathers and reduce-scatters, and of its host copies, not hidden.

    Each micro-batch gathers each unit once, or again for its backward; or only the first does.
    """
    room = _block_seconds(shape, gpu, plan)

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
    return copied / host <= _block_seconds(shape, gpu, moves)[0]


def hops_seconds(ranks: int, node_gpus: int) -> float:
    """What a ring's hops take beyond those of one machine, whose latency is measured.

    A chunk passes each of n - 1 links: one between each two machines, the others inside of them.
    """
    between = -(-ranks // node_gpus) - 1
    inside = ranks - 1 - between - (min(ranks, node_gpus) - 1)
    return between * constants.NETWORK_HOP + inside * constants.NVLINK_HOP


def _exchange_seconds(shape: ModelShape, plan: Plan, link: float) -> float:
    """Seconds in which ranks that share rows exchange heads for tokens in a micro-batch.

    Forward, backward, and again where a block is recomputed; each waits for its own.
    """
    ranks = plan.batch.ranks_per_row
    times = sum(2 + POLICIES[policy].recomputes for policy in plan.memory.policies(shape))
    sent = exchanged(shape, plan) * (ranks - 1) / ranks / (link * 1e9)
    latency = 4 * constants.COLLECTIVE_LATENCY * (ranks > 1)
    return times * (sent + latency)


def _once_per_step(shape: ModelShape, plan: Plan, link: float, internode_gb_s: float) -> float:
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


def _optimizer_seconds(shape: ModelShape, gpu: Gpu, plan: Plan) -> float:
    """Seconds of the update: weight and states read and written, gradient read.

    On the host under CPU offload. Those of optim/ update small tensors together, some at a time, which
    takes the host.
    """
    size = all_trained(shape, plan, plan.sharding.shard_ranks)
    own = plan.trained_dtype
    if trained_on_host(shape, plan):
        return size / BYTES[own] / constants.HOST_OPTIMIZER_PER_SECOND
    moved = 3 * size + 2 * optimizer_bytes(shape, plan)
    updates = min(trained_tensors(shape, plan), 1 + size / BYTES[own] / TOGETHER)
    launches = (
        updates * constants.OPTIMIZER_LAUNCH * OPTIMIZERS[plan.optimizer.optimizer].updates_together
    )
    return max(launches, moved / (gpu.reached_bandwidth_gb_s * 1e9))
