"""What preference tuning and reinforcement learning take beside a step of supervised fine-tuning.

They are TRL's trainers on this engine (../integrations/trl.py). DPO trains on pairs, and GRPO on answers that
the model generates by itself; both may ask a reference policy, which is the frozen base with its adapters
off: no second model, but one more forward of every row.

Letters: B rows of a micro-batch, T tokens of a row, G tokens of it that are generated, N = B T, D hidden,
I intermediate, V vocabulary, W weights of linear layers that a token is multiplied with, K key-value
heads, hd head size, L blocks, a bytes of a value in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..catalog.arch import ModelShape
from ..catalog.machine import Machine
from ..config import AUTO, RunConfig
from ..plan import Plan
from . import constants
from .activations import dequantized
from .compute import compute_parts, hook_seconds
from .flops import adapted_linears, flops_per_token
from .gathered_units import GatheredUnits
from .kinds import mean_of_blocks
from .memory_traffic import activation_traffic, unpack_traffic
from .peak import GIB, Memory, Peak
from .question import Estimate
from .speed import StepTime
from .weights import average_gathered, embedding_weights, gathered, root_weights

TASKS = ("sft", "dpo", "grpo")
_FORWARD_OF_ATTENTION = 1 / 3.5  # of a forward and a flash backward
_PASSES_OF_LOGITS = 3 / 7  # that a forward makes of those of a loss (speed.compute_parts)
_SAMPLED = 4 + 4 + 4  # bytes of a logit in fp32, of its probability, and of what is sorted or drawn


@dataclass(frozen=True)
class Task:
    """What is trained: sft, dpo or grpo; whether a reference policy is asked; G of each row."""

    name: str = "sft"
    reference: bool = True
    generated: int = 0

    def rows(self, examples: int) -> int:
        """Rows of so many examples: a pair has two."""
        return examples * (1 + (self.name == "dpo"))

    def of_trainer(self, config: RunConfig) -> RunConfig:
        """The settings as a trainer takes them, with a pair counted as its two rows.

        Trainers compile blocks only if they are told to, and replay no micro-batch. Raises ValueError for
        G that leave no prompt, and for graphs.
        """
        if self.name == "sft":
            return config
        if config.cuda_graphs:
            raise ValueError(
                f"--cuda_graphs true with --task {self.name}: TRL's trainers launch every micro-batch; leave "
                "it out"
            )
        config = replace(config, compile=bool(config.compile), cuda_graphs=False)
        if self.name == "grpo" and not 0 < self.generated < config.context_length:
            raise ValueError(
                f"--completion_length {self.generated}: rows of --context_length "
                f"{config.context_length} hold a prompt too; give 1 to {config.context_length - 1}"
            )
        if self.name != "dpo":
            return config
        twice = {
            name: 2 * getattr(config, name)
            for name in ("batch_size", "global_batch_size", "bins_per_step")
            if getattr(config, name) != AUTO
        }
        return replace(config, **twice)

    def added_to(self, found: Estimate) -> Estimate:
        """The estimate of a supervised step on the same rows with what the task needs besides."""
        if self.name == "sft":
            return found
        shape, machine, plan = found.shape, found.machine, found.plan
        parts, memory = dict(found.step.parts), found.memory
        if self.reference:
            times = plan.batch.accumulation
            parts["reference"] = times * reference_seconds(shape, machine, plan)
            memory = _at_least(memory, "reference policy", _reference_parts(shape, plan))
        if self.name == "grpo":
            parts["generation"] = generation_seconds(shape, machine, plan, self.generated)
            memory = _at_least(memory, "generation", _generation_parts(shape, plan, self.generated))
        step = StepTime(parts, found.step.tokens_per_gpu, found.step.calibrated)
        return replace(found, step=step, memory=memory)


# ---- a forward without gradients ----------------------------------------------------------------


def forward_flops(shape: ModelShape, plan: Plan) -> float:
    """FLOPs per token of a forward with adapters off: 2 (W + V D), and T q of causal attention a block.

    DPO makes two such forwards of the reference for each pair: of the chosen and of the rejected row.
    """
    weights = 2 * (sum(n * kind.used_linears() for kind, n in shape.block_kinds()))
    head = 2 * shape.vocab * shape.hidden
    return weights + head + flops_per_token(shape, plan).attention * _FORWARD_OF_ATTENTION


def reference_seconds(shape: ModelShape, machine: Machine, plan: Plan) -> float:
    """Seconds of the reference's forward of a micro-batch.

    Of the step's own parts: 2 of the FLOPs of each weight, attention's forward, each weight dequantized
    once, the forward's passes over activations, and 3 of 7 over the logits; then what gathering all units
    once, or launching the forward, takes beyond that.
    """
    gpu = machine.gpu
    parts = compute_parts(shape, gpu, plan)
    flops = flops_per_token(shape, plan)
    once = forward_flops(shape, plan) - flops.attention * _FORWARD_OF_ATTENTION
    linears = parts["linears"] * once / flops.linears
    forward, both = activation_traffic(shape, plan)[0], sum(activation_traffic(shape, plan))
    busy = (
        linears
        + parts["attention"] * _FORWARD_OF_ATTENTION
        + parts["dequantization"] / 2
        + parts["activations"] * forward / both
        + parts["loss"] * _PASSES_OF_LOGITS
    )
    return max(busy, _gather_seconds(shape, machine, plan), _launch_seconds(shape, plan))


def _gather_seconds(shape: ModelShape, machine: Machine, plan: Plan) -> float:
    """Seconds in which all units are gathered once: their bytes (n - 1) / n over the link."""
    n = plan.sharding.shard_ranks
    if not plan.sharded or n == 1:
        return 0.0
    link = machine.link_gb_s or machine.gpu.peer_gb_s(plan.sharding.node_gpus)
    if n > plan.sharding.node_gpus:
        link = min(link, machine.internode_gb_s)
    outer = sum(gathered(w(shape, plan), plan) for w in (embedding_weights, root_weights))
    whole = outer + shape.layers * average_gathered(shape, plan)
    return whole * (n - 1) / n / (link * 1e9)


def forward_working(shape: ModelShape, plan: Plan, tokens: float) -> float:
    """Bytes of a block's forward without gradients at its widest: tokens (2 D + 3 I) a, and a weight.

    The residual and the MLP's input; gate, up and their product; the largest weight, dequantized. MLPs in
    tiles hold one tile's.
    """
    tiles = max(plan.memory.tiles(policy) for policy in set(plan.memory.policies(shape)))
    a = plan.model.product_bytes
    weight = max((dequantized(shape, plan, name) for name in shape.linears()), default=0.0)
    return tokens * a * (2 * shape.hidden + 3 * shape.mlp_width / tiles) + weight


def _reference_parts(shape: ModelShape, plan: Plan) -> dict[str, float]:
    """Bytes while the reference is asked, when the policy's own activations wait for the backward."""
    peak, runs = Peak(shape, plan), plan.memory.runs(shape)
    return peak.static | dict(
        activations=peak.kept.at_end(runs, shape.layers),
        working=forward_working(shape, plan, plan.batch.tokens),
        unsharded=GatheredUnits(shape, plan).at_last_block(),
        gradients=peak.gradients.held,
    )


# ---- generation ----------------------------------------------------------------------------------


def cache_bytes(shape: ModelShape, plan: Plan, rows: float, tokens: float) -> float:
    """Bytes of keys and values of `rows` rows of `tokens` tokens: 2 L K hd a each; on every rank whole."""
    return rows * tokens * plan.model.product_bytes * shape.layers * _cached(shape, plan)


@mean_of_blocks
def _cached(shape: ModelShape, plan: Plan) -> float:
    """Values that a block keeps of a token: none of layers with a state."""
    return 0.0 if shape.state_width else 2 * shape.kv_heads * shape.head_dim


def generation_seconds(shape: ModelShape, machine: Machine, plan: Plan, generated: int) -> float:
    """Seconds to generate the G last tokens of a step's rows, those of all its micro-batches together.

    A forward of the prompts, then G steps, each as long as the longest of: reading all weights (once as
    they are stored, as they are dequantized, once in the compute dtype) and the cache, of which on the
    average half is there; gathering all units, every time; and launching a forward.
    """
    rows = plan.batch.micro_batch_size * plan.batch.accumulation
    length = plan.batch.context_length
    prompts = plan.batch.accumulation * reference_seconds(shape, machine, plan)
    copies = machine.gpu.reached_bandwidth_gb_s * 1e9
    weights = sum(n * kind.used_linears() for kind, n in shape.block_kinds())
    read = (weights + shape.vocab * shape.hidden) * plan.model.product_bytes
    read += shape.layers * sum(unpack_traffic(shape, plan).values())
    read += cache_bytes(shape, plan, rows, length - generated / 2)
    each = max(read / copies, _gather_seconds(shape, machine, plan), _launch_seconds(shape, plan))
    return prompts * (length - generated) / length + generated * each


def _launch_seconds(shape: ModelShape, plan: Plan) -> float:
    """Seconds in which the CPU launches a forward of all blocks, which no CUDA graph replays.

    A third of what a forward and backward take, as in compute.py, and half of FSDP's hooks of one gather.
    """
    once = constants.COMPILED_LAUNCH if plan.loop.compile else constants.EAGER_LAUNCH
    once += constants.ADAPTER_LAUNCH * len(adapted_linears(shape, plan))
    once += constants.UNPACK_LAUNCH * (plan.quantization.quant != "none")
    once += hook_seconds(shape, plan) / 2
    return shape.layers * once


def _generation_parts(shape: ModelShape, plan: Plan, generated: int) -> dict[str, float]:
    """Bytes while answers are generated, before a step's forward: no activations, no gradients."""
    rows = plan.batch.micro_batch_size * plan.batch.accumulation
    prompts = rows * (plan.batch.context_length - generated)
    working = max(forward_working(shape, plan, prompts), rows * shape.vocab * _SAMPLED)
    return Peak(shape, plan).static | dict(
        cache=cache_bytes(shape, plan, rows, plan.batch.context_length),
        working=working,
        unsharded=GatheredUnits(shape, plan).at_last_block(),
    )


def _at_least(memory: Memory, moment: str, parts: dict[str, float]) -> Memory:
    """The memory with one more moment, which is the peak if more is alive then."""
    parts = {name: size / GIB for name, size in parts.items()}
    moments = memory.moments | {moment: sum(parts.values())}
    if moments[moment] <= memory.peak_allocated:
        return replace(memory, moments=moments)
    empty = dict.fromkeys(memory.parts, 0.0)
    beside = {name: memory.parts[name] for name in ("slack", "context")}
    return replace(memory, parts=empty | parts | beside, moment=moment, moments=moments)
