"""Seconds of a micro-batch's kernels, and of the host that launches them.

What they compute and move is counted in `flops.py` and `memory_traffic.py`; here it meets the GPU's rates.
"""

from __future__ import annotations

from collections import Counter

from ..catalog.arch import ModelShape
from ..catalog.gpu import Gpu
from ..choices import POLICIES
from ..plan import Plan
from . import constants
from .experts import adapted_experts, routings
from .flops import adapted_linears, flops_per_token
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
from .weights import (
    block_weights,
)


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
    hooks = (1 + plan.sharding.resharded) * hook_seconds(shape, plan)
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


@mean_of_blocks
def hook_seconds(shape: ModelShape, plan: Plan) -> float:
    """Seconds of the CPU in FSDP's hooks, per block and gather: they go through a block's tensors."""
    return plan.sharded * constants.SHARDED_LAUNCH * len(block_weights(shape, plan))


def waits_for_host(shape: ModelShape, gpu: Gpu, plan: Plan) -> bool:
    """Whether the host may hold up a micro-batch that it launches: it needs half of the GPU's time.

    Half, since hosts differ, and ranks of one host take cores from each other.
    """
    return launch_seconds(shape, plan) > 0.5 * sum(compute_parts(shape, gpu, plan).values())


def block_seconds(shape: ModelShape, gpu: Gpu, plan: Plan) -> tuple[float, float]:
    """Seconds of one block's forward, and of its backward with recomputation: means of all blocks."""
    parts = compute_parts(shape, gpu, plan)
    busy = max(sum(parts.values()), launch_seconds(shape, plan)) / shape.layers
    forward = (busy - parts["recompute"] / shape.layers) / 3
    return forward, busy - forward
