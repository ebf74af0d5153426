"""Every weight of a model as it is stored: whole, in one rank's shard, and in a gathered unit.

Follows sharding/fsdp.py, which shards rows, and quantization/, which packs them. What is counted
per trained weight, gradients and optimizer states, follows from the same list.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from ..catalog.arch import ModelShape
from ..choices import OPTIMIZERS
from ..plan import BYTES, Plan
from .experts import adapted_experts
from .fp8_weights import is_kept, kept_in_fp8, row_scales
from .kinds import mean_of_blocks, most_of_blocks
from .stored_weight import BLOCKSIZE, Weight, packed_bits, plain, scale_bytes

EMBEDDING, HEAD = "embed_tokens", "lm_head"


@lru_cache(maxsize=16)
def linear_weights(shape: ModelShape, plan: Plan, part: str = "") -> tuple[Weight, ...]:
    """Linear weights of a block with absmax and adapters; of its "attention" or "mlp" alone."""
    weights: list[Weight] = []
    targets = shape.targets(as_given(plan.adapter.targets)) if plan.adapter.has_lora else ()
    parts = {"attention": shape.attention_linears(), "mlp": shape.mlp_linears()}
    names = parts[part] if part else shape.linears()
    for name, (out, wide) in names.items():
        if name in shape.in_16_bits:
            weights.append(plain("linears", out, wide, plan.dtype(name), plan.adapter.trains(name)))
        else:
            weights += _stored_linear(name, out, wide, plan)
        if name in targets:
            weights += adapter(name, out, wide, plan)
    keeps_scales = plan.quantization.compute_dtype == "fp8" and plan.weights_stay
    if keeps_scales:
        weights += kept_in_fp8(names, targets, plan)
    for name, length in shape.biases().items():
        if name not in names:
            continue
        if plan.adapter.has_lora and (
            plan.adapter.bias == "all" or plan.adapter.bias == "lora_only" and name in targets
        ):
            weights.append(plain("adapters", length, 1, plan.adapter.adapter_dtype, True))
        else:
            weights.append(plain("norms", length, 1, plan.dtype(name), plan.adapter.trains(name)))
    if part != "attention":
        for name, (out, wide) in shape.expert_linears().items():
            weights += _stored_linear(name, shape.experts * out, wide, plan)
            if name in adapted_experts(shape, plan):  # A and B of each, as PEFT lays them
                rank = shape.experts * plan.adapter.rank(name)
                weights += [
                    plain("adapters", rank, wide, plan.adapter.adapter_dtype, True),
                    plain("adapters", out, rank, plan.adapter.adapter_dtype, True),
                ]
            if keeps_scales and is_kept(name, out, wide, plan):
                is_adapted = name in adapted_experts(shape, plan)
                weights.append(row_scales(shape.experts * out, is_adapted))
        if shape.router_weights:
            weights.append(
                plain(
                    "norms",
                    shape.experts,
                    shape.hidden,
                    plan.dtype("gate"),
                    plan.adapter.trains("gate"),
                )
            )
    return tuple(weights)


def _stored_linear(name: str, out: int, wide: int, plan: Plan) -> list[Weight]:
    """A linear weight as it is stored: numbers, or packed bytes and scales."""
    if plan.quantization.quant == "none":
        return [plain("linears", out, wide, plan.dtype(name), plan.adapter.trains(name))]
    blocks = -(-wide // BLOCKSIZE)
    packed = blocks * BLOCKSIZE * packed_bits(plan.quantization.quant) / 8
    return [
        Weight("linears", out, packed, 0, False),
        Weight("absmax", out, scale_bytes(blocks, plan), 0, False),
    ]


def as_given(targets):
    """Targets as `ModelShape.targets` takes them."""
    return list(targets) if isinstance(targets, tuple) else targets


def adapter(name: str, out: int, wide: int, plan: Plan) -> list[Weight]:
    """A (R, in) and B (out, R), and DoRA's magnitudes (out,)."""
    rank = plan.adapter.rank(name)
    weights = [
        plain("adapters", rank, wide, plan.adapter.adapter_dtype, True),
        plain("adapters", out, rank, plan.adapter.adapter_dtype, True),
    ]
    if plan.adapter.adapter == "dora":
        weights.append(plain("adapters", out, 1, plan.adapter.adapter_dtype, True))
    return weights


@lru_cache(maxsize=16)
def block_weights(shape: ModelShape, plan: Plan) -> tuple[Weight, ...]:
    """Every weight of one decoder block."""
    return (
        *linear_weights(shape, plan),
        *(
            plain("norms", width, 1, plan.dtype(name), plan.adapter.trains(name))
            for name, width in shape.norm_weights()
        ),
    )


@lru_cache(maxsize=16)
def _new_block_weights(shape: ModelShape, plan: Plan) -> tuple[Weight, ...]:
    """Every weight of a block that Llama-Pro adds: trained, in --adapter_dtype, never quantized."""
    if not shape.new_blocks:
        return ()
    weights = block_weights(shape, plan_of_new_blocks(plan))
    return tuple(replace(weight, kind="adapters") for weight in weights)


def plan_of_new_blocks(plan: Plan) -> Plan:
    """The plan of a model that is as the blocks that Llama-Pro adds."""
    return plan.change(adapter="none", quant="none", stored_dtype=plan.adapter.adapter_dtype)


def widest_block(shape: ModelShape, plan: Plan) -> tuple[Weight, ...]:
    """The weights of the block that is largest when it is gathered."""
    return max(
        *(block_weights(kind, plan) for kind, _ in shape.block_kinds()),
        _new_block_weights(shape, plan),
        key=lambda weights: gathered(weights, plan),
    )


@mean_of_blocks
def average_gathered(shape: ModelShape, plan: Plan) -> float:
    """Gathered bytes of a block, on the average over all."""
    new = shape.new_blocks / shape.layers
    return (1 - new) * gathered(block_weights(shape, plan), plan) + new * gathered(
        _new_block_weights(shape, plan), plan
    )


@mean_of_blocks
def average_trained(shape: ModelShape, plan: Plan, ranks: int, dtype: str = "") -> float:
    """Trained bytes of a block in one rank's part, on the average over all; as `trained_bytes`."""
    new = shape.new_blocks / shape.layers
    return (1 - new) * trained_bytes(
        block_weights(shape, plan), ranks, plan, dtype
    ) + new * trained_bytes(_new_block_weights(shape, plan), ranks, plan, dtype)


@most_of_blocks
def most_trained(shape: ModelShape, plan: Plan, dtype: str = "") -> float:
    """Trained bytes of the block with most of them, whole."""
    return max(
        trained_bytes(weights(shape, plan), 1, plan, dtype)
        for weights in (block_weights, _new_block_weights)
    )


def embedding_weights(shape: ModelShape, plan: Plan) -> list[Weight]:
    """The embedding's unit: empty where the head shares it, for then it is the root's."""
    if shape.tied:
        return []
    return [
        plain(
            "embedding",
            shape.vocab,
            shape.hidden,
            plan.dtype(EMBEDDING),
            plan.adapter.trains(EMBEDDING),
        )
    ]


def root_weights(shape: ModelShape, plan: Plan) -> list[Weight]:
    """What is left to the root: the final norm, the head or tied embedding, and what else is in no block.

    The head is after the norm, as in the model; of other order nothing depends.
    """
    end = EMBEDDING if shape.tied and plan.adapter.trains(EMBEDDING) else HEAD
    table = plain(
        "embedding" if shape.tied else "head",
        shape.vocab,
        shape.hidden,
        plan.dtype(end),
        plan.adapter.trains(end),
    )
    norm = plain("norms", shape.hidden, 1, plan.dtype("norm"), plan.adapter.trains("norm"))
    norms = [norm] * shape.traits.norm_parts
    weights = [table, *norms] if shape.tied else [*norms, table]
    if rows := shape.learned_positions:
        positions = plain(
            "norms", rows, shape.hidden, plan.dtype("wpe"), plan.adapter.trains("wpe")
        )
        weights.insert(0, positions)
    targets = shape.targets(as_given(plan.adapter.targets)) if plan.adapter.has_lora else ()
    if "lm_head" in targets:
        weights += adapter("lm_head", shape.vocab, shape.hidden, plan)
    for name, (out, wide) in shape.outer_linears().items():
        weights += _stored_linear(name, out, wide, plan)
        weights += adapter(name, out, wide, plan) if name in targets else []
    for name, (rows, width) in shape.outer_tables():
        kind = "embedding" if name.startswith(EMBEDDING) else "norms"
        weights.append(plain(kind, rows, width, plan.dtype(name), plan.adapter.trains(name)))
    return weights


def trains_end(shape: ModelShape, plan: Plan, name: str) -> bool:
    """Whether the weights of a module outside of blocks are trained; full training may name modules."""
    named = {module.rsplit(".", 1)[-1] for module in plan.adapter.only_modules}
    return plan.adapter.trains(name) and (name in named or trained_share(shape, plan) == 1)


def trained_ends(shape: ModelShape, plan: Plan, weights: list[Weight]) -> list[Weight]:
    """Of weights outside of blocks, the trained ones."""
    names = dict(embedding=EMBEDDING, head=HEAD, norms="norm")
    return [
        w
        for w in weights
        if w.trained and (w.kind not in names or trains_end(shape, plan, names[w.kind]))
    ]


def all_weights(shape: ModelShape, plan: Plan) -> list[tuple[Weight, int]]:
    """Every weight of the model with how often it occurs."""
    outer = embedding_weights(shape, plan) + root_weights(shape, plan)
    adapted = shape.layers if plan.adapter.blocks_adapted is None else plan.adapter.blocks_adapted
    base = shape.layers - shape.new_blocks
    blocks = [
        (w, round(count * (adapted if w.kind == "adapters" else base) / shape.layers))
        for kind, count in shape.block_kinds()
        for w in block_weights(kind, plan)
    ]
    return (
        blocks
        + [(w, shape.new_blocks) for w in _new_block_weights(shape, plan)]
        + [(w, 1) for w in outer]
    )


def resident_bytes(shape: ModelShape, plan: Plan, host: bool = False) -> dict[str, float]:
    """Stored weights of one rank by kind: those on the GPU, or those in host memory."""
    found = dict.fromkeys(
        ("linears", "absmax", "fp8", "embedding", "head", "norms", "adapters"), 0.0
    )
    trained = trained_on_host(shape, plan)
    for weight, count in all_weights(shape, plan):
        if on_host(weight, plan, trained) == host:
            found[weight.kind] += count * weight.shard(plan.sharding.shard_ranks)
    return found


def trained_bytes(weights: Iterable[Weight], ranks: int, plan: Plan, dtype: str = "") -> float:
    """Bytes of the trained among `weights` in one rank's part, in their dtype or another."""
    own = plan.trained_dtype
    return sum(w.shard_values(ranks) for w in weights) * BYTES[dtype or own]


def optimizer_bytes(shape: ModelShape, plan: Plan) -> float:
    """Optimizer states of one rank, in their own dtype or that of what they belong to."""
    own = BYTES[plan.trained_dtype]
    weights = all_trained(shape, plan, plan.sharding.shard_ranks) / own
    return weights * OPTIMIZERS[plan.optimizer.optimizer].state_bytes(own)


def all_trained(
    shape: ModelShape, plan: Plan, ranks: int, dtype: str = "", adapters: bool = True
) -> float:
    """`trained_bytes` of the whole model, or of its own weights without adapters."""
    return trained_share(shape, plan) * sum(
        count * trained_bytes([weight], ranks, plan, dtype)
        for weight, count in all_weights(shape, plan)
        if adapters or weight.kind != "adapters"
    )


def trained_share(shape: ModelShape, plan: Plan) -> float:
    """Of the weights, those that --trained_modules trains; 1 where it names none, or unknown ones."""
    if not plan.adapter.only_modules or shape.kinds:
        return 1.0
    block, outer = (
        shape.block_params(),
        dict(
            embed_tokens=shape.params()["embedding"],
            lm_head=shape.params()["head"],
            norm=shape.hidden,
        ),
    )
    parts = {name: out * wide for name, (out, wide) in shape.linears().items()}
    parts |= dict(shape.norm_weights()) | dict(
        self_attn=sum(out * wide for out, wide in shape.attention_linears().values())
    )
    parts |= dict.fromkeys(("mlp", "experts"), block["linears"] - parts["self_attn"])
    whole, trained = set(), 0
    for name in plan.adapter.only_modules:
        number, _, part = name.removeprefix("model.").removeprefix("layers.").partition(".")
        if number.isdecimal() and not part:
            whole.add(number)
        elif number.isdecimal() and part.rsplit(".", 1)[-1] in parts:
            trained += parts[part.rsplit(".", 1)[-1]]
        elif (last := name.rsplit(".", 1)[-1]) in outer:
            trained += outer[last]
        elif last in parts:
            trained += shape.layers * parts[last]
        else:
            return 1.0
    return min(1.0, (trained + len(whole) * sum(block.values())) / shape.total_params())


def trained_tensors(shape: ModelShape, plan: Plan) -> int:
    """How many tensors the optimizer updates."""
    return sum(count for weight, count in all_weights(shape, plan) if weight.trained)


def gathered(weights: Iterable[Weight], plan: Plan) -> float:
    """Bytes of a unit after its all-gather; 0 where FSDP does not own the weights."""
    if not plan.sharded:
        return 0.0
    return sum(
        plan.sharding.shard_ranks * w.shard(plan.sharding.shard_ranks)
        for w in weights
        if not w.by_rows
    )


TRAINED_SHARE = (
    1 / 8
)  # of a GPU that trained weights may take before they are offloaded (../build.py)


def trained_on_host(shape: ModelShape, plan: Plan, gpu_memory_gib: float = 79.1) -> bool:
    """Whether trained weights, gradients and optimizer states are offloaded with the others."""
    if not plan.memory.cpu_offload or plan.memory.trained_offload is False:
        return False
    if plan.memory.trained_offload or plan.adapter.is_full:
        return True
    taken = 2 * all_trained(shape, plan, plan.sharding.shard_ranks) + optimizer_bytes(shape, plan)
    return taken / 2**30 > TRAINED_SHARE * gpu_memory_gib


def on_host(weight: Weight, plan: Plan, trained: bool) -> bool:
    """Whether a weight's shard waits in host memory; `trained`, whether those that are trained do."""
    if weight.by_rows:
        return plan.vocabulary_on_host
    return trained if weight.trained else plan.memory.cpu_offload
