"""What a block's mixer with a state takes where it runs on plain torch: by its rule, one module each."""

from __future__ import annotations

from types import ModuleType

from ..catalog.arch import ModelShape
from ..catalog.blocks import Mixer
from ..catalog.gpu import Gpu
from ..plan import Plan
from . import delta_nets, lightning, mamba2
from .kinds import mean_of_blocks

_RULES: dict[str, ModuleType] = dict(delta=delta_nets, mamba2=mamba2, lightning=lightning)


def on_plain_torch(shape: ModelShape, plan: Plan) -> Mixer | None:
    """The mixer of a block, where it has a state and no kernels for it."""
    has_one = shape.block and shape.block.mixer.rule and not plan.model.state_kernels
    return shape.block.mixer if shape.block and has_one else None


def mixer_saved(shape: ModelShape, plan: Plan) -> float | None:
    """Bytes that it saves for its backward; None of other mixers."""
    net = on_plain_torch(shape, plan)
    return None if net is None else _RULES[net.rule].saved_bytes(net, plan)


def mixer_held(shape: ModelShape, plan: Plan) -> float:
    """Bytes that its backward holds beside these."""
    net = on_plain_torch(shape, plan)
    return 0.0 if net is None else _RULES[net.rule].held_bytes(net, plan)


@mean_of_blocks
def mixer_seconds(shape: ModelShape, plan: Plan, gpu: Gpu) -> tuple[float, float]:
    """Seconds of a GPU for it in one block, forward and backward; those of kernels count as passes."""
    net = on_plain_torch(shape, plan)
    return (0.0, 0.0) if net is None else _RULES[net.rule].seconds(net, plan, gpu)


def mixer_launches(shape: ModelShape, plan: Plan) -> tuple[float, float]:
    """Operations that the host launches for it in a block's forward, and in its backward."""
    net = on_plain_torch(shape, plan)
    return (0.0, 0.0) if net is None else _RULES[net.rule].launches(net, plan)
