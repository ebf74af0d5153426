"""Bytes that a step moves through a GPU's memory besides the operands of its large products.

Counted by pass over a tensor, in the compute dtype, as the kernels make them: norms, rotation and
gates; products of rank R, which read far more than they compute; weights unpacked for a product;
tokens quantized for one in fp8.

Letters: N tokens, I inputs, O outputs and R rank of an adapted layer.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..choices import FORMATS, POLICIES
from ..plan import Plan
from . import constants, experts
from .flops import adapted_linears, rerun_linears
from .fp8_weights import FEEDS, forward_ranks
from .kinds import mean_of_blocks
from .magnitudes import second_products, turned_linears
from .stored_weight import BLOCKSIZE, packed_bits, scale_bytes

_MERGED_RANK = (
    128  # the largest of adapters that are added while W is unpacked (quantization/kernels.py)
)
_DENSE_TO_FP8 = 5  # bytes per weight: a 16-bit base is read for the rows' scales, and again


def form(plan: Plan, rank: int) -> str:
    """How an adapter of this rank is applied: merged into W, joined to an fp8 product, or added."""
    if plan.quantization.compute_dtype == "fp8":
        return "joined"
    has_kernels = plan.quantization.quant != "none" and FORMATS[plan.quantization.quant].has_kernels
    fits = has_kernels and rank <= _MERGED_RANK and plan.model.product_bytes == 2
    drops_within = plan.adapter.lora_dropout and plan.adapter.adapter != "dora"
    return "merged" if fits and not drops_within else "added"


@mean_of_blocks
def activation_traffic(shape: ModelShape, plan: Plan) -> tuple[float, float]:
    """Bytes of a block's norms with residuals, rotation, gate and dropout: forward and backward.

    Fused where compiled, one pass per operation where eager. DoRA scales each output, and with dropout
    has a second product for what is dropped.
    """
    d, i, norms = shape.hidden, shape.mlp_width, shape.norms / 2
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    forward, backward = (6 * d * norms + 4 * rotated + 3 * i, 10 * d * norms + 4 * rotated + 6 * i)
    if not plan.loop.compile:
        forward, backward = (
            42 * d * norms + 10 * rotated + 5 * i,
            84 * d * norms + 10 * rotated + 8 * i,
        )
    forward += constants.STATE_PASSES * shape.state_width
    backward += 2 * constants.STATE_PASSES * shape.state_width
    adapted = adapted_linears(shape, plan).values()
    if plan.adapter.lora_dropout:
        backward += 2 * sum(w for _, w in adapted)  # x without the dropped, for dA
    if plan.adapter.adapter == "dora":
        out = sum(o for o, _ in adapted)
        forward, backward = forward + 2 * out, backward + 4 * out
        if plan.adapter.lora_dropout:  # x in what stays and what goes, and dX of both
            wide = sum(w for _, w in adapted)
            forward, backward = forward + 5 * wide + 2 * out, backward + 5 * wide
    each, rows = plan.batch.tokens * plan.model.product_bytes, experts.row_traffic(shape, plan)
    return each * forward + rows[0], each * backward + rows[1]


@mean_of_blocks
def adapter_traffic(shape: ModelShape, plan: Plan) -> tuple[float, float]:
    """Bytes of a block's products of rank R: forward and backward.

    x A^T reads x, once for layers that share it in a compiled block; dY B and dB read dY, dA reads
    x. Where an adapter is added, y and dX are written once more and read again. Experts make x A^T again
    in the backward, in a forward that merges them not at all, and their products of groups are slower.
    """
    groups: dict[str, int] = {}
    added_out = added_in = out = 0
    for name, (rows, wide) in adapted_linears(shape, plan).items():
        alone = not plan.loop.compile or plan.adapter.lora_dropout
        key = name if alone else FEEDS.get(name, name)
        if form(plan, plan.adapter.rank(name)) == "added":
            added_out += rows
            added_in += wide * (key not in groups)
        groups[key] = wide
        out += rows
    inputs, each = sum(groups.values()), plan.batch.tokens * plan.model.product_bytes
    of_experts = _expert_adapter_traffic(shape, plan)
    return (
        each * (inputs + 2 * added_out + of_experts[0]),
        each * (2 * out + inputs + 2 * added_in + of_experts[1]),
    )


def _expert_adapter_traffic(shape: ModelShape, plan: Plan) -> tuple[float, float]:
    """Values of a token that experts' products of rank R move, at the rate of other layers'."""
    forward = backward = 0
    for name, (out, wide) in experts.adapted_experts(shape, plan).items():
        how = form(plan, plan.adapter.rank(name))
        forward += wide * (how != "merged") + 2 * out * (how == "added")
        backward += 2 * (out + wide) + 2 * wide * (how == "added")
    slower = shape.experts_per_token * constants.RANK_SHARE / constants.GROUPED_RANK_SHARE
    return slower * forward, slower * backward


@mean_of_blocks
def quantize_traffic(shape: ModelShape, plan: Plan) -> dict[str, tuple[float, float]]:
    """Bytes to quantize each layer's tokens for fp8 products: its input, then its output's gradient.

    Joined layers of one input have it quantized once, which counts for the first of them.
    """
    if plan.quantization.compute_dtype != "fp8":
        return {}
    each, first = plan.batch.tokens * (plan.model.product_bytes + 1), _first_of_joined(shape, plan)
    rows = each * shape.experts_per_token
    return {
        name: (each * wide * (first[name] == name), each * out)
        for name, (out, wide) in shape.linears().items()
    } | {name: (rows * wide, rows * out) for name, (out, wide) in shape.expert_linears().items()}


def _first_of_joined(shape: ModelShape, plan: Plan) -> dict[str, str]:
    """For each layer the first of those whose fp8 product its own is joined with, if not itself."""
    ranks = {name: plan.adapter.rank(name) for name in adapted_linears(shape, plan)}
    first: dict[tuple[str, bool], str] = {}
    found: dict[str, str] = {}
    for name in shape.linears():
        together = forward_ranks(name, ranks, plan) > ranks.get(name, 0) or name not in ranks
        alone = not (plan.loop.compile and together)
        group = name if alone else FEEDS.get(name, name)
        found[name] = first.setdefault((group, name in ranks), name)
    return found


@mean_of_blocks
def unpack_traffic(shape: ModelShape, plan: Plan) -> dict[str, float]:
    """Bytes to make each linear weight of a block ready for one product, at the rate of a copy.

    Kernels that do more than copy count for more bytes, by their share of a copy's rate. What is kept
    in fp8 is ready.
    """
    sizes = {name: out * wide for name, (out, wide) in _stored_linears(shape).items()}
    adapted, ready = (
        adapted_linears(shape, plan),
        shape.linears() if plan.quantization.keep_fp8_weights else (),
    )
    return {
        name: 0.0
        if name in ready
        else size * _unpack_bytes(plan, plan.adapter.rank(name) if name in adapted else 0)
        for name, size in sizes.items()
    }


@mean_of_blocks
def tile_traffic(shape: ModelShape, plan: Plan, policy: str) -> float:
    """What an MLP in tiles unpacks more in a forward and backward: its weights again for each tile."""
    unpack, again = unpack_traffic(shape, plan), rerun_linears(shape, plan, policy)
    once = sum(unpack[name] * (2 + (name in again)) for name in shape.mlp_linears())
    return (plan.memory.tiles(policy) - 1) * once


def _stored_linears(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(out, in) of a block's linear layers, and of all its experts as one, for each may be hit."""
    return shape.linears() | {
        name: (shape.experts * out, wide) for name, (out, wide) in shape.expert_linears().items()
    }


def _unpack_bytes(plan: Plan, rank: int) -> float:
    """The same per weight, with an adapter of this rank; 0 without."""
    fp8 = plan.quantization.compute_dtype == "fp8"
    if plan.quantization.quant == "none":
        return _DENSE_TO_FP8 if fp8 else 0.0
    if fp8:
        return (_packed_bytes(plan) + 1) / constants.FP8_UNPACK_SHARE
    merged = rank and form(plan, rank) == "merged"
    share = constants.MERGE_SHARE if merged else constants.UNPACK_SHARE
    return (_packed_bytes(plan) + plan.model.product_bytes) / share


def _packed_bytes(plan: Plan) -> float:
    """Of a weight in few bits and its share of a scale."""
    return packed_bits(plan.quantization.quant) / 8 + scale_bytes(1, plan) / BLOCKSIZE


@mean_of_blocks
def magnitude_traffic(shape: ModelShape, plan: Plan) -> tuple[float, float]:
    """Bytes of a block's weights that DoRA moves more than LoRA: forward and backward.

    For the norms, and for the second product that it has under dropout.
    """
    second = sum(
        out * wide * _unpack_bytes(plan, 0) for out, wide in second_products(shape, plan).values()
    )
    return norm_traffic(shape, plan) + second, second


@mean_of_blocks
def norm_traffic(shape: ModelShape, plan: Plan) -> float:
    """Bytes that the norms of DoRA take in each forward.

    W as its product has it is read again: once with B A in it, else once more for W A^T. A product in fp8
    has none, so W is unpacked for them.
    """
    found, in_16_bits = 0.0, plan.change(compute_dtype="auto")
    for name, (out, wide) in turned_linears(shape, plan).items():
        rank = plan.adapter.rank(name)
        reads = 1 if form(in_16_bits, rank) == "merged" else 2
        found += out * wide * reads * plan.model.product_bytes
        if plan.quantization.compute_dtype == "fp8":
            found += out * wide * _unpack_bytes(in_16_bits, rank)
    return found


@mean_of_blocks
def rerun_traffic(shape: ModelShape, plan: Plan, policy: str) -> dict[str, float]:
    """Bytes of the forward that a block's backward moves again, by kind; nothing under keep_all.

    x A^T is kept with the products, under keep_linears.
    """
    if not POLICIES[policy].recomputes:
        return {}
    again = rerun_linears(shape, plan, policy)
    quantize, unpack = quantize_traffic(shape, plan), unpack_traffic(shape, plan)
    again_too = (*again, *experts.rerun_linears(shape, plan, policy))
    moved = activation_traffic(shape, plan)[0] - experts.not_summed_again(shape, plan, policy)
    kept = POLICIES[policy].keeps_linears  # norms too, but of fp8
    turned = magnitude_traffic(shape, plan)[0] if not kept else 0.0
    if kept and plan.quantization.compute_dtype == "fp8":
        turned = norm_traffic(shape, plan)
    return dict(
        activations=moved,
        adapters=adapter_traffic(shape, plan)[0] if again else 0.0,
        unpack=sum(unpack[name] for name in again_too) + turned,
        quantize=sum(quantize[name][0] for name in again_too if quantize),
    )
