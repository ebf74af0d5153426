"""What delta nets take on plain torch, as it is counted, against what the op does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fsdp_qlora.catalog.arch import ModelShape
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.shapes import shape_from_config
from fsdp_qlora.estimate import constants, step_seconds
from fsdp_qlora.estimate.compute import launch_seconds
from fsdp_qlora.estimate.delta_nets import bytes_of_rule
from fsdp_qlora.estimate.mixers import mixer_launches, mixer_seconds
from fsdp_qlora.model.delta_rule import delta_rule, delta_rule_backward
from fsdp_qlora.plan import Plan

from .families import family_config

TOKENS, HEADS = 1024, 2
_NO_LAUNCH = (
    "view", "_unsafe_view", "select", "slice", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze",
    "detach", "alias", "split", "unbind", "diagonal", "empty", "new_empty", "empty_like",
)  # fmt: skip


class Moved(TorchDispatchMode):
    """Operations that work on values, and the bytes that they read and write."""

    def __init__(self):
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **kwargs or {})
        name = op._schema.name.removeprefix("aten::")
        if name not in _NO_LAUNCH:
            makes = name in ("zeros", "ones", "eye", "fill_", "new_full", "new_zeros")
            given = () if makes else (args, {k: v for k, v in (kwargs or {}).items() if k != "out"})
            self.launches += 1
            self.bytes += sum(bytes_of(x) for x in tree_flatten((given, made))[0])
        return made


def bytes_of(x) -> int:
    """Bytes of a tensor without what is expanded."""
    if not isinstance(x, Tensor):
        return 0
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return torch.Size(sizes).numel() * x.element_size()


def shape_of(size: int, by_channel: bool) -> ModelShape:
    """One block's, with a delta net of two heads of this size."""
    many = dict(num_hidden_layers=1, layer_types=["linear_attention"])
    if by_channel:
        config = family_config("Kimi Linear", linear_num_heads=HEADS, linear_head_dim=size, **many)
    else:
        heads = dict(linear_num_key_heads=HEADS, linear_num_value_heads=HEADS)
        sizes = dict(linear_key_head_dim=size, linear_value_head_dim=size)
        config = family_config("Qwen3.5", **many, **heads, **sizes)
    return shape_from_config(config.to_dict()).kinds[0]


PLAN = Plan().change(micro_batch_size=1, context_length=TOKENS, state_kernels=False)


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("by_channel", [False, True])
def test_the_op_launches_and_moves_what_is_counted(size, by_channel):
    channels = [size] if by_channel else []
    *given, d_out = (torch.randn(TOKENS, HEADS, size, dtype=torch.bfloat16) for _ in range(4))
    given += [-torch.rand(TOKENS, HEADS, *channels), torch.rand(TOKENS, HEADS).bfloat16()]
    with Moved() as forward:
        delta_rule._init_fn(*given, 1, False)
    with Moved() as backward:
        delta_rule_backward._init_fn(d_out, *given, 1, False)
    shape = shape_of(size, by_channel)
    moved = constants.TORCH_RULE_FORWARD, constants.TORCH_RULE_BACKWARD
    for done, counted, launches in zip(
        (forward, backward), moved, mixer_launches(shape, PLAN), strict=True
    ):
        assert launches == pytest.approx(done.launches, abs=2)
        assert bytes_of_rule(shape.block.mixer, PLAN, counted) == pytest.approx(
            done.bytes, rel=0.05
        )


def test_without_a_delta_net_or_with_kernels_for_it_nothing_is_counted():
    shape, kernels = shape_of(64, False), PLAN.change(state_kernels=True)
    attention = shape_from_config(family_config("Qwen3").to_dict())
    for net, plan in ((shape, kernels), (attention, PLAN)):
        assert mixer_seconds(net, plan, find_gpu("H200")) == mixer_launches(net, plan) == (0, 0)


def test_rows_that_are_twice_as_long_or_run_again_take_longer_by_what_is_counted():
    shape, gpu = shape_of(128, False), find_gpu("H200")
    once = mixer_seconds(shape, PLAN, gpu)
    twice = mixer_seconds(shape, PLAN.change(context_length=2 * TOKENS), gpu)
    assert twice == pytest.approx([2 * x for x in once])
    # One row more shares the loop's steps, which few heads do not fill.
    assert mixer_seconds(shape, PLAN.change(micro_batch_size=2), gpu) < twice
    forward, backward = mixer_launches(shape, PLAN)
    kept, again = (
        PLAN.change(activation_policy=policy) for policy in ("keep_all", "recompute_all")
    )
    for plan, launches in ((kept, forward + backward), (again, 2 * forward + backward)):
        with_kernels = plan.change(state_kernels=True)
        more = launch_seconds(shape, plan) - launch_seconds(shape, with_kernels)
        assert more == pytest.approx(shape.layers * launches * constants.TORCH_LAUNCH)
        busy = step_seconds(shape, gpu, plan).parts["mixers"]
        assert busy == pytest.approx(shape.layers * sum(once))
