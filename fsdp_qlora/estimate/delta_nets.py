"""What delta nets take on plain torch, where they have no kernels (model/delta_rule.py).

Heads are of size D, chunks of C tokens. Counts are traced; what a GPU reaches of them is set on one row.
"""

from __future__ import annotations

from ..catalog.blocks import Mixer
from ..catalog.gpu import Gpu
from ..plan import Plan
from . import constants


def saved_bytes(net: Mixer, plan: Plan) -> float:
    """Bytes that the mixer's forward saves for its backward.

    What goes into its convolution and comes out, copies of queries, keys and values, decays by channel in
    fp32 and, eager, three values of the gated norm.
    """
    a, given = plan.model.product_bytes, net.linears[-1][1][1]
    taken = sum(out for _, (out, _) in net.linears[:-1])
    of_norm = 0 if plan.loop.compile else 12 - a
    values = 2 * a * taken + given * (3 * a + of_norm + 4 * net.decays_by_channel)
    return plan.batch.tokens * values


def held_bytes(net: Mixer, plan: Plan) -> float:
    """Bytes that its backward holds beside these: all steps of its chunks in fp32."""
    return bytes_of_rule(net, plan, constants.TORCH_RULE_HELD)


def bytes_of_rule(net: Mixer, plan: Plan, counted: tuple[float, ...]) -> float:
    """Bytes of all tokens and heads of a delta net, by counts of constants.py."""
    rows, values, channels, states = counted
    state, chunk = _of_head(net), constants.STATE_CHUNK
    values += channels * net.decays_by_channel
    each = rows * chunk + values * state**0.5 + states * state / chunk
    return 4 * plan.batch.tokens * net.state_heads * each


def seconds(net: Mixer, plan: Plan, gpu: Gpu) -> tuple[float, float]:
    """Seconds of a GPU for the rule in one block: forward, and backward, which makes the chunks again.

    Products of chunks read more than they compute on tensor cores, so that their bytes count. In the loop
    over chunks they are in fp32, one after the other; in fp32 all are.
    """
    copies = gpu.reached_bandwidth_gb_s * 1e9 * constants.COPY_SHARE
    forward, backward = (
        bytes_of_rule(net, plan, moved) / copies
        for moved in (constants.TORCH_RULE_FORWARD, constants.TORCH_RULE_BACKWARD)
    )
    loop, products = _loop_seconds(net, plan, gpu), _product_seconds(net, plan, gpu)
    forward, backward = forward + loop + products, backward + 2 * loop + 3 * products
    return forward / constants.TORCH_RULE_SHARE, backward / constants.TORCH_RULE_SHARE


def _loop_seconds(net: Mixer, plan: Plan, gpu: Gpu) -> float:
    """One pass over the chunks of all rows: a product D x D x D for each head, chunk after chunk."""
    step = 2 * plan.batch.micro_batch_size * net.state * _of_head(net) ** 0.5
    return _steps(plan) * max(step / fp32_rate(gpu), constants.TORCH_STEP_SECONDS)


def _product_seconds(net: Mixer, plan: Plan, gpu: Gpu) -> float:
    """The other products of a forward, where tensor cores take none: in fp32."""
    if plan.model.product_bytes < 4:
        return 0.0
    each = 10 * constants.STATE_CHUNK * _of_head(net) ** 0.5 + 8 * _of_head(net)
    return plan.batch.tokens * net.state_heads * each / fp32_rate(gpu)


def launches(net: Mixer, plan: Plan) -> tuple[float, float]:
    """Operations that the host launches for the rule in a block's forward, and in its backward."""
    forward, backward = constants.TORCH_RULE_LAUNCHES[net.decays_by_channel]
    return forward + _steps(plan), backward + 2 * _steps(plan)


def _of_head(net: Mixer) -> float:
    """Values of a head's state."""
    return net.state / net.state_heads


def _steps(plan: Plan) -> float:
    """Chunks of a row."""
    return plan.batch.context_length / constants.STATE_CHUNK


def fp32_rate(gpu: Gpu) -> float:
    """FLOP/s of products without tensor cores."""
    return gpu.reached_tflops * 1e12 * constants.FP32_RATE * constants.MATMUL_SHARE
