"""The peak of a step: what is alive at the moments that can be it, and the host's memory.

Which units FSDP2 has gathered, and which gradients wait, is in `gathered_units.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..catalog.arch import ModelShape
from ..choices import OPTIMIZERS, POLICIES
from ..choices.optimizers import CHUNK, TOGETHER
from ..choices.strategies import BUCKET_BYTES, resharding
from ..plan import BYTES, Plan, Runs
from . import constants
from .activations import block_input, loss_backward_bytes, loss_bytes
from .constants import CONTEXT_GIB, NCCL_GIB, PROCESS_HOST_GIB
from .end_of_backward import end_of_backward
from .experts import hole_of_block
from .gathered_units import GatheredUnits, WaitingGradients
from .kept import Kept, offloaded_of_blocks
from .vocabulary import (
    cast_head_bytes,
    head_bytes,
    rows_in_flight,
    trains_embedding,
    whole_embedding_bytes,
)
from .weights import all_trained, all_weights, optimizer_bytes, resident_bytes, trained_on_host

GIB = 2**30
_CUBLAS_WORKSPACE = 2 * 32 * 2**20  # torch's default on Hopper, for the forward and backward thread

_UPDATE, _LOSS_BACKWARD = "optimizer's update", "loss backward"
PARTS = (
    "linears",
    "absmax",
    "fp8",
    "embedding",
    "head",
    "norms",
    "adapters",
    "optimizer",
    "gradients",
    "activations",
    "working",
    "unsharded",
    "loss",
    "workspace",
)
_NOT_ALLOCATED = ("slack", "context")
EXPLAINED = dict(
    linears="linear weights of the blocks",
    absmax="scales of 4-bit weights",
    fp8="what fp8 products keep of them",
    embedding="input embedding",
    head="output head",
    norms="norms and biases",
    adapters="adapters",
    optimizer="optimizer states",
    gradients="gradients of trained weights",
    activations="saved for the backward",
    working="in use inside one block",
    unsharded="gathered by FSDP",
    loss="logits and their gradients",
    workspace="cuBLAS",
    slack="reserved by torch, unused",
    context="CUDA context and NCCL",
    cache="keys and values of generation",
)


@dataclass(frozen=True)
class Memory:
    """GiB per GPU at the peak of a step, by part, and GiB of host memory per machine."""

    parts: dict[str, float]
    moment: str  # when the peak is
    moments: dict[str, float]  # allocated GiB at each moment
    host_parts: dict[str, float] = field(default_factory=dict)

    @property
    def peak_allocated(self) -> float:
        """As torch.cuda.max_memory_allocated, in GiB."""
        return sum(v for k, v in self.parts.items() if k not in _NOT_ALLOCATED)

    @property
    def peak_reserved(self) -> float:
        """As torch.cuda.max_memory_reserved, in GiB."""
        return self.peak_allocated + self.parts["slack"]

    @property
    def total(self) -> float:
        """GiB that the card must have: reserved memory, the context and NCCL's buffers."""
        return sum(self.parts.values())

    @property
    def host(self) -> float:
        """GiB of host memory per machine, all its ranks together."""
        return sum(self.host_parts.values())

    @property
    def largest(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=self.parts.__getitem__)

    def fits(self, memory_gib: float) -> bool:
        """True if a card of this size holds it."""
        return self.total <= memory_gib

    def table(self) -> str:
        """The parts in lines for people; empty ones are left out."""
        rows = [(name, gib, EXPLAINED[name]) for name, gib in self.parts.items() if gib >= 0.005]
        lines = [f"{name:<12} {gib:8.2f} GiB  {text}" for name, gib, text in rows]
        lines += [
            f"{'total':<12} {self.total:8.2f} GiB  per GPU; {self.peak_allocated:.2f} "
            f"allocated, peak at: {self.moment}",
            f"{'host':<12} {self.host:8.2f} GiB  per machine",
        ]
        return "\n".join(lines)


def memory(shape: ModelShape, plan: Plan | None = None, **changes) -> Memory:
    """The peak memory of one training step after the first, with its parts.

    `changes` are fields of `Plan`: `memory(shape, world_size=2, batch_size=4)`. Raises ValueError
    for an unknown target module or a number out of range.
    """
    plan = (plan or Plan()).change(**changes)
    return Peak(shape, plan)(plan.memory.runs(shape))


class Peak:
    """`memory` for any mix of activation policies; what does not depend on it is counted once.

    `plan.memory.activation_policy` is not looked at.
    """

    def __init__(self, shape: ModelShape, plan: Plan):
        self.shape, self.plan = shape, plan
        self.static = _static_parts(shape, plan)
        self.kept, self.gradients = Kept(shape, plan), WaitingGradients(shape, plan)
        self.window = self.loose = GatheredUnits(shape, plan)
        if plan.sharded and not plan.sharding.resharded:
            freed = plan.change(gather_once=False, strategy=resharding(plan.sharding.strategy))
            self.loose = GatheredUnits(shape, freed)
        self.update = _update_bytes(shape, plan)
        self.fixed = self.fixed_moments()
        self.ends = end_of_backward(shape, plan, self.gradients, self.window)
        self.head, self.embedding = head_bytes(shape, plan), whole_embedding_bytes(shape, plan)
        self.context = GIB * (CONTEXT_GIB + (NCCL_GIB if plan.sharding.world_size > 1 else 0))

    def __call__(self, runs: Runs) -> Memory:
        """The memory of a step whose blocks follow `runs`."""
        found = self.moments(runs)
        totals = {name: sum(parts.values()) for name, parts in found.items()}
        moment = max(totals, key=totals.__getitem__)
        always = sum(self.static.values())
        parts = dict.fromkeys(PARTS, 0.0) | self.static | found[moment]
        unused = self.slack(runs) + self.beside_update(totals) + self.beside_gradients(found)
        parts |= dict(slack=unused, context=self.context)
        return Memory(
            {name: b / GIB for name, b in parts.items()},
            moment,
            {name: (always + b) / GIB for name, b in totals.items()},
            host_memory(self.shape, self.plan, runs),
        )

    def fixed_moments(self) -> dict[str, dict[str, float]]:
        """Bytes of what comes and goes outside of blocks; what these keep is added by `moments`."""
        shape, plan, grads = self.shape, self.plan, self.gradients
        n, d, a = plan.batch.tokens, shape.hidden, BYTES[plan.model.stored_dtype]
        bucket = (
            min(grads.reduced, BUCKET_BYTES)
            if plan.sharding.world_size > 1 and not plan.sharded
            else 0.0
        )
        # The final norm keeps its input, eager in fp32. Its backward, compiled, holds the gradients of
        # both ends; eager, in that of its square, five tensors in fp32.
        kept, work = (n * d * a, 2 * n * d * a) if plan.loop.compile else (n * d * 4, 5 * n * d * 4)
        return {
            "embedding": dict(
                gradients=grads.held, working=n * d * a + rows_in_flight(shape, plan)
            ),
            "last block gathered": dict(gradients=grads.held, activations=block_input(shape, plan)),
            "loss": dict(
                activations=kept + n * d * a,
                loss=loss_bytes(shape, plan) + n * d * a,
                gradients=grads.held,
                working=cast_head_bytes(shape, plan),
            ),
            _LOSS_BACKWARD: dict(
                activations=kept, loss=loss_backward_bytes(shape, plan), gradients=grads.held
            ),
            "final norm": dict(activations=kept, working=work, gradients=grads.held + grads.root),
            "embedding's backward": dict(
                gradients=grads.at_embedding() * trains_embedding(shape, plan), working=n * d * a
            ),
            "gradients reduced": dict(gradients=grads.reduced + bucket),
            _UPDATE: dict(gradients=grads.reduced, working=self.update),
        }

    def moments(
        self, runs: Runs, window: GatheredUnits | None = None
    ) -> dict[str, dict[str, float]]:
        """Bytes of what comes and goes, at each moment that can be the peak.

        Among blocks of one policy everything changes evenly, so the ends of each run are enough.
        """
        window, layers = window or self.window, self.shape.layers
        head, kept = self.head, self.kept.at_end(runs, layers)
        more = {
            "embedding": (0.0, window.at_embedding() + self.embedding),
            "last block gathered": (
                self.kept.before(runs, layers - 1) + self.kept.leaving_beside(runs, layers - 1),
                window.at_last_block(),
            ),
            "loss": (kept, window.at_loss() + head),
            _LOSS_BACKWARD: (kept, window.at_loss_backward()),
            "final norm": (kept, window.at_loss()),
            "embedding's backward": (0.0, window.at_embedding_backward()),
            "gradients reduced": (0.0, 0.0),
            _UPDATE: (0.0, 0.0),
        }
        found = {
            name: self.fixed[name]
            | dict(
                activations=self.fixed[name].get("activations", 0.0) + before, unsharded=gathered
            )
            for name, (before, gathered) in more.items()
        }
        found |= {
            name: self.in_block_backward(runs, policy, block, window)
            for name, (policy, block) in _block_moments(runs).items()
        }
        return found | self.ends

    def in_block_backward(
        self, runs: Runs, policy: str, block: int, window: GatheredUnits
    ) -> dict[str, float]:
        """What is alive at the widest place of one block's backward."""
        before = self.kept.before(runs, block)
        # What the block before has on the host comes back meanwhile; the last block's never left.
        if 0 < block < self.shape.layers - 1:
            before += self.kept.coming(runs, block)
        saved, work = self.kept.in_backward[policy]
        return dict(
            activations=before + saved,
            working=work,
            unsharded=window.in_backward(block),
            gradients=self.gradients.in_backward(block),
        )

    def beside_update(self, totals: dict[str, float]) -> float:
        """What torch has reserved beside the peak for the update, which finds no hole as large."""
        before = max(total for name, total in totals.items() if name != _UPDATE)
        return before + self.update - max(totals.values())

    def beside_gradients(self, found: dict[str, dict[str, float]]) -> float:
        """What torch has reserved beside the peak for gradients of the model's own weights, until they come.

        FSDP2 makes them on a stream of its own, whose memory nothing else takes once they are freed. Those
        of adapters are in the constants of slack, which rows of adapters have set.
        """
        own = self.gradients.of_weights
        if self.gradients.stay or self.plan.sharding.shard_ranks == 1:
            return 0.0
        totals = {name: sum(parts.values()) for name, parts in found.items()}
        without = (totals[name] - min(own, parts["gradients"]) for name, parts in found.items())
        return max(0.0, max(without) + own - max(totals.values()))

    def slack(self, runs: Runs) -> float:
        """Bytes that torch has reserved and does not use at the peak."""
        terms = self.slack_terms(runs).items()
        in_use = sum(getattr(constants, name) * size for name, size in terms)
        return in_use + constants.HOLES_OF_GRAPHS * self.holes_of_experts(runs)

    def holes_of_experts(self, runs: Runs) -> float:
        """Bytes of weights unpacked in fp8 whose place in a graph was taken by what blocks keep."""
        plan = self.plan
        if plan.quantization.compute_dtype != "fp8" or not plan.replays(self.shape):
            return 0.0
        keep = sum(count for policy, count in runs if POLICIES[policy].keeps_linears)
        return keep * hole_of_block(self.shape, plan)

    def stays(self, runs: Runs) -> str:
        """What stays of blocks on the GPU: more than their inputs, as much as these, or nothing.

        Log-sum-exps do where attention's outputs are on the host: small, but between what comes and goes.
        """
        memory, used = self.plan.memory, [POLICIES[policy] for policy, _ in runs]
        moves = memory.activation_offload and memory.attention_offload
        keep = [p for p in used if p.keeps_attention]
        if any(not (moves and p.keeps_attention_alone) for p in keep):
            return "KEPT"
        return "MOVED" if memory.activation_offload and not keep else "INPUTS"

    def slack_terms(self, runs: Runs) -> dict[str, float]:
        """What the slack is in proportion to, by the name of the constant.

        Of the moment at which most comes and goes: not units that stay gathered, nor blocks that one GPU
        streams, which come back to where they were; but the head that it fetches for the loss. Gradients of
        a trained head are segments of their own, which each step finds again.
        """
        alone = self.plan.sharding.shard_ranks == 1
        share = "SLACK_" + self.stays(runs)
        moments = [
            {
                share: parts.get("working", 0.0)
                + parts.get("loss", 0.0)
                + parts["unsharded"] * (alone and name == "loss"),
                "SLACK_GATHERED": parts["unsharded"] * (not alone),
            }
            for name, parts in self.moments(runs, self.loose).items()
            if name not in (_UPDATE, _LOSS_BACKWARD)
        ]
        return max(moments, key=lambda m: sum(getattr(constants, name) * m[name] for name in m))


def _update_bytes(shape: ModelShape, plan: Plan) -> float:
    """What an update by optim/adamw.py makes and frees; torch's own makes nothing.

    Small tensors are joined: weights, gradients, states (in fp32 if they have 8 bits), and of each
    value its place and salt in 32 bits and, while these are spread, a 64-bit number of its tensor. Of a
    large one there are only its states in fp32, CHUNK values at a time.
    """
    optimizer = OPTIMIZERS[plan.optimizer.optimizer]
    if not optimizer.updates_together:
        return 0.0
    own = BYTES[plan.trained_dtype]
    states = optimizer.working_bytes(own)
    sizes = [w.shard_values(plan.sharding.shard_ranks) for w, _ in all_weights(shape, plan)]
    values = all_trained(shape, plan, plan.sharding.shard_ranks) / own
    joined = min(values, TOGETHER) * (2 * own + states + 2 * 4 + 8)
    unpacked = optimizer.state_dtype == "int8" and max(sizes) > TOGETHER
    large = min(max(sizes), CHUNK) if unpacked else 0
    return max(joined, large * states)


def _static_parts(shape: ModelShape, plan: Plan) -> dict[str, float]:
    """Bytes that stay on the GPU through the whole step."""
    states = 0.0 if trained_on_host(shape, plan) else optimizer_bytes(shape, plan)
    return dict(workspace=_CUBLAS_WORKSPACE, optimizer=states) | resident_bytes(shape, plan)


def _block_moments(runs: Runs) -> dict[str, tuple[str, int]]:
    """Policy and number, from 0, of the blocks in whose backward the peak can be.

    These are the first, the last and those where policies change. The last is apart: no gradients wait
    to be reduced yet; and so is the first, which has nothing before it to fetch.
    """
    start, found = 0, {}
    last = sum(count for _, count in runs) - 1
    for policy, count in runs:
        for block in {start, start + count - 1}:
            found[block] = policy
        found |= {block: policy for block in (1, last - 1) if start <= block < start + count}
        start += count
    names = {
        0: "first block",
        1: "second block",
        last - 1: "last block but one",
        last: "last block",
    }
    return {
        names.get(block, f"block {block + 1}"): (found[block], block)
        for block in sorted(found, reverse=True)
    }


def host_memory(shape: ModelShape, plan: Plan, runs: Runs | None = None) -> dict[str, float]:
    """GiB of host memory of one machine by part: its ranks, and what offload puts there.

    runs: the blocks' policies, if not the plan's.

    One page-locked region per rank and use (memory/pinned_memory.py), so nothing is rounded up.
    """
    ranks = plan.sharding.node_gpus
    found = dict(weights=sum(resident_bytes(shape, plan, host=True).values()))
    if plan.adapter.changes_base:  # what adapters began as is kept to the end (../lora_init)
        found["first values"] = all_trained(shape, plan, plan.sharding.shard_ranks)
    if plan.memory.activation_offload:  # slots: of inputs, one for every block but the last
        _, outputs = offloaded_of_blocks(shape, plan, runs or plan.memory.runs(shape))
        found["activations"] = (shape.layers - 1) * block_input(shape, plan) + outputs
    if trained_on_host(shape, plan):
        found |= dict(
            gradients=all_trained(shape, plan, plan.sharding.shard_ranks),
            optimizer=optimizer_bytes(shape, plan),
        )
    return dict(processes=PROCESS_HOST_GIB * ranks) | {
        name: ranks * b / GIB for name, b in found.items() if b
    }
