"""What all blocks keep between their forward and their backward: on the GPU, and on the host."""

from __future__ import annotations

from collections.abc import Callable

from ..catalog.arch import ModelShape
from ..choices import POLICIES
from ..plan import Plan, Runs
from .activations import attention_output, block_input, kept_by_block, widest_in_backward
from .kinds import mean_of_blocks, most_of_blocks


def _moved_output(shape: ModelShape, plan: Plan) -> float:
    """Of one block, attention's output; its log-sum-exp stays on the GPU."""
    return attention_output(shape, plan, log_sums=False)


_mean_output, _most_output = mean_of_blocks(_moved_output), most_of_blocks(_moved_output)


def offloaded(
    shape: ModelShape, plan: Plan, policy: str, output: Callable = _mean_output
) -> tuple[float, float]:
    """Bytes of one block that wait in host memory: its input, and attention's output if it moves too."""
    row, memory = POLICIES[policy], plan.memory
    if not memory.activation_offload or not row.recomputes:
        return 0.0, 0.0
    moves = memory.attention_offload and row.keeps_attention_alone
    return block_input(shape, plan), output(shape, plan) if moves else 0.0


def offloaded_of_blocks(shape: ModelShape, plan: Plan, runs: Runs) -> tuple[float, float]:
    """The same of all blocks but the last, which keeps all it has on the GPU."""
    *before, (last, count) = runs
    inputs = outputs = 0.0
    for policy, moved in (*before, (last, count - 1)):
        of_input, of_output = offloaded(shape, plan, policy)
        inputs, outputs = inputs + moved * of_input, outputs + moved * of_output
    return inputs, outputs


class Kept:
    """What blocks keep on the GPU between forward and backward, under any mix of policies."""

    def __init__(self, shape: ModelShape, plan: Plan):
        self.in_backward = {p: widest_in_backward(shape, plan, p) for p in POLICIES}
        self.moved = {p: sum(offloaded(shape, plan, p)) for p in POLICIES}
        self.by_block = {p: kept_by_block(shape, plan, p) - self.moved[p] for p in POLICIES}
        # What of a block comes back before its backward, and what leaves after its forward.
        self.fetched = {p: offloaded(shape, plan, p, _most_output) for p in POLICIES}
        self.leaving = {p: output for p, (_, output) in self.fetched.items()}

    def before(self, runs: Runs, block: int) -> float:
        """Bytes kept of the blocks before `block` (from 0), which is not the end."""
        kept, left = 0.0, block
        for policy, count in runs:
            kept += min(count, left) * self.by_block[policy]
            left -= count
            if left <= 0:
                break
        return kept

    def at_end(self, runs: Runs, blocks: int) -> float:
        """Bytes kept of all blocks: what the last one keeps is not moved."""
        return self.before(runs, blocks) + self.moved[runs[-1][0]]

    def coming(self, runs: Runs, block: int) -> float:
        """Bytes of the block before `block` that come back while `block` runs backward."""
        return sum(self.fetched[_policy_of(runs, block - 1)])

    def leaving_beside(self, runs: Runs, block: int) -> float:
        """Bytes of the block before `block` that leave while `block` runs."""
        return self.leaving[_policy_of(runs, block - 1)] if block else 0.0


def _policy_of(runs: Runs, block: int) -> str:
    """The policy of a block, from 0."""
    for policy, count in runs:
        if block < count:
            return policy
        block -= count
    raise IndexError("no such block")
