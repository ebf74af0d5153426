"""What fp8 products keep of frozen weights, beside their 4 bits (quantization/fp8_weight_cache.py)."""

from __future__ import annotations

from collections.abc import Iterable

from ..plan import Plan
from .stored_weight import BLOCKSIZE, Weight

_FP8_MULTIPLE = 16  # of rows, and of an adapter's columns in fp8 (../quantization/fp8.py)
_JOINED_RANKS = (
    64  # of layers of one input whose fp8 products are joined (../adapters/shared_inputs.py)
)
FEEDS = dict(
    q_proj="qkv", k_proj="qkv", v_proj="qkv", gate_proj="mlp", up_proj="mlp"
)  # share an input


def kept_in_fp8(
    linears: dict[str, tuple[int, int]], targets: Iterable[str], plan: Plan
) -> list[Weight]:
    """What fp8 products keep of a block's weights (quantization/fp8_weight_cache.py).

    The scales of rows, and if asked, W for the forward, W^T for the backward, and the columns of
    adapters, which layers of one input have together where they are joined.
    """
    kept = {name: size for name, size in linears.items() if is_kept(name, *size, plan)}
    ranks = {name: plan.adapter.rank(name) for name in kept if name in targets}
    weights = [row_scales(out, name in ranks) for name, (out, _) in kept.items()]
    if not plan.quantization.keep_fp8_weights:
        return weights
    weights += [
        Weight("fp8", out, 2 * wide + _fp8_columns(forward_ranks(name, ranks, plan)), 0, False)
        for name, (out, wide) in kept.items()
    ]
    groups: dict[str, tuple[int, int]] = {}  # ranks and inputs of what shares W^T's columns
    for name, rank in ranks.items():
        if plan.adapter.lora_dropout:
            continue
        group = FEEDS.get(name, name) if plan.loop.compile else name
        groups[group] = groups.get(group, (0, 0))[0] + rank, kept[name][1]
    return weights + [
        Weight("fp8", wide, _fp8_columns(rank), 0, False) for rank, wide in groups.values()
    ]


def is_kept(name: str, out: int, wide: int, plan: Plan) -> bool:
    """Whether anything is kept of a layer's weight: one that is frozen, and multiplied in fp8."""
    fits = wide % BLOCKSIZE == out % _FP8_MULTIPLE == 0
    return fits and not plan.adapter.trains(name)


def row_scales(rows: int, adapted: bool) -> Weight:
    """A weight's scales, which are others in a product that an adapter joins."""
    return Weight("fp8", rows, 4 * (1 + adapted), 0, False)


def forward_ranks(name: str, ranks: dict[str, int], plan: Plan) -> int:
    """The ranks that a layer's fp8 product has columns of: its own, or those of all of its input."""
    if name not in ranks:
        return 0
    group = FEEDS.get(name, name)
    together = sum(rank for other, rank in ranks.items() if FEEDS.get(other, other) == group)
    return together if plan.loop.compile and together <= _JOINED_RANKS else ranks[name]


def _fp8_columns(rank: int) -> int:
    """The columns that adapters of this rank together take in an fp8 product."""
    return -(-rank // _FP8_MULTIPLE) * _FP8_MULTIPLE
