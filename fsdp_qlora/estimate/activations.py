"""What a block keeps for its backward, what its backward holds meanwhile, and what the loss takes.

The tests trace transformers' blocks and compare.
"""

from __future__ import annotations

from math import gcd, lcm

from ..catalog.arch import ModelShape
from ..choices import POLICIES
from ..config.run import chunk_tokens
from ..plan import BYTES, WITHOUT_MASKS, Plan
from . import constants, experts, magnitudes
from .kinds import mean_of_blocks, most_of_blocks
from .magnitudes import needs_last_output
from .mixers import mixer_held, mixer_saved
from .vocabulary import trains_head
from .weights import as_given, most_trained

# That a policy can keep (../memory/checkpointing_policy.py).
KEPT_ATTENTION = ("sdpa", *WITHOUT_MASKS)


def saved_by_block(shape: ModelShape, plan: Plan) -> float:
    """Bytes that a keep_all block's forward saves for its backward, its input included if saved.

    Found by tracing `saved_tensors_hooks` through transformers' blocks with our adapted linear
    (the tests trace again); a compiled block as torch's min-cut partitioner leaves it.
      norm, eager: its input in fp32, and 1/rms         compiled: its input as it is, and 1/rms
      adapted linear: input (shared by q, k, v and by gate, up), xA (N, R)
      attention (flash): q, k after rotation, v, output, log-sum-exp in fp32
      MLP: gate, up and, eager, act(gate); their product is the input of down_proj
    Where weights are trained, norms also save their normalised input.
    """
    n, a = plan.batch.tokens, plan.model.product_bytes
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = _inputs_kept(shape, plan)
    norm_bytes = a if plan.loop.compile else 4
    if plan.adapter.is_full and not plan.loop.compile:
        norm_bytes += a
    total: float = shape.norms * n * (shape.hidden * norm_bytes + 4)
    if shape.traits.qk_norm or "q_norm" in dict(shape.block.mixer.beside if shape.block else ()):
        heads = shape.heads + shape.kv_heads
        total += n * heads * (shape.head_dim * norm_bytes + 4)
    total += n * shape.hidden * a * (kept["attention"] + kept["mlp"])
    total += _attention_saved(shape, plan, kept["o_proj"]) + _state_saved(shape, plan)
    # v is a slice of the fused product, whose other columns stay with it; and phi3 joins q of two
    # halves, which leaves attention's output in an order that has to be copied for o_proj.
    if shape.traits.layers == "fused":
        total += n * (q + kv + q * kept["o_proj"]) * a
    return (
        total
        + _mlp_saved(shape, plan)
        + _adapter_saved(shape, plan)
        + experts.saved_by_experts(shape, plan)
    )


def _mlp_saved(shape: ModelShape, plan: Plan) -> float:
    """Of these, what is as wide as the MLP: gate, up and what is made of them."""
    wide = plan.batch.tokens * shape.mlp_width * plan.model.product_bytes
    return wide * (2 + (not plan.loop.compile) + _inputs_kept(shape, plan)["down_proj"])


def _inputs_kept(shape: ModelShape, plan: Plan) -> dict[str, bool]:
    """Which inputs of linear layers are saved: those of trained and of adapted layers."""
    names = tuple(shape.linears())
    kept = names if not plan.adapter.has_lora else shape.targets(as_given(plan.adapter.targets))
    kept += experts.trained_inputs(shape, plan)
    *inner, o_proj = shape.attention_linears() or ("",)  # a block may be an MLP alone
    *mlp, down_proj = shape.mlp_linears() or ("experts.down_proj",)
    return dict(
        attention=any(n in kept for n in inner),
        o_proj=o_proj in kept,
        mlp=any(n in kept for n in (*mlp, *list(shape.expert_linears())[:1]))
        or bool(shape.experts and not plan.adapter.has_lora),
        down_proj=down_proj in kept,
    )


def _attention_saved(shape: ModelShape, plan: Plan, output_kept: bool) -> float:
    """Bytes that attention saves: by a flash kernel, with a mask, or eager.

    A mask makes transformers repeat k and v for all heads, and the kernel keeps the mask in the
    compute dtype, (B, 1, T, T). Eager attention keeps the (B, H, T, T) weights in fp32 and cast; with
    sinks in the compute dtype, with the sink's column and without.
    """
    n, a = plan.batch.tokens, plan.model.product_bytes
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    squares = n * plan.batch.context_length
    if plan.model.attention == "eager":
        each = 2 * a if shape.traits.attention == "sinks" else 4 + a * (a < 4)
        return n * a * (3 * q + q * output_kept) + squares * shape.heads * each
    saved = n * a * (q + 2 * kv + q) + n * shape.heads * 4
    if plan.model.masked:
        saved += n * a * 2 * (q - kv) + squares * a
    return saved


def _state_saved(shape: ModelShape, plan: Plan) -> float:
    """Bytes that a mixer with a state saves: what it takes, before and after its convolution, and gives.

    As kernels that make the state of a chunk again in their backward do; the attention within a chunk is
    kept, a row of it for each token and head. Plain torch keeps more (mixers.py).
    """
    if not shape.block or not shape.state_width:
        return 0.0
    mixer, each = shape.block.mixer, plan.batch.tokens * plan.model.product_bytes
    given, on_torch = mixer.linears[-1][1][1], mixer_saved(shape, plan)
    if on_torch is None:
        values = 2 * shape.state_width + given + constants.STATE_CHUNK * mixer.state_heads
        return each * values
    return on_torch + each * given * (not mixer.heads and _inputs_kept(shape, plan)["o_proj"])


def _adapter_saved(shape: ModelShape, plan: Plan) -> float:
    """xA (N, R) of each adapted layer of a block; dropout keeps a seed. DoRA's magnitudes need more."""
    return rank_products(shape, plan) + magnitudes.saved_outputs(shape, plan)


def rank_products(shape: ModelShape, plan: Plan) -> float:
    """xA (N, R) of each adapted layer of a block."""
    return (
        plan.batch.tokens
        * plan.model.product_bytes
        * sum(plan.adapter.rank(name) for name in _adapted_names(shape, plan))
    )


def _adapted_names(shape: ModelShape, plan: Plan) -> list[str]:
    """The adapted layers of a block."""
    if not plan.adapter.has_lora:
        return []
    return [
        name for name in shape.targets(as_given(plan.adapter.targets)) if name in shape.linears()
    ]


def block_input(shape: ModelShape, plan: Plan) -> float:
    """(N, D): all that is kept of a block under recompute_all."""
    return plan.batch.tokens * shape.hidden * BYTES[plan.model.stored_dtype]


@mean_of_blocks
def kept_by_block(shape: ModelShape, plan: Plan, policy: str) -> float:
    """Bytes that stay of one block between its forward and its backward, under a policy's name.

    recompute_all, its input; keep_attention, also attention's output and log-sum-exp; keep_linears,
    also what each linear layer gives, with q and k before rotation, and xA. Of a compiled block the
    partitioner leaves out the output of down_proj, which only a norm after it or a magnitude would need;
    eager checkpointing keeps whatever the policy names.
    """
    row = POLICIES[policy]
    if not row.recomputes:
        return saved_by_block(shape, plan)
    kept = block_input(shape, plan)
    if row.keeps_attention:
        kept += attention_output(shape, plan)
    if row.keeps_linears:
        rows = sum(
            out
            for name, (out, _) in shape.linears().items()
            if name != last_linear(shape) or not plan.loop.compile or needs_last_output(shape, plan)
        )
        kept += plan.batch.tokens * rows * plan.model.product_bytes + rank_products(shape, plan)
        kept += magnitudes.kept_norms(shape, plan)
        kept += experts.outputs(shape, plan)
    return kept


def last_linear(shape: ModelShape) -> str | None:
    """down_proj, by the family's name of it; None where the MLP is experts."""
    return next(reversed(shape.mlp_linears()), None)


def attention_output(shape: ModelShape, plan: Plan, log_sums: bool = True) -> float:
    """Output and log-sum-exp of attention, 0 where it is not among the ops that a policy keeps."""
    if plan.model.attention not in KEPT_ATTENTION:
        return 0.0
    q = shape.heads * shape.head_dim
    return plan.batch.tokens * (q * plan.model.product_bytes + shape.heads * 4 * log_sums)


@most_of_blocks
def widest_in_backward(shape: ModelShape, plan: Plan, policy: str) -> tuple[float, float]:
    """Bytes saved of a block, and in use beside them, where its backward takes most."""
    saved, tiles = _saved_in_backward(shape, plan, policy), plan.memory.tiles(policy)
    places = [
        (saved, _backward_working(shape, plan, policy)),
        (saved - _saved_at_once(shape, plan, policy), _backward_end(shape, plan)),
        (saved, _norms_working(shape, plan)),
        *((saved - gone, used) for gone, used in experts.backward_moments(shape, plan, policy)),
    ]
    gone = _mlp_saved(shape, plan) / tiles + _mlp_half_saved(shape, plan)
    gone += _output_copy(shape, plan, policy)
    if tiles > 1:
        places.append((saved - gone, _attention_working(shape, plan, policy)))
    places.append((saved - gone, mixer_held(shape, plan)))
    return max(places, key=sum)


def _mlp_half_saved(shape: ModelShape, plan: Plan) -> float:
    """What is saved for the MLP's half but the MLP's own: inputs of its norm and of its first layers."""
    a = plan.model.product_bytes
    norm = a if plan.loop.compile else 4
    return plan.batch.tokens * shape.hidden * (norm + a * _inputs_kept(shape, plan)["mlp"])


def _saved_at_once(shape: ModelShape, plan: Plan, policy: str) -> float:
    """What a block saves, `saved_by_block`, but of an MLP in tiles one tile, and with o_proj's own input."""
    rest = _mlp_saved(shape, plan) * (1 - 1 / plan.memory.tiles(policy))
    more = _output_copy(shape, plan, policy) + magnitudes.scaled_beside(shape, plan, policy)
    return saved_by_block(shape, plan) - rest + more


def _output_copy(shape: ModelShape, plan: Plan, policy: str) -> float:
    """What attention gave as o_proj takes it, where that is a copy: of tiles, or of other ranks' heads."""
    if plan.batch.ranks_per_row == 1 and _attention_tiles(shape, plan, policy) == 1:
        return 0.0
    width = shape.heads * shape.head_dim * _inputs_kept(shape, plan)["o_proj"]
    return plan.batch.tokens * plan.model.product_bytes * width


def _saved_in_backward(shape: ModelShape, plan: Plan, policy: str) -> float:
    """Bytes saved of one block while its backward runs, when what was not kept is there again.

    A compiled block then holds what a keep_all block does; of an MLP in tiles, one tile of it. Eager,
    what was kept stays beside that, but attention's output, gate and up, which are the same tensors.
    """
    whole = _saved_at_once(shape, plan, policy)
    row = POLICIES[policy]
    if not row.recomputes or plan.loop.compile:
        return whole
    shared = attention_output(shape, plan) if row.keeps_attention else 0.0
    if row.keeps_linears:
        shared += plan.batch.tokens * 2 * shape.mlp_width * plan.model.product_bytes
        shared += rank_products(shape, plan)
    return whole + kept_by_block(shape, plan, policy) - shared


def dequantized(shape: ModelShape, plan: Plan, name: str) -> float:
    """Bytes of one linear weight in the compute dtype, made for a product and freed after it."""
    if plan.quantization.quant == "none" or plan.quantization.keep_fp8_weights:
        return 0.0
    out, wide = shape.linears()[name]
    return out * wide * plan.model.product_bytes


def _backward_working(shape: ModelShape, plan: Plan, policy: str) -> float:
    """The most that a block's backward holds beyond what was saved, near its start.

    In down_proj's backward: the block's output gradient, the gradient of its input (N, I), and the
    dequantized weight or, with dropout, one more of (N, I). Eager, then in the product's backward
    three of (N, I), while down_proj's saved input is gone; compiled, these are taken to reuse what
    was saved, which one measured peak bears out (13.3 GiB; 13.6 without). In tiles, all that is as
    wide as the MLP is of one tile, and the gradient of the MLP's input is there whole.
    """
    n, a, tiles = plan.batch.tokens, plan.model.product_bytes, plan.memory.tiles(policy)
    wide, hidden = n * shape.mlp_width * a / tiles, n * shape.hidden * a * (1 + (tiles > 1))
    kept = _inputs_kept(shape, plan)["down_proj"]
    dropout = wide if kept and plan.adapter.has_lora and plan.adapter.lora_dropout else 0
    own_gradient = 0.0
    if not plan.adapter.has_lora:
        own_gradient = max(1, shape.experts) * shape.hidden * shape.intermediate * a
        if tiles > 1:  # and those of all tiles in fp32
            own_gradient += 4 * sum(out * wide for out, wide in shape.mlp_linears().values())
    last = last_linear(shape)
    down = wide + max(dequantized(shape, plan, last) if last else 0.0, dropout)
    product = 0 if plan.loop.compile else (3 - kept) * wide
    # Of gate or up, the gradient before its magnitude beside that after it, eager in fp32.
    turned = bool(magnitudes.turned_linears(shape, plan)) * (1 if plan.loop.compile else 2) * wide
    return hidden + own_gradient + turned + max(down, product)


def _norms_working(shape: ModelShape, plan: Plan) -> float:
    """What a block that runs again holds in down_proj, or another layer with a magnitude, for its norms."""
    sizes = magnitudes.turned_linears(shape, plan)
    dense = max((dequantized(shape, plan, name) for name in sizes), default=0.0)
    # With what it gives, and the gradient of the block's output.
    rows = 2 * plan.batch.tokens * shape.hidden * plan.model.product_bytes
    return dense + magnitudes.norm_copies(shape, plan) + rows * bool(sizes)


def _backward_end(shape: ModelShape, plan: Plan) -> float:
    """What a block's backward holds in its first linear layers, when only the first norm is left.

    The gradients of the block's output and of q's input and output, the saved input of q, k, v, and
    the norm's; all of the block's weight gradients.
    """
    n, a = plan.batch.tokens, plan.model.product_bytes
    first = next(iter(shape.linears()))
    rows = n * shape.hidden * (4 * a + (a if plan.loop.compile else 4))
    grads = most_trained(shape, plan)
    return rows + dequantized(shape, plan, first) + grads


def _attention_working(shape: ModelShape, plan: Plan, policy: str) -> float:
    """What a block's backward holds in attention, when the MLP's half is done.

    Gradients of the block's output, of what the MLP's half took, of attention's output and of q, k and
    v; and what flash kernels sum in: dQ in fp32 and, where heads share keys and values, dK and dV for
    each head. Of attention in tiles these are one tile's, and each tile's output goes when its gradients
    are there. Without tiles of the MLP it is never the most. Ranks that share rows hold their heads' keys
    and values, which may be repeated and gathered, in place of their own; eager code holds more of
    what they exchange.
    """
    q, kv, a = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        plan.model.product_bytes,
    )
    tiles = _attention_tiles(shape, plan, policy)
    sums = 4 * q + 2 * q * a * (kv < q) if plan.model.attention in KEPT_ATTENTION else 0
    rows = a * (2 * shape.hidden + 2 * q + 2 * kv - q * (1 - 1 / tiles)) + sums / tiles
    if plan.batch.ranks_per_row > 1:
        rows += 4 * a * (_attended_kv_heads(shape, plan) * shape.head_dim - kv)
    return plan.batch.tokens * rows + exchanged(shape, plan) * (not plan.loop.compile)


def _attention_tiles(shape: ModelShape, plan: Plan, policy: str) -> int:
    """Groups of this rank's key-value heads that attention takes one after the other."""
    if not shape.kv_heads or plan.model.attention not in KEPT_ATTENTION:
        return 1
    heads = _exchanged_kv_heads(shape, plan) // gcd(shape.heads, plan.batch.ranks_per_row)
    most = plan.memory.attention_tiles if POLICIES[policy].reruns_mlp else 1
    return max(n for n in range(1, most + 1) if heads % n == 0)


def _attended_kv_heads(shape: ModelShape, plan: Plan) -> int:
    """Key-value heads that attention is given for each token of a rank: of all circles' tokens."""
    circle = gcd(shape.heads, plan.batch.ranks_per_row)
    return _exchanged_kv_heads(shape, plan) * plan.batch.ranks_per_row // circle


def _exchanged_kv_heads(shape: ModelShape, plan: Plan) -> int:
    """Key-value heads as often as the ranks that share rows need them."""
    kv_heads = lcm(shape.kv_heads, gcd(shape.heads, plan.batch.ranks_per_row))
    return kv_heads if shape.heads % kv_heads == 0 else shape.heads


@mean_of_blocks
def exchanged(shape: ModelShape, plan: Plan) -> float:
    """Bytes of q, k, v and attention's output as ranks that share rows exchange them; else 0.

    Key-value heads go as often as there are ranks to have one (model/sequence_parallel.py). Where the
    ranks don't divide the heads, r circles of u ranks exchange, and gather each other's keys and values.
    """
    ranks = plan.batch.ranks_per_row
    if ranks == 1:
        return 0.0
    circle, kv_heads = gcd(shape.heads, ranks), _exchanged_kv_heads(shape, plan)
    values = 2 * (shape.heads + kv_heads) * shape.head_dim * (circle > 1)
    circles = ranks // circle
    values += 2 * circles * kv_heads * shape.head_dim * (circles > 1)
    return plan.batch.tokens * plan.model.product_bytes * values


def loss_bytes(shape: ModelShape, plan: Plan) -> float:
    """Logits and what is made of them (chunked_cross_entropy.py), and the gradient of a trained head.

    At a chunk's widest place: logits and their gradient in the compute dtype, as the fused kernel
    of a GPU leaves them, and the gradient of the chunk before, or as much inside of the kernel where
    there is one chunk (measured for 1x512). An adapted head takes transformers'
    own loss: all tokens' logits, cast to fp32, their log-softmax and both gradients. Of a trained head
    the gradient is summed in fp32, and a chunk's part of it is there when its logits are gone.
    """
    a, n = plan.model.product_bytes, plan.batch.tokens
    if _adapts_head(shape, plan):
        return n * shape.vocab * (12 + 2 * a)
    logits = min(n, chunk_tokens(shape.vocab)) * shape.vocab * a
    if not trains_head(shape, plan):
        return 3 * logits
    head = shape.vocab * shape.hidden
    return 4 * head + max(3 * logits, logits + head * a)


def loss_backward_bytes(shape: ModelShape, plan: Plan) -> float:
    """A trained head's gradient in fp32, the same times that of the loss, and in the head's dtype.

    With the gradient of the hidden states, which is multiplied too. 0 where the head is not trained.
    """
    if _adapts_head(shape, plan) or not trains_head(shape, plan):
        return 0.0
    own = BYTES[plan.trained_dtype]
    of_head = shape.vocab * shape.hidden * (8 + (own if own < 4 else 0))
    return of_head + 2 * plan.batch.tokens * shape.hidden * plan.model.product_bytes


def _adapts_head(shape: ModelShape, plan: Plan) -> bool:
    """Whether the head has an adapter."""
    targets = as_given(plan.adapter.targets)
    return plan.adapter.has_lora and "lm_head" in shape.targets(targets)
