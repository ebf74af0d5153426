"""Bytes, seconds and money of a run, from the model's shape and the settings alone. Pure: no torch.

Memory follows the code, tensor by tensor: what a block saves for its backward, what its backward
holds at its widest place, which units FSDP2 has gathered at that moment. The peak is the largest of
a few moments of a step, and the table shows what is alive then. Nothing is fitted but the constants
under "Constants"; each says what it stands for.

Time is counted in the same way: FLOPs over the rate of large products, bytes over the rate of
copies, transfers less what compute hides.

Letters: B batch, T tokens of a row, N = B T, D hidden, I intermediate, q and kv the widths of all
query and all key-value heads, V vocabulary, R rank, n ranks that share one copy of the weights.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace

from .arch import ModelShape
from .config import RunConfig, plan_batches
from .hardware import Gpu

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2}

# ---- Constants ---------------------------------------------------------------------------------

BLOCKSIZE = 64         # weights per absmax value (quantize.py)
CHUNK_TOKENS = 1024    # tokens whose logits exist at once (losses.py)
BUCKET_BYTES = 128 * 2**20  # gradients reduced together under ddp (sharding.py)
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 0, "adadelta": 2}  # values per trained weight
CUBLAS_WORKSPACE = 2 * 32 * 2**20  # torch's default on Hopper, for the forward and backward thread

# Not measured yet: what torch's peak_allocated does not contain.
SLACK_SHARE = 0.05     # fragmentation: reserved but unused, as a share of what comes and goes
CONTEXT_GIB = 0.5      # CUDA context and kernels
NCCL_GIB = 0.4         # buffers of one NCCL communicator, where there are several ranks
PROCESS_HOST_GIB = 1.5  # Python, torch and its libraries, per rank

# Set by hand on the H100 rows that tests/test_estimate.py names, so those rows do not test them.
MATMUL_SHARE = 0.87    # of the rate of large products, for a block's linear layers
ATTENTION_SHARE = 0.55  # the same for attention kernels, forward and backward together
COPY_SHARE = 1.30      # passes over activations move at this share of a copy's rate (caches)
HOST_OPTIMIZER_PER_SECOND = 0.9e9  # weights per second and rank that the host's Adam updates

# Not measured yet: small steps are bound by what the CPU can launch.
LAUNCH_SECONDS = {"eager": 0.6e-3, "compiled": 0.25e-3}  # one block's forward; backward is twice it
SHARDED_LAUNCH_SECONDS = 0.3e-3  # FSDP's hooks, per block and pass
COLLECTIVE_LATENCY = 30e-6
INTERNODE_GB_S = 25.0  # per GPU, if not said otherwise


# ---- Settings ----------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that decide memory and time; defaults are those of `RunConfig`."""
    world_size: int = 1
    gpus_per_node: int | None = None   # None: all on one machine
    strategy: str = "full_shard"
    shard_group_size: int = -1         # hybrid strategies; -1 as in RunConfig
    wrap_policy: str = "block"
    backward_prefetch: bool = True
    cpu_offload: bool = False
    activation_policy: str = "recompute_all"
    recomputed_blocks: int | None = None  # None: all or none, as the policy says
    quant: str = "nf4"
    absmax_bytes: int = 4
    adapter: str = "lora"
    lora_rank: int = 64
    targets: str | tuple[str, ...] | None = "all-linear"
    lora_dropout: float = 0.1
    adapter_dtype: str = "fp32"
    optimizer: str = "adamw"
    precision: str = "bf16"
    batch_size: int = 1                # rows per GPU and micro-batch
    context_length: int = 512
    accumulation: int = 1
    no_sync: bool = False
    compile: bool = False
    attention: str = "sdpa"
    padded_rows: bool = False          # a mask goes into attention, as where rows are padded

    def __post_init__(self):
        for name in ("world_size", "lora_rank", "batch_size", "context_length", "accumulation"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.optimizer not in OPTIMIZER_STATES:
            raise ValueError(f"optimizer {self.optimizer}: choose {', '.join(OPTIMIZER_STATES)}")

    @property
    def tokens(self) -> int:
        """N, the tokens of one micro-batch on one GPU."""
        return self.batch_size * self.context_length

    @property
    def node_gpus(self) -> int:
        return min(self.world_size, self.gpus_per_node or self.world_size)

    @property
    def shard_ranks(self) -> int:
        """n: ranks that share one copy of the weights; 1 under ddp."""
        if self.strategy == "ddp": return 1
        if not self.strategy.startswith("hybrid"): return self.world_size
        if self.shard_group_size > 0: return min(self.shard_group_size, self.world_size)
        if self.node_gpus < self.world_size: return self.node_gpus
        return max(1, self.world_size // 2)

    @property
    def sharded(self) -> bool:
        """True if FSDP owns the weights, which it does for one rank only to offload them."""
        return self.strategy != "ddp" and (self.world_size > 1 or self.cpu_offload)

    @property
    def resharded(self) -> bool:
        """True if a unit's gathered weights are freed after its forward."""
        return self.strategy in ("full_shard", "hybrid_full_shard")

    def recomputed(self, shape: ModelShape) -> int:
        """Blocks whose activations are computed again; they are the first ones."""
        if self.recomputed_blocks is not None: return min(self.recomputed_blocks, shape.layers)
        return shape.layers if self.activation_policy == "recompute_all" else 0


def setup_from_config(config: RunConfig, world_size: int, **changes) -> Setup:
    """The `Setup` of a run's settings on `world_size` GPUs, with `changes` to it."""
    batches, targets = plan_batches(config, world_size), config.target_modules
    return replace(Setup(
        world_size=world_size, strategy=config.sharding_strategy,
        shard_group_size=config.shard_group_size, wrap_policy=config.wrap_policy,
        backward_prefetch=config.backward_prefetch != "none", cpu_offload=config.use_cpu_offload,
        activation_policy="recompute_all" if config.use_gradient_checkpointing else "keep_all",
        quant=config.quant, adapter=config.adapter, lora_rank=config.lora_rank,
        targets=tuple(targets) if isinstance(targets, list) else targets,
        lora_dropout=config.lora_dropout, adapter_dtype=config.adapter_dtype,
        optimizer=config.optimizer, precision=config.precision,
        batch_size=batches.micro_batch_size, context_length=config.context_length,
        accumulation=batches.accumulation, no_sync=config.no_sync, compile=config.compile,
        attention=config.attn_implementation), **changes)


def check_context(shape: ModelShape, setup: Setup):
    """Refuse rows longer than the model's positions, with a ValueError."""
    if shape.max_positions and setup.context_length > shape.max_positions:
        raise ValueError(f"--context_length {setup.context_length}: {shape.name} has "
                         f"{shape.max_positions} positions")


# ---- Weights -----------------------------------------------------------------------------------

@dataclass(frozen=True)
class Weight:
    """One parameter as it is stored and sharded: rows on dim 0, padded to whole shards."""
    kind: str          # the part of the table it belongs to
    rows: int
    row_bytes: float
    values: int        # numbers per row; 0 where the bytes are packed or frozen
    trained: bool

    def shard(self, ranks: int) -> float:
        """Bytes of one rank's part."""
        return -(-self.rows // ranks) * self.row_bytes

    def shard_values(self, ranks: int) -> int:
        """Trained numbers in one rank's part."""
        return -(-self.rows // ranks) * self.values if self.trained else 0


def plain(kind: str, rows: int, width: int, dtype: str, trained: bool) -> Weight:
    """A weight (rows, width) in a float dtype."""
    return Weight(kind, rows, width * BYTES[dtype], width, trained)


def linear_weights(shape: ModelShape, setup: Setup, part: str = "") -> list[Weight]:
    """Linear weights of a block with absmax and adapters; of its "attention" or "mlp" alone."""
    trained, weights = setup.adapter == "none", []
    targets = shape.targets(as_given(setup.targets)) if setup.adapter == "lora" else ()
    for name, (out, wide) in shape.linears().items():
        if part and (name in ATTENTION_LINEARS) != (part == "attention"): continue
        if setup.quant == "none":
            weights.append(plain("linears", out, wide, setup.precision, trained))
        else:
            blocks = -(-wide // BLOCKSIZE)
            weights += [Weight("linears", out, blocks * BLOCKSIZE / 2, 0, False),
                        Weight("absmax", out, blocks * setup.absmax_bytes, 0, False)]
        if name in targets: weights += adapter(out, wide, setup)
    weights += [plain("norms", length, 1, setup.precision, trained)
                for name, length in shape.biases().items()
                if not part or (name in ATTENTION_LINEARS) == (part == "attention")]
    return weights


ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")


def as_given(targets):
    """Targets as `ModelShape.targets` takes them."""
    return list(targets) if isinstance(targets, tuple) else targets


def adapter(out: int, wide: int, setup: Setup) -> list[Weight]:
    """A (R, in) and B (out, R)."""
    return [plain("adapters", setup.lora_rank, wide, setup.adapter_dtype, True),
            plain("adapters", out, setup.lora_rank, setup.adapter_dtype, True)]


def block_weights(shape: ModelShape, setup: Setup) -> list[Weight]:
    """Every weight of one decoder block."""
    trained = setup.adapter == "none"
    norms = [shape.hidden] * shape.norms_per_block + [shape.head_dim] * (2 * shape.qk_norm)
    return linear_weights(shape, setup) + [
        plain("norms", width, 1, setup.precision, trained) for width in norms]


def embedding_weights(shape: ModelShape, setup: Setup) -> list[Weight]:
    """The embedding's unit: empty where the head shares it, for then it is the root's."""
    if shape.tied: return []
    return [plain("embedding", shape.vocab, shape.hidden, setup.precision, setup.adapter == "none")]


def root_weights(shape: ModelShape, setup: Setup) -> list[Weight]:
    """What is left to the root: the final norm, and the head or the tied embedding."""
    trained = setup.adapter == "none"
    weights = [plain("embedding" if shape.tied else "head", shape.vocab, shape.hidden,
                     setup.precision, trained),
               plain("norms", shape.hidden, 1, setup.precision, trained)]
    if setup.adapter == "lora" and "lm_head" in shape.targets(as_given(setup.targets)):
        weights += adapter(shape.vocab, shape.hidden, setup)
    return weights


def all_weights(shape: ModelShape, setup: Setup) -> list[tuple[Weight, int]]:
    """Every weight of the model with how often it occurs."""
    outer = embedding_weights(shape, setup) + root_weights(shape, setup)
    return [(w, shape.layers) for w in block_weights(shape, setup)] + [(w, 1) for w in outer]


def resident_bytes(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Stored weights of one rank by kind, on the GPU or, under CPU offload, on the host."""
    found = dict.fromkeys(("linears", "absmax", "embedding", "head", "norms", "adapters"), 0.0)
    for weight, count in all_weights(shape, setup):
        found[weight.kind] += count * weight.shard(setup.shard_ranks)
    return found


def trained_bytes(weights: list[Weight], ranks: int, setup: Setup, dtype: str = "") -> float:
    """Bytes of the trained among `weights` in one rank's part, in their dtype or another."""
    own = setup.precision if setup.adapter == "none" else setup.adapter_dtype
    return sum(w.shard_values(ranks) for w in weights) * BYTES[dtype or own]


def optimizer_bytes(shape: ModelShape, setup: Setup) -> float:
    """Optimizer states of one rank, in the dtype of what they belong to."""
    return OPTIMIZER_STATES[setup.optimizer] * all_trained(shape, setup, setup.shard_ranks)


def all_trained(shape: ModelShape, setup: Setup, ranks: int, dtype: str = "") -> float:
    """`trained_bytes` of the whole model."""
    return sum(count * trained_bytes([weight], ranks, setup, dtype)
               for weight, count in all_weights(shape, setup))


def gathered(weights: list[Weight], setup: Setup) -> float:
    """Bytes of a unit after its all-gather; 0 where FSDP does not own the weights."""
    if not setup.sharded: return 0.0
    return sum(setup.shard_ranks * w.shard(setup.shard_ranks) for w in weights)


# ---- Activations -------------------------------------------------------------------------------

def saved_by_block(shape: ModelShape, setup: Setup) -> float:
    """Bytes that one block's forward saves for its backward, its input included if it is saved.

    Found by tracing `saved_tensors_hooks` through transformers' blocks with our adapted linear
    (the tests trace again); a compiled block as torch's min-cut partitioner leaves it.
      norm, eager: its input in fp32, and 1/rms         compiled: its input as it is, and 1/rms
      adapted linear: input (shared by q, k, v and by gate, up), xA (N, R), dropout mask (N, in)
      attention (flash): q, k after rotation, v, output, log-sum-exp in fp32
      MLP: gate, up and, eager, act(gate); their product is the input of down_proj
    Where weights are trained, norms also save their normalised input.
    """
    n, a = setup.tokens, BYTES[setup.precision]
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = inputs_kept(shape, setup)
    norm_bytes = a if setup.compile else 4
    if setup.adapter == "none" and not setup.compile: norm_bytes += a
    total = shape.norms_per_block * n * (shape.hidden * norm_bytes + 4)
    if shape.qk_norm:
        heads = shape.heads + shape.kv_heads
        total += n * heads * (shape.head_dim * norm_bytes + 4)
    total += n * shape.hidden * a * (kept["attention"] + kept["mlp"])
    total += attention_saved(shape, setup, kept["o_proj"])
    # v is a slice of the fused product, whose other columns stay with it; and phi3 joins q of two
    # halves, which leaves attention's output in an order that has to be copied for o_proj.
    if shape.fused: total += n * (q + kv + q * kept["o_proj"]) * a
    total += n * shape.intermediate * a * (2 + (not setup.compile) + kept["down_proj"])
    return total + adapter_saved(shape, setup)


def inputs_kept(shape: ModelShape, setup: Setup) -> dict[str, bool]:
    """Which inputs of linear layers are saved: those of trained and of adapted layers."""
    names = tuple(shape.linears())
    kept = names if setup.adapter == "none" else shape.targets(as_given(setup.targets))
    down = names.index("down_proj")
    o = names.index("o_proj")
    return dict(attention=any(n in kept for n in names[:o]), o_proj="o_proj" in kept,
                mlp=any(n in kept for n in names[o + 1:down]), down_proj="down_proj" in kept)


def attention_saved(shape: ModelShape, setup: Setup, output_kept: bool) -> float:
    """Bytes that attention saves: by a flash kernel, with a padding mask, or eager.

    A mask makes transformers repeat k and v for all heads, and the kernel keeps the mask in the
    compute dtype, (B, 1, T, T). Eager attention keeps the (B, H, T, T) weights in fp32 and cast.
    """
    n, a = setup.tokens, BYTES[setup.precision]
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    squares = n * setup.context_length
    if setup.attention == "eager":
        return n * a * (3 * q + q * output_kept) + squares * shape.heads * (4 + a * (a < 4))
    saved = n * a * (q + 2 * kv + q) + n * shape.heads * 4
    if setup.padded_rows: saved += n * a * 2 * (q - kv) + squares * a
    return saved


def adapter_saved(shape: ModelShape, setup: Setup) -> float:
    """xA (N, R) of each adapted layer of a block, and its dropout mask (N, in) of one byte each."""
    if setup.adapter != "lora": return 0.0
    a, targets = BYTES[setup.precision], shape.targets(as_given(setup.targets))
    linears = shape.linears()
    each = [setup.lora_rank * a + (linears[t][1] if setup.lora_dropout else 0)
            for t in targets if t in linears]
    return setup.tokens * sum(each)


def block_input(shape: ModelShape, setup: Setup) -> float:
    """(N, D): all that is kept of a recomputed block."""
    return setup.tokens * shape.hidden * BYTES[setup.precision]


def saved_at(shape: ModelShape, setup: Setup, block: int) -> float:
    """Bytes saved in all blocks when the backward has come to `block` (from 0), that one included.

    A recomputed block is whole while its backward runs. A compiled one saves its input itself.
    """
    whole, inputs = saved_by_block(shape, setup), block_input(shape, setup)
    n = setup.recomputed(shape)
    waiting = min(n, block + 1) * inputs + max(0, block + 1 - n) * whole
    if block >= n: return waiting
    return waiting + whole - (inputs if setup.compile else 0)


def dequantized(shape: ModelShape, setup: Setup, name: str) -> float:
    """Bytes of one linear weight in the compute dtype, made for a product and freed after it."""
    if setup.quant == "none": return 0.0
    out, wide = shape.linears()[name]
    return out * wide * BYTES[setup.precision]


def backward_working(shape: ModelShape, setup: Setup) -> float:
    """The most that a block's backward holds beyond what was saved, near its start.

    In down_proj's backward: the block's output gradient, the gradient of its input (N, I), and the
    dequantized weight or, with dropout, two more of (N, I). Eager, then in the product's backward
    three of (N, I), while down_proj's saved input is gone; compiled, these are taken to reuse what
    was saved, which one measured peak bears out (13.3 GiB; 13.6 without).
    """
    n, a = setup.tokens, BYTES[setup.precision]
    wide, hidden = n * shape.intermediate * a, n * shape.hidden * a
    kept = inputs_kept(shape, setup)["down_proj"]
    dropout = 2 * wide if kept and setup.adapter == "lora" and setup.lora_dropout else 0
    own_gradient = 0.0
    if setup.adapter == "none":
        own_gradient = shape.hidden * shape.intermediate * a
    down = wide + max(dequantized(shape, setup, "down_proj"), dropout)
    product = 0 if setup.compile else (3 - kept) * wide
    return hidden + own_gradient + max(down, product)


def backward_end(shape: ModelShape, setup: Setup) -> float:
    """What a block's backward holds in its first linear layers, when only the first norm is left.

    The gradients of the block's output and of q's input and output, the saved input of q, k, v, and
    the norm's; all of the block's weight gradients.
    """
    n, a = setup.tokens, BYTES[setup.precision]
    first = next(iter(shape.linears()))
    rows = n * shape.hidden * (4 * a + (a if setup.compile else 4))
    grads = trained_bytes(block_weights(shape, setup), 1, setup)
    return rows + dequantized(shape, setup, first) + grads


# ---- Loss --------------------------------------------------------------------------------------

def loss_bytes(shape: ModelShape, setup: Setup) -> float:
    """Logits and what is made of them (losses.py), and the head's gradient where it is trained.

    At a chunk's widest place: logits and their gradient in the compute dtype, as the fused kernel
    of a GPU leaves them, and the gradient of the chunk before. An adapted head takes transformers'
    own loss: all tokens' logits, cast to fp32, their log-softmax and both gradients.
    """
    a, n = BYTES[setup.precision], setup.tokens
    if setup.adapter == "lora" and "lm_head" in shape.targets(as_given(setup.targets)):
        return n * shape.vocab * (12 + 2 * a)
    rows = min(n, CHUNK_TOKENS)
    head = shape.vocab * shape.hidden * (4 + a) if setup.adapter == "none" else 0
    return rows * shape.vocab * a * (3 if n > CHUNK_TOKENS else 2) + head


# ---- The peak ----------------------------------------------------------------------------------

PARTS = ("linears", "absmax", "embedding", "head", "norms", "adapters", "optimizer", "gradients",
         "activations", "working", "unsharded", "loss", "workspace")
NOT_ALLOCATED = ("slack", "context")
EXPLAINED = dict(
    linears="linear weights of the blocks", absmax="scales of 4-bit weights",
    embedding="input embedding", head="output head", norms="norms and biases",
    adapters="adapters", optimizer="optimizer states", gradients="gradients of trained weights",
    activations="saved for the backward", working="in use inside one block",
    unsharded="gathered by FSDP", loss="logits and their gradients", workspace="cuBLAS",
    slack="reserved by the allocator, unused", context="CUDA context and NCCL")


@dataclass(frozen=True)
class Memory:
    """GiB per GPU at the peak of a step, by part, and GiB of host memory per machine."""
    parts: dict[str, float]
    moment: str                        # when the peak is
    moments: dict[str, float]          # allocated GiB at each moment
    host_parts: dict[str, float] = field(default_factory=dict)

    @property
    def peak_allocated(self) -> float:
        """As torch.cuda.max_memory_allocated, in GiB."""
        return sum(v for k, v in self.parts.items() if k not in NOT_ALLOCATED)

    @property
    def peak_reserved(self) -> float:
        """As torch.cuda.max_memory_reserved, in GiB."""
        return self.peak_allocated + self.parts["slack"]

    @property
    def total(self) -> float:
        """GiB that the card must have: reserved memory, the context and NCCL's buffers."""
        return sum(self.parts.values())

    @property
    def host(self) -> float:
        """GiB of host memory per machine, all its ranks together."""
        return sum(self.host_parts.values())

    @property
    def largest(self) -> str:
        """The part that takes most."""
        return max(self.parts, key=self.parts.get)

    def fits(self, memory_gib: float) -> bool:
        """True if a card of this size holds it."""
        return self.total <= memory_gib

    def table(self) -> str:
        """The parts in lines for people; empty ones are left out."""
        rows = [(name, gib, EXPLAINED[name]) for name, gib in self.parts.items() if gib >= 0.005]
        lines = [f"{name:<12} {gib:8.2f} GiB  {text}" for name, gib, text in rows]
        lines += [f"{'total':<12} {self.total:8.2f} GiB  per GPU; {self.peak_allocated:.2f} "
                  f"allocated, peak at: {self.moment}",
                  f"{'host':<12} {self.host:8.2f} GiB  per machine"]
        return "\n".join(lines)


def memory(shape: ModelShape, setup: Setup | None = None, **changes) -> Memory:
    """The peak memory of one training step after the first, with its parts.

    `changes` are fields of `Setup`: `memory(shape, world_size=2, batch_size=4)`. Raises ValueError
    for an unknown target module or a number out of range.
    """
    setup = replace(setup or Setup(), **changes)
    static = static_parts(shape, setup)
    found = {name: static | parts for name, parts in moments(shape, setup).items()}
    totals = {name: sum(parts.values()) for name, parts in found.items()}
    moment = max(totals, key=totals.get)
    parts = {name: found[moment].get(name, 0.0) for name in PARTS}
    moving = sum(parts[p] for p in ("gradients", "activations", "working", "unsharded", "loss"))
    parts["slack"] = SLACK_SHARE * moving
    parts["context"] = GIB * (CONTEXT_GIB + (NCCL_GIB if setup.world_size > 1 else 0))
    return Memory({name: b / GIB for name, b in parts.items()}, moment,
                  {name: b / GIB for name, b in totals.items()}, host_memory(shape, setup))


def static_parts(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Bytes that stay on the GPU through the whole step."""
    parts = dict(workspace=CUBLAS_WORKSPACE)
    if setup.cpu_offload: return parts
    return parts | resident_bytes(shape, setup) | dict(optimizer=optimizer_bytes(shape, setup))


def moments(shape: ModelShape, setup: Setup) -> dict[str, dict[str, float]]:
    """Bytes of what comes and goes, at each moment that can be the peak.

    Between the last block and the first everything changes evenly, so the ends are enough.
    """
    n, d, a = setup.tokens, shape.hidden, BYTES[setup.precision]
    last = shape.layers - 1
    window = forward_window(shape, setup)
    held = held_gradients(shape, setup)
    embedding, root = (gathered(w(shape, setup), setup) for w in (embedding_weights, root_weights))
    after_blocks = saved_by_block(shape, setup) * (shape.layers - setup.recomputed(shape))
    after_blocks += block_input(shape, setup) * setup.recomputed(shape)
    # The final norm is never compiled: its input in fp32 and its output, then the loss's gradient.
    found = {
        "embedding": dict(unsharded=root + max(root, embedding) + embedding, gradients=held),
        "loss": dict(activations=after_blocks + n * d * (4 + a), loss=loss_bytes(shape, setup)
                     + n * d * a, unsharded=window, gradients=held),
        # Its backward in fp32: the input and, in that of its square, five tensors of its size.
        "final norm": dict(activations=after_blocks + n * d * 4, working=5 * n * d * 4,
                           unsharded=window, gradients=held + root_gradient(shape, setup))}
    for name, block in (("last block", last), ("block before it", last - 1), ("first block", 0)):
        if block >= 0: found[name] = in_block_backward(shape, setup, block)
    grads = all_gradients(shape, setup)
    bucket = min(grads, BUCKET_BYTES) if setup.world_size > 1 and not setup.sharded else 0.0
    found["gradients reduced"] = dict(gradients=grads + bucket)
    return found


def in_block_backward(shape: ModelShape, setup: Setup, block: int) -> dict[str, float]:
    """What is alive at the widest place of one block's backward."""
    saved, work = saved_at(shape, setup, block), backward_working(shape, setup)
    own = saved_by_block(shape, setup)
    end_saved, end_work = saved - own, backward_end(shape, setup)
    if saved + work < end_saved + end_work: saved, work = end_saved, end_work
    return dict(activations=saved, working=work, unsharded=backward_window(shape, setup, block),
                gradients=gradients_at(shape, setup, block))


def unit_bytes(shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Gathered bytes of the unit whose backward comes first in a block, and of the one after it.

    A block is one unit, or its MLP and its attention are two. `min_params` is taken as `block`.
    """
    if setup.wrap_policy == "attention_mlp":
        return tuple(gathered(linear_weights(shape, setup, part), setup)
                     for part in ("mlp", "attention"))
    block = gathered(block_weights(shape, setup), setup)
    return block, block


def forward_window(shape: ModelShape, setup: Setup) -> float:
    """Gathered bytes while the loss is computed, inside the root's forward.

    The root's weights; the flat buffer of the last unit's all-gather, which FSDP2 frees at the next
    one; and without resharding, every block and the embedding.
    """
    if not setup.sharded: return 0.0
    root = gathered(root_weights(shape, setup), setup)
    flat = unit_bytes(shape, setup)[0] if setup.shard_ranks > 1 else 0.0
    if setup.resharded: return root + flat
    return (root + flat + gathered(embedding_weights(shape, setup), setup)
            + shape.layers * gathered(block_weights(shape, setup), setup))


def backward_window(shape: ModelShape, setup: Setup, block: int) -> float:
    """Gathered bytes in a block's backward.

    Its unit, and the flat buffer of the next, gathered ahead. The unit before the first block is
    the embedding, which FSDP2 gathers ahead as well though no backward needs it. Without resharding
    all blocks up to this one, and the embedding, whose hook waits for the end of the backward.
    """
    if not setup.sharded: return 0.0
    root = gathered(root_weights(shape, setup), setup)
    embedding = gathered(embedding_weights(shape, setup), setup)
    if not setup.resharded:
        return root + embedding + (block + 1) * gathered(block_weights(shape, setup), setup)
    unit, ahead = unit_bytes(shape, setup)
    if block == 0 and setup.wrap_policy != "attention_mlp": ahead = embedding
    if not setup.backward_prefetch or setup.shard_ranks == 1: ahead = 0.0
    return root + unit + ahead


def all_gradients(shape: ModelShape, setup: Setup) -> float:
    """Gradients of one rank after the backward; the host has them under CPU offload."""
    if setup.sharded and setup.no_sync and setup.accumulation > 1:  # whole, in the reduce dtype
        return all_trained(shape, setup, 1, "fp32")
    return 0.0 if setup.cpu_offload else all_trained(shape, setup, setup.shard_ranks)


def held_gradients(shape: ModelShape, setup: Setup) -> float:
    """Gradients of earlier micro-batches, which wait through a forward."""
    return all_gradients(shape, setup) if setup.accumulation > 1 else 0.0


def root_gradient(shape: ModelShape, setup: Setup) -> float:
    """The root's own gradients, whole until the backward ends."""
    return trained_bytes(root_weights(shape, setup), 1, setup)


def gradients_at(shape: ModelShape, setup: Setup, block: int) -> float:
    """Gradients alive when the backward has come to `block`.

    Those of the blocks after it, reduced; the fp32 input of the last reduce-scatter, which FSDP2
    keeps until the next; and the root's.
    """
    weights, later = block_weights(shape, setup), shape.layers - 1 - block
    grads = held_gradients(shape, setup)
    if setup.accumulation == 1 and not setup.cpu_offload:
        grads += later * trained_bytes(weights, setup.shard_ranks, setup)
    if setup.sharded and later: grads += trained_bytes(weights, 1, setup, "fp32")
    return grads + root_gradient(shape, setup)


def host_memory(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """GiB of host memory of one machine by part: its ranks, and what CPU offload puts there.

    torch's pinned allocator rounds each tensor up to a power of two.
    """
    ranks = setup.node_gpus
    parts = dict(processes=PROCESS_HOST_GIB * ranks)
    if not setup.cpu_offload: return parts
    shards = [(w.shard(setup.shard_ranks), count) for w, count in all_weights(shape, setup)]
    pinned = sum(count * size for size, count in shards)
    rounded = sum(count * 2 ** (int(size) - 1).bit_length() for size, count in shards if size > 1)
    grads = all_trained(shape, setup, setup.shard_ranks)
    found = dict(weights=pinned, gradients=grads, optimizer=optimizer_bytes(shape, setup),
                 rounding=max(0.0, rounded - pinned))
    return parts | {name: ranks * b / GIB for name, b in found.items()}


# ---- FLOPs -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Flops:
    """Floating-point operations per token of one step, by what does them."""
    linears: float      # blocks and head, forward and backward
    adapters: float
    attention: float
    recompute_linears: float    # linears and adapters run again
    recompute_attention: float

    @property
    def total(self) -> float:
        return (self.linears + self.adapters + self.attention + self.recompute_linears
                + self.recompute_attention)


def flops_per_token(shape: ModelShape, setup: Setup) -> Flops:
    """What the hardware does per token, a product of (m, k) and (k, n) being 2 m k n.

    A weight costs 2 in the forward and 2 for dX; trained ones 2 more for dW; 2 again where the
    block is recomputed. Causal attention does half of Q K^T and P V, 2 T q per layer; a flash
    backward recomputes Q K^T, which makes it 2.5 times the forward (arXiv:2307.08691). The
    embedding is a lookup, and the chunked loss makes the head's dX in the forward.
    """
    again = setup.recomputed(shape) / shape.layers
    linears = shape.params()["linears"]
    head = shape.vocab * shape.hidden
    adapters = adapter_params(shape, setup)
    attention = 2 * setup.context_length * shape.heads * shape.head_dim * shape.layers
    each = 6 if setup.adapter == "none" else 4
    return Flops(linears=each * (linears + head), adapters=6 * adapters, attention=3.5 * attention,
                 recompute_linears=2 * again * (linears + adapters),
                 recompute_attention=again * attention)


def adapter_params(shape: ModelShape, setup: Setup) -> int:
    """Weights of the adapters, 0 without any."""
    if setup.adapter != "lora": return 0
    return shape.lora_params(setup.lora_rank, as_given(setup.targets))


def model_flops_per_token(shape: ModelShape, setup: Setup) -> float:
    """FLOPs per token that the task itself needs, as benchmark rows count them.

    4 per frozen weight and 6 per trained one, linears and head, plus 6 T q per layer for causal
    attention (half of the square, backward twice the forward). Recomputation does not count.
    """
    linears = shape.params()["linears"] + shape.vocab * shape.hidden
    each = 6 if setup.adapter == "none" else 4
    attention = 6 * setup.context_length * shape.heads * shape.head_dim * shape.layers
    return each * linears + 6 * adapter_params(shape, setup) + attention


def model_tflops(shape: ModelShape, setup: Setup, tokens_per_second: float) -> float:
    """Model TFLOP/s at a measured rate of tokens; per GPU if the rate is."""
    return model_flops_per_token(shape, setup) * tokens_per_second / 1e12


# ---- Time --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part, none hidden behind another."""
    parts: dict[str, float]
    tokens_per_gpu: int        # in one optimizer step
    calibrated: bool           # False where only the GPU's datasheet is known

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_gpu / self.total

    def table(self) -> str:
        """The parts in lines for people; empty ones are left out."""
        lines = [f"{name:<14} {seconds:8.3f} s" for name, seconds in self.parts.items()
                 if seconds >= 0.0005]
        note = "" if self.calibrated else "; uncalibrated: from the GPU's datasheet"
        return "\n".join(lines + [f"{'step':<14} {self.total:8.3f} s  "
                                  f"{self.tokens_per_second_per_gpu:,.0f} tok/s per GPU{note}"])


def step_seconds(shape: ModelShape, gpu: Gpu, setup: Setup | None = None, *,
                 link_gb_s: float | None = None, internode_gb_s: float = INTERNODE_GB_S, **changes
                 ) -> StepTime:
    """Predicted time of one optimizer step, with its parts.

    Products and attention over their rates, passes over activations and dequantization over the
    memory's, then what transfers and the CPU's launches take beyond that. `link_gb_s` replaces the
    GPU's link between peers, `internode_gb_s` is that between machines, per GPU.
    """
    setup = replace(setup or Setup(), **changes)
    link = link_gb_s or gpu.peer_gb_s(setup.node_gpus)
    if setup.shard_ranks > setup.node_gpus: link = min(link, internode_gb_s)
    forward, backward = block_seconds(shape, gpu, setup)
    compute = compute_parts(shape, gpu, setup)
    busy = sum(compute.values())
    launches = launch_seconds(shape, setup)
    exposed, offloaded = exposed_seconds(shape, gpu, setup, forward, backward, link)
    micro = compute | dict(launches=max(0.0, launches - busy), communication=exposed,
                           offload=offloaded)
    parts = {name: setup.accumulation * seconds for name, seconds in micro.items()}
    parts["communication"] += once_per_step(shape, setup, link, internode_gb_s)
    parts["optimizer"] = optimizer_seconds(shape, gpu, setup)
    return StepTime(parts, setup.tokens * setup.accumulation, gpu.calibrated)


def compute_parts(shape: ModelShape, gpu: Gpu, setup: Setup) -> dict[str, float]:
    """Seconds of one micro-batch's kernels."""
    flops, n = flops_per_token(shape, setup), setup.tokens
    # fp32 products run without tensor cores, at about a sixteenth of bf16's rate.
    rate = gpu.reached_tflops * 1e12 / (16 if setup.precision == "fp32" else 1)
    copies = gpu.reached_bandwidth_gb_s * 1e9
    passes = 2 + setup.recomputed(shape) / shape.layers
    per_pass = shape.layers * sum(dequantize_traffic(shape, setup).values())
    logit_bytes = n * shape.vocab * 7 * BYTES[setup.precision]  # seven passes of a fused kernel
    traffic = activation_traffic(shape, setup)
    again = setup.recomputed(shape)
    moved = shape.layers * sum(traffic) + again * traffic[0]
    return dict(
        linears=n * (flops.linears + flops.adapters) / (rate * MATMUL_SHARE),
        attention=n * flops.attention / (rate * ATTENTION_SHARE),
        recompute=n * flops.recompute_linears / (rate * MATMUL_SHARE)
        + n * flops.recompute_attention / (rate * ATTENTION_SHARE)
        + again * traffic[0] / (copies * COPY_SHARE),
        activations=(moved - again * traffic[0]) / (copies * COPY_SHARE),
        dequantization=passes * per_pass / copies, loss=logit_bytes / copies)


def dequantize_traffic(shape: ModelShape, setup: Setup) -> dict[str, float]:
    """Bytes read and written to dequantize each linear weight of a block once."""
    if setup.quant == "none": return {}
    packed = 0.5 + setup.absmax_bytes / BLOCKSIZE
    return {name: out * wide * (packed + BYTES[setup.precision])
            for name, (out, wide) in shape.linears().items()}


def activation_traffic(shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Bytes that a block's forward and backward move besides products' operands, counted by pass.

    Adapters: y is read and written again, x read; backward dx and dy likewise. Norms with
    residuals, rotation and activation: fused where compiled, one pass per operation where eager.
    """
    n, a = setup.tokens, BYTES[setup.precision]
    d, i = shape.hidden, shape.intermediate
    rotated = (shape.heads + shape.kv_heads) * shape.head_dim
    targets = shape.targets(as_given(setup.targets)) if setup.adapter == "lora" else ()
    adapted = [size for name, size in shape.linears().items() if name in targets]
    out, wide = sum(o for o, _ in adapted), sum(w for _, w in adapted)
    norms = shape.norms_per_block / 2
    rest = 6 * d * norms + 4 * rotated + 3 * i, 10 * d * norms + 4 * rotated + 6 * i
    if not setup.compile:
        rest = 42 * d * norms + 10 * rotated + 5 * i, 84 * d * norms + 10 * rotated + 8 * i
    if setup.lora_dropout: rest = rest[0] + 4 * wide, rest[1] + 8 * wide
    return n * a * (2 * out + wide + rest[0]), n * a * (2 * out + 3 * wide + rest[1])


def block_seconds(shape: ModelShape, gpu: Gpu, setup: Setup) -> tuple[float, float]:
    """Seconds of one block's forward, and of its backward with recomputation."""
    parts = compute_parts(shape, gpu, setup)
    busy = max(sum(parts.values()), launch_seconds(shape, setup)) / shape.layers
    forward = busy / (4 if setup.recomputed(shape) else 3)
    return forward, busy - forward


def launch_seconds(shape: ModelShape, setup: Setup) -> float:
    """Seconds that the CPU needs to launch one micro-batch: forward 1, backward 2, recompute 1."""
    once = LAUNCH_SECONDS["compiled" if setup.compile else "eager"]
    hooks = 2 * SHARDED_LAUNCH_SECONDS if setup.sharded else 0.0
    return shape.layers * (3 * once + hooks) + setup.recomputed(shape) * once


def exposed_seconds(shape: ModelShape, gpu: Gpu, setup: Setup, forward: float, backward: float,
                    link: float) -> tuple[float, float]:
    """Seconds of one micro-batch's gathers and reduce-scatters, and of host copies, not hidden.

    A unit is gathered while the one before it computes, so what shows is what takes longer than
    that, the first units of a pass, and the copy out of the flat buffer on the compute stream.
    """
    if not setup.sharded: return 0.0, 0.0
    n, several = setup.shard_ranks, setup.shard_ranks > 1
    network = (n - 1) / n / (link * 1e9)  # seconds per gathered byte
    pcie = 1 / n / (gpu.host_gb_s * 1e9) if setup.cpu_offload else 0.0
    block = block_weights(shape, setup)
    unit = gathered(block, setup)
    outer = sum(gathered(w(shape, setup), setup) for w in (embedding_weights, root_weights))
    gather = unit * network + COLLECTIVE_LATENCY * several
    reduce = trained_bytes(block, 1, setup, "fp32") * network
    copy_out = 2 * unit / (gpu.reached_bandwidth_gb_s * 1e9) * several
    # One pass over the blocks each: how often a unit is gathered, reduced, and what can hide it.
    passes = [(1, 0, forward * several),
              (int(setup.resharded), 1, backward * several * setup.backward_prefetch)]
    shown, from_host = outer * network + gather, (outer + unit) * pcie
    for gathers, reduces, room in passes:
        transfer = gathers * gather + reduces * reduce
        shown += shape.layers * (gathers * copy_out + max(0.0, transfer - room))
        from_host += shape.layers * max(0.0, gathers * unit * pcie - max(0.0, room - transfer))
    return shown, from_host


def once_per_step(shape: ModelShape, setup: Setup, link: float, internode_gb_s: float) -> float:
    """Seconds of all-reduce at the end: ddp's gradients, or those of the hybrid's replicas."""
    replicas = setup.world_size // setup.shard_ranks
    if replicas < 2: return 0.0
    if setup.world_size > setup.node_gpus: link = min(link, internode_gb_s)
    size = all_trained(shape, setup, setup.shard_ranks, "" if setup.strategy == "ddp" else "fp32")
    return 2 * (replicas - 1) / replicas * size / (link * 1e9)


def optimizer_seconds(shape: ModelShape, gpu: Gpu, setup: Setup) -> float:
    """Seconds of the update: weight and states read and written, gradient read; on the host under
    CPU offload."""
    size = all_trained(shape, setup, setup.shard_ranks)
    own = setup.precision if setup.adapter == "none" else setup.adapter_dtype
    if setup.cpu_offload: return size / BYTES[own] / HOST_OPTIMIZER_PER_SECOND
    passes = 3 + 2 * OPTIMIZER_STATES[setup.optimizer]
    return passes * size / (gpu.reached_bandwidth_gb_s * 1e9)


# ---- A whole run -------------------------------------------------------------------------------

@dataclass(frozen=True)
class RunCost:
    """Wall time and money of a run."""
    hours: float
    dollars: float | None   # None where no price is known
    price_source: str


def run_cost(step: StepTime, gpu: Gpu, *, gpus: int, examples: int, length: int, epochs: float = 1,
             price_per_hour: float | None = None) -> RunCost:
    """Hours and dollars to see `examples` rows of `length` tokens `epochs` times on `gpus` cards.

    `price_per_hour` of one GPU replaces the catalogue's. Loading and saving are not counted.
    """
    for name, value in (("gpus", gpus), ("examples", examples), ("length", length),
                        ("epochs", epochs)):
        if not value > 0: raise ValueError(f"{name} must be above 0, got {value}")
    tokens = examples * length * epochs
    hours = tokens / (step.tokens_per_second_per_gpu * gpus) / 3600
    price = gpu.price_per_hour if price_per_hour is None else price_per_hour
    source = gpu.price_source if price_per_hour is None else "given"
    return RunCost(hours, None if price is None else hours * price * gpus, source)
