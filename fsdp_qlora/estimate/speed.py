"""FLOPs of a step, and its seconds: products, copies, and transfers that compute does not hide."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ..catalog.arch import ModelShape
from ..catalog.hardware import Gpu
from ..catalog.machine import INTERNODE_GB_S
from .activations import (
    KEPT_ATTENTION,
    last_linear,
    moved_blocks,
    normed_output,
    offloaded_input,
)
from .setup import BYTES, Setup
from .weights import (
    BLOCKSIZE,
    all_trained,
    as_given,
    average_gathered,
    average_trained,
    embedding_weights,
    gathered,
    head_bytes,
    optimizer_bytes,
    packed_bits,
    root_weights,
    scale_bytes,
    trained_on_host,
    trains_head,
)

# Set by hand on the trial's rows in tests/test_estimate_speed.py, so those do not test them.
MATMUL_SHARE = 0.87    # of the rate of large products, for a block's linear layers
ATTENTION_SHARE = 0.55  # the same for attention kernels, forward and backward together
COPY_SHARE = 1.30      # passes over activations move at this share of a copy's rate (caches)
FP8_GAIN = 1.48        # products of frozen weights in fp8 over bf16, with the quantization they need
HOST_OPTIMIZER_PER_SECOND = 0.9e9  # weights per second and rank that the host's Adam updates

# Small steps are bound by what the CPU can launch; from the six rows "8B 2x2048" of 2026-11-27.
LAUNCH_SECONDS = {"eager": 6.2e-3, "compiled": 3.5e-3}  # one block's forward; backward is twice it
SHARDED_LAUNCH_SECONDS = 5.0e-3  # FSDP's hooks, per block and gather
COLLECTIVE_LATENCY = 30e-6


# ---- FLOPs -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token of one step, by what does them."""
    linears: float      # blocks and head, forward and backward
    head: float         # the head's part of them
    adapters: float
    attention: float
    recompute_linears: float    # linears and adapters run again
    recompute_attention: float

    @property
    def total(self) -> float:
        return (self.linears + self.adapters + self.attention + self.recompute_linears
                + self.recompute_attention)


def flops_per_token(shape: ModelShape, setup: Setup) -> Flops:
    """What the hardware does per token, a product of (m, k) and (k, n) being 2 m k n.

    A weight costs 2 in the forward and 2 for dX; trained ones 2 more for dW; 2 again where its
    product is recomputed. Causal attention does half of Q K^T and P V, 2 T q per layer; a flash
    backward recomputes Q K^T, which makes it 2.5 times the forward (arXiv:2307.08691). The
    embedding is a lookup, and the chunked loss makes the head's dX in the forward.
    """
    linears = shape.layers * shape.used_linears()
    head = shape.vocab * shape.hidden
    adapters = adapter_params(shape, setup)
    attention = 2 * setup.context_length * shape.heads * shape.head_dim * shape.layers
    each = 6 if setup.adapter == "none" else 4
    counts = Counter(setup.policies(shape))
    again = sum(count * rerun_weights(shape, setup, policy) for policy, count in counts.items())
    blocks = sum(count for policy, count in counts.items() if reruns_attention(setup, policy))
    of_head = (6 if trains_head(shape, setup) else 4) * head
    trained = 2 * linears * shape.new_blocks / shape.layers  # dW of Llama-Pro's blocks
    return Flops(linears=each * linears + trained + of_head, head=of_head, adapters=6 * adapters,
                 attention=3.5 * attention, recompute_linears=2 * again,
                 recompute_attention=attention * blocks / shape.layers)


def rerun_linears(shape: ModelShape, setup: Setup, policy: str) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear layers whose product a block's backward runs again.

    Not down_proj, the last one, whose output no backward needs but that of a norm after it, or of a
    DoRA magnitude.
    """
    if policy in ("keep_linears", "keep_all"): return {}
    last_too = normed_output(shape) or (setup.adapter == "dora"
                                        and last_linear(shape) in adapted_linears(shape, setup))
    return {name: size for name, size in shape.linears().items()
            if name != last_linear(shape) or last_too}


def rerun_weights(shape: ModelShape, setup: Setup, policy: str) -> int:
    """Weights of one block whose products run again; of adapters all A, unless all is kept."""
    again = rerun_linears(shape, setup, policy)
    if policy == "keep_all": return 0
    weights = sum(out * wide for out, wide in again.values())
    weights += shape.experts_per_token * sum(o * w for o, w in shape.expert_linears().values())
    adapted = adapted_linears(shape, setup)
    return weights + sum(setup.rank(name) * (wide + out * (name in again))
                         for name, (out, wide) in adapted.items())


def reruns_attention(setup: Setup, policy: str) -> bool:
    """Whether attention runs again in a block's backward."""
    if policy in ("keep_attention", "keep_linears"): return setup.attention not in KEPT_ATTENTION
    return policy == "recompute_all"


def adapted_linears(shape: ModelShape, setup: Setup) -> dict[str, tuple[int, int]]:
    """(out, in) of the adapted linear layers of a block."""
    if not setup.has_lora: return {}
    targets = shape.targets(as_given(setup.targets))
    return {name: size for name, size in shape.linears().items() if name in targets}


def adapter_params(shape: ModelShape, setup: Setup) -> int:
    """Weights of the adapters, 0 without any."""
    if not setup.has_lora: return 0
    in_blocks = sum(setup.rank(name) * (out + wide)
                    for name, (out, wide) in adapted_linears(shape, setup).items())
    in_head = "lm_head" in shape.targets(as_given(setup.targets))
    head = setup.rank("lm_head") * (shape.vocab + shape.hidden) if in_head else 0
    return shape.layers * in_blocks + head


def model_flops_per_token(shape: ModelShape, setup: Setup) -> float:
    """FLOPs per token that the task itself needs, as benchmark rows count them.

    4 per frozen weight and 6 per trained one, linears and head, plus 6 T q per layer for causal
    attention (half of the square, backward twice the forward). Recomputation does not count.
    """
    linears = shape.layers * shape.used_linears() + shape.vocab * shape.hidden
    each = 6 if setup.adapter == "none" else 4
    attention = 6 * setup.context_length * shape.heads * shape.head_dim * shape.layers
    new = 2 * shape.params()["linears"] * shape.new_blocks / shape.layers
    return each * linears + new + 6 * adapter_params(shape, setup) + attention


def model_tflops(shape: ModelShape, setup: Setup, tokens_per_second: float) -> float:
    """Model TFLOP/s at a measured rate of tokens; per GPU if the rate is."""
    return model_flops_per_token(shape, setup) * tokens_per_second / 1e12


# ---- Time --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part, none hidden behind another."""
    parts: dict[str, float]
    tokens_per_gpu: int        # in one optimizer step
    calibrated: bool           # False where only the GPU's datasheet is known

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_gpu / self.total

    def table(self) -> str:
        """The parts in lines for people; empty ones are left out."""
        lines = [f"{name:<14} {seconds:8.3f} s" for name, seconds in self.parts.items()
                 if seconds >= 0.0005]
        note = "" if self.calibrated else "; uncalibrated: from the GPU's datasheet"
        return "\n".join(lines + [f"{'step':<14} {self.total:8.3f} s  "
                                  f"{self.tokens_per_second_per_gpu:,.0f} tok/s per GPU{note}"])


def step_seconds(shape: ModelShape, gpu: Gpu, setup: Setup | None = None, *,
                 link_gb_s: float | None = None, internode_gb_s: float = INTERNODE_GB_S, **changes
                 ) -> StepTime:
    """Predicted time of one optimizer step, with its parts.

    Products and attention over their rates, passes over activations and dequantization over the
    memory's, then what transfers and the CPU's launches take beyond that. `link_gb_s` replaces the
    GPU's link between peers, `internode_gb_s` is that between machines, per GPU.
    """
    setup = replace(setup or Setup(), **changes)
    link = link_gb_s or gpu.peer_gb_s(setup.node_gpus)
    if setup.shard_ranks > setup.node_gpus: link = min(link, internode_gb_s)
    forward, backward = block_seconds(shape, gpu, setup)
    compute = compute_parts(shape, gpu, setup)
    busy = sum(compute.values())
    launches = launch_seconds(shape, setup)
    exposed, offloaded = exposed_seconds(shape, gpu, setup, forward, backward, link)
    micro = compute | dict(launches=max(0.0, launches - busy), communication=exposed,
                           offload=offloaded)
    parts = {name: setup.accumulation * seconds for name, seconds in micro.items()}
    parts["communication"] += once_per_step(shape, setup, link, internode_gb_s)
    parts["optimizer"] = optimizer_seconds(shape, gpu, setup)
    return StepTime(parts, setup.tokens * setup.accumulation, gpu.calibrated)


def compute_parts(shape: ModelShape, gpu: Gpu, setup: Setup) -> dict[str, float]:
    """Seconds of one micro-batch's kernels."""
    flops, n = flops_per_token(shape, setup), setup.tokens
    # fp32 products run without tensor cores, at about a sixteenth of bf16's rate.
    rate = gpu.reached_tflops * 1e12 / (16 if setup.product_bytes == 4 else 1)
    frozen_rate = rate * fp8_gain(gpu, setup)
    copies = gpu.reached_bandwidth_gb_s * 1e9
    logit_bytes = n * shape.vocab * 7 * setup.product_bytes  # seven passes of a fused kernel
    dequantize, moved, moved_again, packed_again = dequantize_traffic(shape, setup), 0.0, 0.0, 0.0
    for policy, count in Counter(setup.policies(shape)).items():
        moved += count * sum(activation_traffic(shape, setup))
        moved_again += count * rerun_traffic(shape, setup, policy)
        packed_again += count * sum(dequantize.get(t, 0.0) for t in rerun_linears(shape, setup, policy))
    return dict(
        linears=n * ((flops.linears - flops.head) / frozen_rate + (flops.head + flops.adapters) / rate)
        / MATMUL_SHARE,
        attention=n * flops.attention / (rate * ATTENTION_SHARE),
        recompute=n * flops.recompute_linears / (frozen_rate * MATMUL_SHARE)
        + n * flops.recompute_attention / (rate * ATTENTION_SHARE)
        + moved_again / (copies * COPY_SHARE) + packed_again / copies,
        activations=moved / (copies * COPY_SHARE),
        dequantization=2 * shape.layers * sum(dequantize.values()) / copies,
        loss=logit_bytes / copies)


def fp8_gain(gpu: Gpu, setup: Setup) -> float:
    """How much faster products of frozen weights are than in bf16: 1 unless they are in fp8.

    As measured on an H100; on a card whose fp8 products were measured, in proportion.
    """
    if setup.compute_dtype != "fp8" or not gpu.fp8_tflops: return 1.0
    return max(1.0, FP8_GAIN * gpu.fp8_over_bf16 / 2)


def dequantize_traffic(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Bytes read and written to dequantize each linear weight of a block once."""
    if setup.quant == "none": return {}
    packed = packed_bits(setup.quant) / 8 + scale_bytes(1, setup) / BLOCKSIZE
    return {name: out * wide * (packed + setup.product_bytes)
            for name, (out, wide) in stored_linears(shape).items()}


def stored_linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(out, in) of a block's linear layers, and of all its experts as one, for each may be hit."""
    return shape.linears() | {name: (shape.experts * out, wide)
                              for name, (out, wide) in shape.expert_linears().items()}


def activation_traffic(shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Bytes that a block's forward and backward move besides products' operands, counted by pass.

    Adapters: y is read and written again, x read; backward dx and dy likewise. Norms with
    residuals, rotation and activation: fused where compiled, one pass per operation where eager.
    """
    n, a = setup.tokens, setup.product_bytes
    d, i = shape.hidden, shape.mlp_width
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    adapted = adapted_linears(shape, setup).values()
    out, wide = sum(o for o, _ in adapted), sum(w for _, w in adapted)
    norms = shape.traits.norms / 2
    rest = 6 * d * norms + 4 * rotated + 3 * i, 10 * d * norms + 4 * rotated + 6 * i
    if not setup.compile:
        rest = 42 * d * norms + 10 * rotated + 5 * i, 84 * d * norms + 10 * rotated + 8 * i
    if setup.lora_dropout: rest = rest[0] + 4 * wide, rest[1] + 8 * wide
    return n * a * (2 * out + wide + rest[0]), n * a * (2 * out + 3 * wide + rest[1])


def rerun_traffic(shape: ModelShape, setup: Setup, policy: str) -> float:
    """Bytes of `activation_traffic`'s forward that a block's backward moves again.

    All but the outputs of layers whose product does not run again.
    """
    if policy == "keep_all": return 0.0
    again = rerun_linears(shape, setup, policy)
    kept = sum(out for name, (out, _) in adapted_linears(shape, setup).items() if name not in again)
    forward, _ = activation_traffic(shape, setup)
    return forward - setup.tokens * setup.product_bytes * 2 * kept


def block_seconds(shape: ModelShape, gpu: Gpu, setup: Setup) -> tuple[float, float]:
    """Seconds of one block's forward, and of its backward with recomputation: means of all blocks."""
    parts = compute_parts(shape, gpu, setup)
    busy = max(sum(parts.values()), launch_seconds(shape, setup)) / shape.layers
    forward = (busy - parts["recompute"] / shape.layers) / 3
    return forward, busy - forward


def launch_seconds(shape: ModelShape, setup: Setup) -> float:
    """Seconds that the CPU needs to launch one micro-batch: forward 1, backward 2, recompute 1."""
    once = LAUNCH_SECONDS["compiled" if setup.compile else "eager"]
    hooks = (1 + setup.resharded) * SHARDED_LAUNCH_SECONDS if setup.sharded else 0.0
    recomputed = shape.layers - setup.policies(shape).count("keep_all")
    return shape.layers * (3 * once + hooks) + recomputed * once


def exposed_seconds(shape: ModelShape, gpu: Gpu, setup: Setup, forward: float, backward: float,
                    link: float) -> tuple[float, float]:
    """Seconds of one micro-batch's gathers and reduce-scatters, and of host copies, not hidden.

    A unit is gathered while the one before it computes, so what shows is what takes longer than
    that, the first units of a pass, and the copy out of the flat buffer on the compute stream. The
    inputs of blocks that wait on the host go there and come back beside a block's work.
    """
    n, several = setup.shard_ranks, setup.shard_ranks > 1
    network = (n - 1) / n / (link * 1e9)  # seconds per gathered byte
    pcie = 1 / n / (gpu.host_gb_s * 1e9) if setup.cpu_offload else 0.0
    unit = average_gathered(shape, setup)
    outer = sum(gathered(w(shape, setup), setup) for w in (embedding_weights, root_weights))
    gather = unit * network + COLLECTIVE_LATENCY * several
    reduce = average_trained(shape, setup, 1, "fp32") * network
    copy_out = 2 * unit / (gpu.reached_bandwidth_gb_s * 1e9) * several
    moved = offloaded_input(shape, setup) / (gpu.host_gb_s * 1e9)
    moved *= moved_blocks(shape, setup, shape.layers) / shape.layers
    # One pass over the blocks each: how often a unit is gathered, reduced, and what can hide it.
    passes = [(1, 0, forward * several),
              (int(setup.resharded), 1, backward * several * setup.backward_prefetch)]
    shown, from_host = outer * network + gather, (outer + unit) * pcie
    if setup.by_rows:  # the head for the loss, and the rows of all ranks' tokens (vocabulary.py)
        rows = n * setup.tokens * shape.hidden * setup.product_bytes
        shown += (head_bytes(shape, setup) + rows) * network
        if setup.vocabulary_on_host:  # both shards pass whole
            from_host += 2 * head_bytes(shape, setup) / n / (gpu.host_gb_s * 1e9)
    if not setup.sharded: passes, shown = [], 0.0
    for gathers, reduces, room in passes:
        transfer = gathers * gather + reduces * reduce
        shown += shape.layers * (gathers * copy_out + max(0.0, transfer - room))
        from_host += shape.layers * max(0.0, gathers * unit * pcie - max(0.0, room - transfer))
    weights = unit * pcie
    from_host += shape.layers * (max(0.0, moved - max(0.0, forward - weights))
                                 + max(0.0, moved - max(0.0, backward - setup.resharded * weights)))
    return shown, from_host


def once_per_step(shape: ModelShape, setup: Setup, link: float, internode_gb_s: float) -> float:
    """Seconds of all-reduce at the end: ddp's gradients, or those of the hybrid's replicas."""
    replicas = setup.world_size // setup.shard_ranks
    if replicas < 2: return 0.0
    if setup.world_size > setup.node_gpus: link = min(link, internode_gb_s)
    size = all_trained(shape, setup, setup.shard_ranks, "" if setup.strategy == "ddp" else "fp32")
    return 2 * (replicas - 1) / replicas * size / (link * 1e9)


def optimizer_seconds(shape: ModelShape, gpu: Gpu, setup: Setup) -> float:
    """Seconds of the update: weight and states read and written, gradient read; on the host under
    CPU offload."""
    size = all_trained(shape, setup, setup.shard_ranks)
    own = setup.precision if setup.adapter == "none" else setup.adapter_dtype
    if trained_on_host(shape, setup): return size / BYTES[own] / HOST_OPTIMIZER_PER_SECOND
    moved = 3 * size + 2 * optimizer_bytes(shape, setup)
    return moved / (gpu.reached_bandwidth_gb_s * 1e9)
