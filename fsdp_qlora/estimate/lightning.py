"""What lightning attention (arXiv:2401.04658) takes in transformers' code, for which there are no kernels.

It goes over a row chunk by chunk and stays out of torch.compile (model/row_mixers.py). In the backward each
chunk's gradient of q, k and v is written into zeros as long as the row, and these are added up.

Letters: C tokens of a chunk, H heads of size P, W values of all heads.
"""

from __future__ import annotations

from ..catalog.blocks import Mixer
from ..catalog.gpu import Gpu
from ..plan import Plan
from . import constants


def _chunks(net: Mixer, plan: Plan) -> float:
    """Chunks of a row."""
    return -(-plan.batch.context_length // net.chunk)


def _has_rows(plan: Plan) -> bool:
    """Whether there are several rows, whose chunks lie apart and are copied for products."""
    return plan.batch.micro_batch_size > 1


def _width(net: Mixer) -> int:
    return dict(net.linears)["out_proj"][1]


def saved_bytes(net: Mixer, plan: Plan) -> float:
    """Bytes that the mixer's forward saves for its backward.

    q, k and v before and after their activation, q and k times their decays, though not the first chunk's
    q, which meets no state; a chunk's scores and its state; in fp32 what goes into the norm; both sides of
    the gate. Of several rows, v once more.
    """
    width, chunks = _width(net), _chunks(net, plan)
    values = (10 + _has_rows(plan) - 1 / chunks) * width + net.state_heads * net.chunk
    tokens, a = plan.batch.tokens, plan.model.product_bytes
    states = plan.batch.micro_batch_size * chunks * net.state
    return tokens * (a * values + 4 * width) + a * states


def held_bytes(net: Mixer, plan: Plan) -> float:
    """Bytes that its backward holds beside these."""
    return constants.LIGHTNING_HELD * plan.batch.tokens * _width(net) * plan.model.product_bytes


def moved_bytes(net: Mixer, plan: Plan) -> tuple[float, float]:
    """Bytes that a forward and a backward read and write in a GPU's memory."""
    width, chunks = _width(net), _chunks(net, plan)
    sizes = (net.state_heads * net.chunk, width, net.state / net.chunk, chunks * width)
    counted = zip(
        (constants.LIGHTNING_FORWARD, constants.LIGHTNING_BACKWARD),
        constants.LIGHTNING_COPIES,
        strict=True,
    )
    forward, backward = (
        sum(n * size for n, size in zip(counts, sizes, strict=True))
        + copies * width * _has_rows(plan)
        for counts, copies in counted
    )
    each = plan.batch.tokens * plan.model.product_bytes
    return each * forward, each * backward


def seconds(net: Mixer, plan: Plan, gpu: Gpu) -> tuple[float, float]:
    """Seconds of a GPU for one block's mixer, forward and backward; its products take little beside."""
    copies = gpu.reached_bandwidth_gb_s * 1e9 * constants.COPY_SHARE
    forward, backward = moved_bytes(net, plan)
    return forward / copies, backward / copies


def launches(net: Mixer, plan: Plan) -> tuple[float, float]:
    """Operations that the host launches for it, forward and backward."""
    once, of_chunk = zip(*constants.LIGHTNING_LAUNCHES, strict=True)
    more, chunks = constants.LIGHTNING_COPY_LAUNCHES, _chunks(net, plan)
    forward, backward = (
        n + (each + copies * _has_rows(plan)) * chunks
        for n, each, copies in zip(once, of_chunk, more, strict=True)
    )
    return forward, backward
