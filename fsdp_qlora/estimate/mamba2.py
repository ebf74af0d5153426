"""What Mamba 2 takes on plain torch, where it has no kernels (model/state_space_scan.py).

The op goes over parts of the heads, all tokens at once, in chunks of C tokens, and each part makes its
group's keys and scores anew. Counts are traced; what a GPU reaches of them is not measured.

Letters: N values of a state for each of a head's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..catalog.blocks import Mixer
from ..catalog.gpu import Gpu
from ..plan import Plan
from . import constants
from .delta_nets import fp32_rate


@dataclass(frozen=True)
class _Sizes:
    """Of a mixer, and of a micro-batch in chunks, the last of a row filled up."""

    heads: int
    width: int  # values of all heads
    state: int  # N
    groups: int
    projected: int  # values that in_proj gives
    convolved: int
    chunk: float
    chunks: float  # of a row
    rows: float
    heads_at_once: int  # in all groups of a part

    @property
    def tokens(self) -> float:
        return self.rows * self.chunks * self.chunk

    @property
    def heads_of_group(self) -> int:
        return min(self.heads // self.groups, self.heads_at_once)  # in a part

    @property
    def parts(self) -> int:
        of_group = self.heads // self.groups
        if self.heads_at_once < of_group:
            return self.groups * -(-of_group // self.heads_at_once)
        return -(-self.groups // (self.heads_at_once // of_group))

    def values(self, counted: tuple[float, ...]) -> float:
        """Per token and head, by counts of constants.py."""
        of_head, shared = self.width / self.heads, self.heads_of_group
        sizes = (
            self.chunk,
            of_head,
            of_head * self.state / self.chunk,
            self.state / shared,
        )
        return sum(count * size for count, size in zip(counted, sizes, strict=True))


def _sizes(net: Mixer, plan: Plan) -> _Sizes:
    linears, length = dict(net.linears), plan.batch.context_length
    width, projected = linears["out_proj"][1], linears["in_proj"][0]
    convolved, state = projected - width - net.state_heads, net.state // width
    chunk, rows = min(constants.SCAN_CHUNK, length), plan.batch.micro_batch_size
    return _Sizes(
        heads=net.state_heads,
        width=width,
        state=state,
        groups=(convolved - width) // (2 * state),
        projected=projected,
        convolved=convolved,
        chunk=chunk,
        chunks=-(-length // chunk),
        rows=rows,
        heads_at_once=max(int(constants.SCAN_PART // (rows * length)), 1),
    )


def saved_bytes(net: Mixer, plan: Plan) -> float:
    """Bytes that the mixer's forward saves for its backward.

    What in_proj gave, the convolution, copies of values, keys, queries and dt for the op, and what it gave;
    eager, the gated norm's in fp32, or the gate's.
    """
    s, a = _sizes(net, plan), plan.model.product_bytes
    if plan.loop.compile and not plan.model.rows_apart:
        of_norm = a * s.width
    else:
        of_norm = (16 if "norm" in dict(net.beside) else 2 * a) * s.width
    values = a * (s.projected + 2 * s.convolved + s.heads)
    return plan.batch.tokens * (values + of_norm)


def held_bytes(net: Mixer, plan: Plan) -> float:
    """Bytes that its backward holds beside these: gradients, and a part's chunks in fp32."""
    s, a = _sizes(net, plan), plan.model.product_bytes
    at_once = min(s.heads_at_once, s.heads)
    if at_once > s.heads_of_group:
        at_once -= at_once % s.heads_of_group
    keys = s.convolved - s.width
    gradients = plan.batch.tokens * (a * (s.width + s.heads) + (4 + a) * keys)
    return gradients + 4 * s.tokens * at_once * s.values(constants.SCAN_HELD)


def moved_bytes(net: Mixer, plan: Plan) -> tuple[float, float]:
    """Bytes that the op reads and writes in a GPU's memory, in a forward and in a backward."""
    s = _sizes(net, plan)
    values = 4 * s.tokens * s.heads
    return (
        values * s.values(constants.SCAN_FORWARD),
        values * s.values(constants.SCAN_BACKWARD),
    )


def seconds(net: Mixer, plan: Plan, gpu: Gpu) -> tuple[float, float]:
    """Seconds of a GPU for the op in one block: forward, and backward, which makes the chunks again.

    Its products read more than they compute on tensor cores, so that their bytes count; in fp32 both do.
    """
    copies = gpu.reached_bandwidth_gb_s * 1e9 * constants.COPY_SHARE
    forward, backward = (moved / copies for moved in moved_bytes(net, plan))
    products = 0.0 if plan.model.product_bytes < 4 else product_flops(net, plan) / fp32_rate(gpu)
    return forward + products, backward + 3 * products


def product_flops(net: Mixer, plan: Plan) -> float:
    """FLOPs of a forward's products: scores, what they give, states, and what is read of these."""
    s = _sizes(net, plan)
    of_head = s.width / s.heads
    each = s.chunk * s.state / s.heads_of_group + s.chunk * of_head + 2 * s.state * of_head
    return 2 * s.tokens * s.heads * each


def launches(net: Mixer, plan: Plan) -> tuple[float, float]:
    """Operations that the host launches for the op in a block's forward, and in its backward."""
    s = _sizes(net, plan)
    forward, backward = constants.SCAN_LAUNCHES
    return s.parts * (forward + s.chunks), s.parts * (backward + 2 * s.chunks)
