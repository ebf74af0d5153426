"""What is alive when the backward has ended and FSDP2 reduces the gradients that still wait.

The root's do, and the embedding's: its input asks for no gradient, so autograd does not tell FSDP when
it is done. Both are reduced in the backward's last callback (`_root_post_backward_final_callback` of
torch), the root first. With large trained vocabularies that is the peak of a step.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..plan import BYTES, Plan
from .gathered_units import GatheredUnits, WaitingGradients
from .stored_weight import Weight
from .weights import embedding_weights, root_weights, trained_bytes, trained_ends


def end_of_backward(
    shape: ModelShape, plan: Plan, waiting: WaitingGradients, window: GatheredUnits
) -> dict[str, dict[str, float]]:
    """Bytes by part while the root is reduced, and while the embedding is, where they are trained.

    Beside them are the gradients of all blocks and what earlier micro-batches left; in the root's turn
    also the embedding and its whole gradient, in the embedding's the root's reduced ones.
    """
    if not plan.sharded:
        return {}
    root = trained_ends(shape, plan, root_weights(shape, plan))
    embedding = trained_ends(shape, plan, embedding_weights(shape, plan))
    beside, found = waiting.of_blocks(), {}
    if root:
        pending = waiting.embedding
        if waiting.whole_block:
            pending += trained_bytes(embedding, 1, plan, "fp32")
        found["root's gradients reduced"] = dict(
            gradients=beside + pending + _in_reduction(root, plan, waiting),
            unsharded=window.at_end_of_backward(),
        )
    if embedding:
        found["embedding's gradients reduced"] = dict(
            gradients=beside + waiting.new_part(root) + _in_reduction(embedding, plan, waiting),
            unsharded=0.0,
        )
    return found


def _in_reduction(unit: list[Weight], plan: Plan, waiting: WaitingGradients) -> float:
    """The most bytes of a unit's gradients while FSDP2 reduces them (`foreach_reduce` of torch).

    First these, whole, and what is sent, all ranks' parts in fp32. Then that, this rank's sum in fp32,
    and the same in the weights' dtype; and the last weight's whole gradient, which a name of the loop
    over them keeps (`unsharded_grad`) where there is more than one rank.
    """
    ranks = plan.sharding.shard_ranks
    before = "fp32" if waiting.whole_block else plan.trained_dtype
    summed = trained_bytes(unit, ranks, plan, "fp32")
    cast = trained_bytes(unit, ranks, plan) if BYTES[plan.trained_dtype] < 4 else 0.0
    last = trained_bytes(unit[-1:], 1, plan, before) if ranks > 1 else 0.0
    whole = trained_bytes(unit, 1, plan, before)
    return ranks * summed + max(whole, last + summed + cast)
