"""The peak of a step: what is alive at the moments that can be it, and the host's memory.

Which units FSDP2 has gathered, and which gradients wait, follows sharding/fsdp.py and
training/trainer.py.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..catalog.arch import ModelShape
from . import constants
from .activations import (
    attention_working,
    backward_end,
    backward_working,
    block_input,
    kept_before,
    loss_bytes,
    mlp_saved,
    offloaded_input,
    saved_at_once,
    saved_in_backward,
)
from .constants import CONTEXT_GIB, NCCL_GIB, PROCESS_HOST_GIB
from .setup import BYTES, Setup
from .weights import (
    EMBEDDING,
    all_trained,
    average_gathered,
    average_trained,
    cast_head_bytes,
    embedding_weights,
    gathered,
    head_bytes,
    linear_weights,
    most_trained,
    optimizer_bytes,
    resident_bytes,
    root_weights,
    trained_bytes,
    trained_on_host,
    widest_block,
)

GIB = 2**30
BUCKET_BYTES = 128 * 2**20  # gradients reduced together under ddp (sharding/fsdp.py)
PIECE_BYTES = 2**27  # rows of the embedding that travel at a time (vocabulary.py)
CUBLAS_WORKSPACE = 2 * 32 * 2**20  # torch's default on Hopper, for the forward and backward thread

PARTS = ("linears", "absmax", "embedding", "head", "norms", "adapters", "optimizer", "gradients",
         "activations", "working", "unsharded", "loss", "workspace")
NOT_ALLOCATED = ("slack", "context")
EXPLAINED = dict(
    linears="linear weights of the blocks", absmax="scales of 4-bit weights",
    embedding="input embedding", head="output head", norms="norms and biases",
    adapters="adapters", optimizer="optimizer states", gradients="gradients of trained weights",
    activations="saved for the backward", working="in use inside one block",
    unsharded="gathered by FSDP", loss="logits and their gradients", workspace="cuBLAS",
    slack="reserved by the allocator, unused", context="CUDA context and NCCL")


@dataclass(frozen=True)
class Memory:
    """GiB per GPU at the peak of a step, by part, and GiB of host memory per machine."""
    parts: dict[str, float]
    moment: str                        # when the peak is
    moments: dict[str, float]          # allocated GiB at each moment
    host_parts: dict[str, float] = field(default_factory=dict)

    @property
    def peak_allocated(self) -> float:
        """As torch.cuda.max_memory_allocated, in GiB."""
        return sum(v for k, v in self.parts.items() if k not in NOT_ALLOCATED)

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
        lines += [f"{'total':<12} {self.total:8.2f} GiB  per GPU; {self.peak_allocated:.2f} "
                  f"allocated, peak at: {self.moment}",
                  f"{'host':<12} {self.host:8.2f} GiB  per machine"]
        return "\n".join(lines)


def memory(shape: ModelShape, setup: Setup | None = None, **changes) -> Memory:
    """The peak memory of one training step after the first, with its parts.

    `changes` are fields of `Setup`: `memory(shape, world_size=2, batch_size=4)`. Raises ValueError
    for an unknown target module or a number out of range.
    """
    setup = replace(setup or Setup(), **changes)
    static = static_parts(shape, setup)
    found = {name: static | parts for name, parts in moments(shape, setup).items()}
    totals = {name: sum(parts.values()) for name, parts in found.items()}
    moment = max(totals, key=totals.__getitem__)
    parts = {name: found[moment].get(name, 0.0) for name in PARTS}
    parts["slack"] = slack_bytes(shape, setup, found)
    parts["context"] = GIB * (CONTEXT_GIB + (NCCL_GIB if setup.world_size > 1 else 0))
    return Memory({name: b / GIB for name, b in parts.items()}, moment,
                  {name: b / GIB for name, b in totals.items()}, host_memory(shape, setup))


def slack_bytes(shape: ModelShape, setup: Setup, found: dict[str, dict[str, float]]) -> float:
    """What torch has reserved and does not use at the peak: pieces of what came and went.

    In proportion to the most that comes and goes at once: not units that stay gathered. Products in
    fp8 make copies of tokens and weights besides, never at the peak itself.
    """
    if setup.sharded and not setup.resharded:
        found = moments(shape, replace(setup, gather_once=False, strategy=setup.strategy.replace(
            "shard_grad_op", "full_shard")))
    widest = max(sum(parts.get(name, 0.0) for name in ("working", "unsharded", "loss"))
                 for parts in found.values())
    if setup.compute_dtype == "fp8":
        widest += 2 * shape.intermediate * (setup.tokens + shape.hidden)
    return constants.SLACK_SHARE * widest + constants.SLACK_GIB * GIB


def static_parts(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Bytes that stay on the GPU through the whole step."""
    states = 0.0 if trained_on_host(shape, setup) else optimizer_bytes(shape, setup)
    return dict(workspace=CUBLAS_WORKSPACE, optimizer=states) | resident_bytes(shape, setup)


def moments(shape: ModelShape, setup: Setup) -> dict[str, dict[str, float]]:
    """Bytes of what comes and goes, at each moment that can be the peak.

    Among blocks of one policy everything changes evenly, so the ends of each run are enough.
    """
    n, d, a = setup.tokens, shape.hidden, BYTES[setup.precision]
    last = shape.layers - 1
    window = forward_window(shape, setup)
    held = held_gradients(shape, setup)
    after_blocks = kept_before(shape, setup, shape.layers)
    # The final norm is never compiled: its input in fp32 and its output, then the loss's gradient.
    found = {
        "embedding": dict(unsharded=embedding_window(shape, setup), gradients=held,
                          working=n * d * a + 2 * PIECE_BYTES * setup.by_rows),
        "last block gathered": dict(
            activations=kept_before(shape, setup, last) + block_input(shape, setup),
            unsharded=gather_window(shape, setup), gradients=held),
        "loss": dict(activations=after_blocks + n * d * (4 + a), loss=loss_bytes(shape, setup)
                     + n * d * a, unsharded=window + head_bytes(shape, setup), gradients=held,
                     working=cast_head_bytes(shape, setup)),
        # Its backward in fp32: the input and, in that of its square, five tensors of its size.
        "final norm": dict(activations=after_blocks + n * d * 4, working=5 * n * d * 4,
                           unsharded=window, gradients=held + root_gradient(shape, setup))}
    for name, block in block_moments(setup.policies(shape)).items():
        found[name] = in_block_backward(shape, setup, block)
    grads = all_gradients(shape, setup)
    bucket = min(grads, BUCKET_BYTES) if setup.world_size > 1 and not setup.sharded else 0.0
    found["gradients reduced"] = dict(gradients=grads + bucket)
    return found


def block_moments(policies: list[str]) -> dict[str, int]:
    """The blocks, from 0, in whose backward the peak can be: first, last and where policies change.

    The last block is apart: no gradients wait to be reduced yet.
    """
    last = len(policies) - 1
    found = {"last block": last, "block before it": last - 1, "first block": 0}
    for i in range(last):
        if policies[i] != policies[i + 1]: found |= {f"block {i + 1}": i, f"block {i + 2}": i + 1}
    return {name: block for name, block in found.items() if block >= 0}


def in_block_backward(shape: ModelShape, setup: Setup, block: int) -> dict[str, float]:
    """What is alive at the widest place of one block's backward."""
    before = kept_before(shape, setup, block)
    policy = setup.policies(shape)[block]
    own = saved_in_backward(shape, setup, policy)
    # The input of the block before comes back meanwhile; the last block's never left.
    if 0 < block < shape.layers - 1: before += offloaded_input(shape, setup)
    saved, work = before + own, backward_working(shape, setup, policy)
    others = [(saved - saved_at_once(shape, setup, policy), backward_end(shape, setup))]
    if setup.tiles(policy) > 1:
        without_mlp = saved - mlp_saved(shape, setup) / setup.tiles(policy)
        others.append((without_mlp, attention_working(shape, setup)))
    saved, work = max((saved, work), *others, key=sum)
    return dict(activations=saved, working=work, unsharded=backward_window(shape, setup, block),
                gradients=gradients_at(shape, setup, block))


def unit_bytes(shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Gathered bytes of the unit whose backward comes first in a block, and of the one after it.

    A block is one unit, or its MLP and its attention are two. `min_params` is taken as `block`.
    """
    if setup.wrap_policy == "attention_mlp":
        return (gathered(linear_weights(shape, setup, "mlp"), setup),
                gathered(linear_weights(shape, setup, "attention"), setup))
    block = gathered(widest_block(shape, setup), setup)
    return block, block


def embedding_window(shape: ModelShape, setup: Setup) -> float:
    """Gathered bytes at the start of a forward, where the root and then the embedding are gathered.

    FSDP2's copy out of the embedding's flat buffer keeps the root's alive until it returns, by a
    local name (`prev_all_gather_state` in `FSDPParamGroup.wait_for_unshard`).
    """
    embedding, root = (gathered(w(shape, setup), setup) for w in (embedding_weights, root_weights))
    if setup.shard_ranks == 1: return root + embedding  # copied without a flat buffer
    return 2 * root + 2 * embedding


def gather_window(shape: ModelShape, setup: Setup) -> float:
    """Gathered bytes while the last unit of the last block is copied out of its flat buffer.

    The root's weights, both flat buffers as in `embedding_window`, and the unit; without resharding
    all blocks and the embedding.
    """
    if not setup.sharded: return 0.0
    root = gathered(root_weights(shape, setup), setup)
    unit, before = unit_bytes(shape, setup)
    flat = unit + before if setup.shard_ranks > 1 else 0.0
    if setup.resharded: return root + flat + unit
    return (root + flat + gathered(embedding_weights(shape, setup), setup)
            + shape.layers * average_gathered(shape, setup))


def forward_window(shape: ModelShape, setup: Setup) -> float:
    """Gathered bytes while the loss is computed, inside the root's forward.

    The root's weights; the flat buffer of the last unit's all-gather, which FSDP2 frees at the next
    one; and without resharding, every block and the embedding.
    """
    if not setup.sharded: return 0.0
    root = gathered(root_weights(shape, setup), setup)
    flat = unit_bytes(shape, setup)[0] if setup.shard_ranks > 1 else 0.0
    if setup.resharded: return root + flat
    return (root + flat + gathered(embedding_weights(shape, setup), setup)
            + shape.layers * average_gathered(shape, setup))


def backward_window(shape: ModelShape, setup: Setup, block: int) -> float:
    """Gathered bytes in a block's backward.

    Its unit, and the flat buffer of the next, gathered ahead. The unit before the first block is
    the embedding, which is gathered only if it is trained (sharding/fsdp.py stops it otherwise). Without
    resharding all blocks up to this one, and the embedding, whose hook waits for the end of the
    backward.
    """
    if not setup.sharded: return 0.0
    root = gathered(root_weights(shape, setup), setup)
    embedding = gathered(embedding_weights(shape, setup), setup)
    if not setup.resharded:
        # Of all micro-batches but the last, --gather_once frees nothing.
        whole = shape.layers if setup.gather_once and setup.accumulation > 1 else block + 1
        return root + embedding + whole * average_gathered(shape, setup)
    unit, ahead = unit_bytes(shape, setup)
    if block == 0 and setup.wrap_policy != "attention_mlp":
        ahead = embedding if setup.trains(EMBEDDING) else 0.0
    if not setup.backward_prefetch or setup.shard_ranks == 1: ahead = 0.0
    if setup.shard_ranks == 1 and block: ahead = streamed_block(shape, setup)
    return root + unit + ahead


def streamed_block(shape: ModelShape, setup: Setup) -> float:
    """Frozen bytes of a block, which one GPU fetches ahead (../memory/streaming.py)."""
    block = widest_block(shape, setup)
    return gathered(block, setup) - trained_bytes(block, 1, setup)


def all_gradients(shape: ModelShape, setup: Setup) -> float:
    """Gradients of one rank after the backward; the host has them if they are offloaded."""
    if setup.sharded and setup.no_sync and setup.accumulation > 1:  # whole, in the reduce dtype
        return all_trained(shape, setup, 1, "fp32")
    return 0.0 if trained_on_host(shape, setup) else all_trained(shape, setup, setup.shard_ranks)


def held_gradients(shape: ModelShape, setup: Setup) -> float:
    """Gradients of earlier micro-batches, which wait through a forward."""
    return all_gradients(shape, setup) if setup.accumulation > 1 else 0.0


def root_gradient(shape: ModelShape, setup: Setup) -> float:
    """The root's own gradients, whole until the backward ends."""
    return trained_bytes(root_weights(shape, setup), 1, setup)


def gradients_at(shape: ModelShape, setup: Setup, block: int) -> float:
    """Gradients alive when the backward has come to `block`.

    Those of the blocks after it, reduced; the fp32 input of the last reduce-scatter, which FSDP2
    keeps until the next; and the root's.
    """
    later = shape.layers - 1 - block
    grads = held_gradients(shape, setup)
    if setup.accumulation == 1 and not trained_on_host(shape, setup):
        grads += later * average_trained(shape, setup, setup.shard_ranks)
    if setup.sharded and later: grads += most_trained(shape, setup, "fp32")
    return grads + root_gradient(shape, setup)


def host_memory(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """GiB of host memory of one machine by part: its ranks, and what offload puts there.

    One page-locked region per rank and use (hostmem.py), so nothing is rounded up.
    """
    ranks = setup.node_gpus
    found = dict(weights=sum(resident_bytes(shape, setup, host=True).values()))
    if setup.changes_base:  # what adapters began as is kept to the end (../adapters/initial.py)
        found["first values"] = all_trained(shape, setup, setup.shard_ranks)
    if setup.activation_offload:  # a slot for every block but the last
        found["activations"] = (shape.layers - 1) * offloaded_input(shape, setup)
    if trained_on_host(shape, setup):
        found |= dict(gradients=all_trained(shape, setup, setup.shard_ranks),
                      optimizer=optimizer_bytes(shape, setup))
    return dict(processes=PROCESS_HOST_GIB * ranks) | {
        name: ranks * b / GIB for name, b in found.items() if b}
