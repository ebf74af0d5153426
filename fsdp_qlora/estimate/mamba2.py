"""What Mamba 2 takes on transformers' plain torch, where mamba-ssm's kernels are not installed.

`mamba2_chunk_scan` of transformers multiplies by sums over what has the axes of both sides, in fp32: scores
of a chunk are the sum of (C, C, H, S), what they give that of (C, C, H, W / H), states those of (C, W, S),
and what chunks hand on that of (chunks, chunks, W, S). Eager, each of these is there, and in its backward
twice. A compiled block sums while it multiplies, and keeps no copies of B and C for each head; counted is
what inductor leaves of it on a CPU, and its kernels on a GPU are taken to be the same.

Letters: C tokens of a chunk, H heads, W values of all heads, S values of the state for each of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..catalog.blocks import Mixer
from ..catalog.gpu import Gpu
from ..plan import Plan
from . import constants


@dataclass(frozen=True)
class _Sizes:
    """Of a mixer, and of a micro-batch in chunks, the last of a row filled up."""

    heads: int
    width: int  # W
    state: int  # of a value: S
    projected: int  # values that in_proj gives
    convolved: int
    chunk: int
    chunks: float  # of a row
    rows: float

    @property
    def tokens(self) -> float:
        return self.rows * self.chunks * self.chunk

    @property
    def products(self) -> tuple[float, ...]:
        """Values of what each sum is over."""
        states = self.width * self.state
        return (
            self.tokens * self.chunk * self.heads * self.state,
            self.tokens * self.chunk * self.width,
            self.tokens * states,  # into a chunk's state, and out of one
            self.tokens * states,
            self.rows * (self.chunks + 1) ** 2 * states,
        )


def _sizes(net: Mixer, plan: Plan) -> _Sizes:
    linears = dict(net.linears)
    width, projected = linears["out_proj"][1], linears["in_proj"][0]
    return _Sizes(
        heads=net.state_heads,
        width=width,
        state=net.state // width,
        projected=projected,
        convolved=projected - width - net.state_heads,
        chunk=net.chunk,
        chunks=-(-plan.batch.context_length // net.chunk),
        rows=plan.batch.micro_batch_size,
    )


def _is_compiled(plan: Plan) -> bool:
    return plan.loop.compile and not plan.model.rows_apart


def saved_bytes(net: Mixer, plan: Plan) -> float:
    """Bytes that the mixer's forward saves for its backward.

    In the compute dtype what in_proj gave, and the convolution; in fp32, for each token, decays and scores of
    a chunk, B and C for each head, values before and after their steps and what chunks hand on, and each
    chunk's state; then the gated norm's.
    """
    s, a = _sizes(net, plan), plan.model.product_bytes
    squares, states = s.heads * s.chunk, 4 * s.rows * s.width * s.state
    if _is_compiled(plan):
        values = a * (s.projected + 2 * s.convolved) + 4 * (2 * squares + 3 * s.width)
        return s.tokens * (values + 6 * s.heads) + states * (2 * s.chunks + 1)
    has_norm = "norm" in dict(net.beside)
    values = a * (s.projected + s.convolved) + 4 * (
        3 * s.heads * s.state + 3 * squares + 4 * s.width
    )
    values += (12 if has_norm else a) * s.width
    return s.tokens * (values + 16 * s.heads) + states * (2 * s.chunks + 2)


def held_bytes(net: Mixer, plan: Plan) -> float:
    """Bytes that its backward holds beside these: eager, the largest of what sums are over, twice.

    Compiled, gradients of a chunk's scores, or of B and C for each head.
    """
    s = _sizes(net, plan)
    if not _is_compiled(plan):
        return 4 * 2 * max(s.products)
    scores, heads = constants.SCAN_HELD
    return 4 * s.tokens * s.heads * max(scores * s.chunk, heads * s.state)


def moved_bytes(net: Mixer, plan: Plan) -> tuple[float, float]:
    """Bytes that a forward and a backward read and write in a GPU's memory."""
    s = _sizes(net, plan)
    if _is_compiled(plan):
        cached, saved = 4 * sum(s.products) / constants.CACHE_RATE, saved_bytes(net, plan)
        return 2 * cached + 2 * saved, 4 * cached + 3 * saved
    sizes = (
        s.heads * s.chunk,
        s.heads * s.state,
        s.width,
        s.width * s.state / s.chunk,
        s.convolved - s.width,
    )
    forward, backward = (
        sum(count * size for count, size in zip(counted, sizes, strict=True))
        for counted in (constants.SCAN_FORWARD, constants.SCAN_BACKWARD)
    )
    products = 2 * sum(s.products)
    return 4 * (products + s.tokens * forward), 4 * (2 * products + s.tokens * backward)


def seconds(net: Mixer, plan: Plan, gpu: Gpu) -> tuple[float, float]:
    """Seconds of a GPU for one block's mixer, forward and backward: its sums read more than they compute."""
    copies = gpu.reached_bandwidth_gb_s * 1e9 * constants.COPY_SHARE
    forward, backward = moved_bytes(net, plan)
    return forward / copies, backward / copies


def launches(net: Mixer, plan: Plan) -> tuple[float, float]:
    """Operations that the host launches for it, forward and backward."""
    return constants.SCAN_LAUNCHES[_is_compiled(plan)]
