"""What FSDP2 has gathered at each moment of a step, and which gradients wait.

Follows sharding/fsdp.py and training/step.py. Both are counted once for all mixes of policies.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..plan import BYTES, Plan
from .kinds import most_of_blocks
from .stored_weight import Weight
from .weights import (
    EMBEDDING,
    all_trained,
    average_gathered,
    average_trained,
    embedding_weights,
    gathered,
    linear_weights,
    most_trained,
    root_weights,
    trained_bytes,
    trained_ends,
    trained_on_host,
    trains_end,
    widest_block,
)


class GatheredUnits:
    """Gathered bytes of one rank; all 0 where FSDP owns nothing.

    A flat buffer is what a unit's all-gather fills, before it is copied into parameters; there is none
    for a shard group of one.
    """

    def __init__(self, shape: ModelShape, plan: Plan):
        self.plan, self.layers = plan, shape.layers
        self.trains_embedding = trains_end(shape, plan, EMBEDDING)
        self.embedding = gathered(embedding_weights(shape, plan), plan)
        self.root = gathered(root_weights(shape, plan), plan)
        self.unit, self.next = _unit_bytes(shape, plan)
        self.average, self.flat = average_gathered(shape, plan), plan.sharding.shard_ranks > 1
        # Frozen bytes of a block, which one GPU fetches ahead (memory/weight_streaming.py).
        self.streamed = self.unit - trained_bytes(widest_block(shape, plan), 1, plan)

    def at_embedding(self) -> float:
        """At the start of a forward, where the root and then the embedding are gathered.

        FSDP2's copy out of the embedding's flat buffer keeps the root's alive until it returns, by a
        local name (`prev_all_gather_state` in `FSDPParamGroup.wait_for_unshard`).
        """
        return (1 + self.flat) * (self.root + self.embedding)

    def at_last_block(self) -> float:
        """While the last unit of the last block is copied out of its flat buffer.

        The root's weights, both flat buffers as at the embedding, and the unit; without resharding all
        blocks and the embedding.
        """
        return self.all_blocks(self.unit) + self.flat * (self.unit + self.next)

    def at_loss(self) -> float:
        """Inside the root's forward: its weights, and the last unit's flat buffer until the next gather.

        Without resharding also every block and the embedding.
        """
        return self.all_blocks(0.0) + self.flat * self.unit

    def at_loss_backward(self) -> float:
        """In the loss's backward: the root, and the flat buffer of the last block's unit, gathered ahead."""
        sharding = self.plan.sharding
        ahead = sharding.resharded and sharding.backward_prefetch == "backward_pre"
        return self.all_blocks(0.0) + self.flat * self.unit * ahead

    def at_embedding_backward(self) -> float:
        """In the embedding's backward: the root's and its own."""
        return self.root + self.at_end_of_backward()

    def at_end_of_backward(self) -> float:
        """When only the embedding is left: the root is freed before its gradients are reduced."""
        there = not self.plan.sharding.resharded or self.trains_embedding
        return self.embedding * there

    def all_blocks(self, resharded: float) -> float:
        """The root, and all that was gathered before, or what is left of it where it is freed."""
        if self.plan.sharding.resharded:
            return self.root + resharded
        return self.root + self.embedding + self.layers * self.average

    def in_backward(self, block: int) -> float:
        """In a block's backward: its unit, and the flat buffer of the next, gathered ahead.

        The unit before the first block is the embedding, which is gathered only if it is trained
        (sharding/prefetch.py stops it otherwise). Without resharding all blocks up to this one, and the
        embedding, whose hook waits for the end of the backward.
        """
        plan = self.plan
        if not plan.sharding.resharded:
            # Of all micro-batches but the last, --gather_once frees nothing.
            whole = (
                self.layers
                if plan.sharding.gather_once and plan.batch.accumulation > 1
                else block + 1
            )
            return self.root + self.embedding + whole * self.average
        ahead = self.next
        if block == 0 and plan.sharding.wrap_policy != "attention_mlp":
            ahead = self.embedding * self.trains_embedding
        if not self.flat:
            return self.root + self.unit + (self.streamed if block else 0.0)
        return self.root + self.unit + ahead * (plan.sharding.backward_prefetch != "none")


@most_of_blocks
def _unit_bytes(shape: ModelShape, plan: Plan) -> tuple[float, float]:
    """Gathered bytes of the unit whose backward comes first in a block, and of the one after it.

    A block is one unit, or its MLP and its attention are two. `min_params` is taken as `block`.
    """
    if plan.sharding.wrap_policy == "attention_mlp":
        return (
            gathered(linear_weights(shape, plan, "mlp"), plan),
            gathered(linear_weights(shape, plan, "attention"), plan),
        )
    block = gathered(widest_block(shape, plan), plan)
    return block, block


class WaitingGradients:
    """Bytes of one rank's gradients; `held` are those of earlier micro-batches, all through a forward.

    The host has them where they are offloaded. A CUDA graph adds to tensors that stay for the whole run.
    FSDP2 keeps those of a unit whole until the unit is reduced, the root's until the backward's end.
    """

    def __init__(self, shape: ModelShape, plan: Plan):
        ranks = plan.sharding.shard_ranks
        self.plan, self.layers = plan, shape.layers
        self.on_host = trained_on_host(shape, plan)
        self.reduced = 0.0 if self.on_host else all_trained(shape, plan, ranks)
        # Of these, what is no adapter's.
        self.of_weights = 0.0 if self.on_host else all_trained(shape, plan, ranks, adapters=False)
        self.block = 0.0 if self.on_host else average_trained(shape, plan, ranks)
        self.stay = plan.batch.accumulation > 1 or plan.replays(shape)
        self.held = self.reduced if self.stay else 0.0
        # Without a reduction in all micro-batches but the last they wait whole, in the reduce dtype.
        self.whole_block = 0.0
        if plan.sharded and plan.loop.no_sync and plan.batch.accumulation > 1:
            self.held = all_trained(shape, plan, 1, "fp32")
            self.whole_block = average_trained(shape, plan, 1, "fp32")
        self.adds_often = plan.batch.accumulation > 2
        self.embedding = trained_bytes(
            trained_ends(shape, plan, embedding_weights(shape, plan)), 1, plan
        )
        self.root = trained_bytes(trained_ends(shape, plan, root_weights(shape, plan)), 1, plan)
        if self.stay and not plan.sharded and not shape.tied:
            self.root = 0.0  # added to what is held as soon as it is there
        # Of hybrids a block's sum in fp32 stays to the backward's end (`_all_reduce_state` of torch).
        cast = plan.sharding.facts.is_hybrid and BYTES[plan.trained_dtype] < 4
        self.summed = average_trained(shape, plan, ranks, "fp32") if cast else 0.0
        # The input of the last reduce-scatter, which FSDP2 keeps until the next.
        self.sent = most_trained(shape, plan, "fp32") if plan.sharded else 0.0

    def in_backward(self, block: int) -> float:
        """Alive when the backward has come to `block`: those of the blocks after it, and the root's."""
        return self.after(self.layers - 1 - block) + self.root

    def at_embedding(self) -> float:
        """When the embedding's own has come, last of all: beside the one that a tied head has given."""
        own = self.embedding or self.root
        return self.after(self.layers) + self.root + own

    def after(self, blocks: int) -> float:
        """Those of earlier micro-batches, and of so many blocks of this one with what was sent last."""
        sent = blocks * self.summed + (self.sent if blocks else 0.0)
        if self.whole_block:  # of the last micro-batch, the first, and one between them
            left = self.held - blocks * (self.whole_block - self.block)
            return max(left + sent, blocks * self.whole_block, self.held * self.adds_often)
        return self.held + self._new(blocks) + sent

    def of_blocks(self) -> float:
        """When all blocks of the last micro-batch are reduced: theirs, and what else was reduced before."""
        summed = self.layers * self.summed
        if self.whole_block:
            return self.layers * self.block + summed
        return self.held + self._new(self.layers) + summed

    def _new(self, blocks: int) -> float:
        """Reduced ones of so many blocks that are not added to others; chosen blocks may come first."""
        return 0.0 if self.stay else min(blocks * self.block, self.reduced)

    def new_part(self, unit: list[Weight]) -> float:
        """This rank's part of a unit's, where it is not added to what was there before."""
        if self.on_host or self.stay and not self.whole_block:
            return 0.0
        return trained_bytes(unit, self.plan.sharding.shard_ranks, self.plan)
