"""What FSDP2 has gathered at each moment of a step, and which gradients wait.

Follows sharding/fsdp.py and training/step.py. Both are counted once for all mixes of policies.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..plan import Plan
from .kinds import most_of_blocks
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
    trained_on_host,
    widest_block,
)


class GatheredUnits:
    """Gathered bytes of one rank; all 0 where FSDP owns nothing.

    A flat buffer is what a unit's all-gather fills, before it is copied into parameters; there is none
    for a shard group of one.
    """

    def __init__(self, shape: ModelShape, plan: Plan):
        self.plan, self.layers = plan, shape.layers
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
            ahead = self.embedding if plan.adapter.trains(EMBEDDING) else 0.0
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
    """

    def __init__(self, shape: ModelShape, plan: Plan):
        on_host, self.last = trained_on_host(shape, plan), shape.layers - 1
        self.whole = 0.0 if on_host else all_trained(shape, plan, plan.sharding.shard_ranks)
        if (
            plan.sharded and plan.loop.no_sync and plan.batch.accumulation > 1
        ):  # whole, in the reduce dtype
            self.whole = all_trained(shape, plan, 1, "fp32")
        self.stay = plan.batch.accumulation > 1 or plan.replays(shape)
        self.held = self.whole if self.stay else 0.0
        self.root = trained_bytes(root_weights(shape, plan), 1, plan)
        self.block = 0.0 if on_host else average_trained(shape, plan, plan.sharding.shard_ranks)
        # The input of the last reduce-scatter, which FSDP2 keeps until the next.
        self.reduced = most_trained(shape, plan, "fp32") if plan.sharded else 0.0

    def in_backward(self, block: int) -> float:
        """Alive when the backward has come to `block`: those of the blocks after it, and the root's."""
        later = self.last - block
        new = (
            0.0 if self.stay else min(later * self.block, self.whole)
        )  # chosen blocks may come first
        return self.held + new + (self.reduced if later else 0.0) + self.root
