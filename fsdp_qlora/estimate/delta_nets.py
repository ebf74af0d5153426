"""What delta nets take on plain torch, where they have no kernels (model/delta_rule.py).

Heads are of size D, chunks of C tokens. Counts are traced; what a GPU reaches of them is set on one row.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..catalog.blocks import Mixer
from ..catalog.gpu import Gpu
from ..plan import Plan
from . import constants
from .kinds import mean_of_blocks


def on_plain_torch(shape: ModelShape, plan: Plan) -> Mixer | None:
    """The delta net of a block, where it has one and no kernels for it."""
    has_one = shape.block and shape.block.mixer.is_delta_net and not plan.model.state_kernels
    return shape.block.mixer if shape.block and has_one else None


def bytes_of_rule(net: Mixer, plan: Plan, counted: tuple[float, ...]) -> float:
    """Bytes of all tokens and heads of a delta net, by counts of constants.py."""
    rows, values, channels, states = counted
    state, chunk = _of_head(net), constants.STATE_CHUNK
    values += channels * net.decays_by_channel
    each = rows * chunk + values * state**0.5 + states * state / chunk
    return 4 * plan.batch.tokens * net.state_heads * each


@mean_of_blocks
def rule_seconds(shape: ModelShape, plan: Plan, gpu: Gpu) -> tuple[float, float]:
    """Seconds of a GPU for the rule in one block: forward, and backward, which makes the chunks again.

    Products of chunks read more than they compute on tensor cores, so that their bytes count. In the loop
    over chunks they are in fp32, one after the other; in fp32 all are.
    """
    net = on_plain_torch(shape, plan)
    if net is None:
        return 0.0, 0.0
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
    return _steps(plan) * max(step / _fp32_rate(gpu), constants.TORCH_STEP_SECONDS)


def _product_seconds(net: Mixer, plan: Plan, gpu: Gpu) -> float:
    """The other products of a forward, where tensor cores take none: in fp32."""
    if plan.model.product_bytes < 4:
        return 0.0
    each = 10 * constants.STATE_CHUNK * _of_head(net) ** 0.5 + 8 * _of_head(net)
    return plan.batch.tokens * net.state_heads * each / _fp32_rate(gpu)


def rule_launches(shape: ModelShape, plan: Plan) -> tuple[float, float]:
    """Operations that the host launches for the rule in a block's forward, and in its backward."""
    net = on_plain_torch(shape, plan)
    if net is None:
        return 0.0, 0.0
    forward, backward = constants.TORCH_RULE_LAUNCHES[net.decays_by_channel]
    return forward + _steps(plan), backward + 2 * _steps(plan)


def _of_head(net: Mixer) -> float:
    """Values of a head's state."""
    return net.state / net.state_heads


def _steps(plan: Plan) -> float:
    """Chunks of a row."""
    return plan.batch.context_length / constants.STATE_CHUNK


def _fp32_rate(gpu: Gpu) -> float:
    """FLOP/s of products without tensor cores."""
    return gpu.reached_tflops * 1e12 * constants.FP32_RATE * constants.MATMUL_SHARE
