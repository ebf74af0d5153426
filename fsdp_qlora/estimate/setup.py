"""The settings that decide memory and time, from a run's config or given one by one.

The constants here are shared by the modules beside this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from ..catalog.arch import ModelShape
from ..choices import OPTIMIZERS, POLICIES, STRATEGIES
from ..config import RunConfig, block_policies, plan_batches
from ..config.run import graphs_pay, has_flash_attention_4

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
Runs = list[tuple[str, int]]  # activation policies from the first block on: name, number of blocks


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The settings that decide memory and time; defaults are those of `RunConfig`."""

    world_size: int = 1
    gpus_per_node: int | None = None  # None: all on one machine
    strategy: str = "full_shard"
    shard_group_size: int = -1  # hybrid strategies; -1 as in RunConfig
    wrap_policy: str = "block"
    backward_prefetch: bool = True
    gather_once: bool = False  # units stay gathered through the micro-batches of a step
    cpu_offload: bool = False
    trained_offload: bool | None = None  # None: where trained weights take an eighth of a GPU
    vocabulary_offload: bool | None = None  # None: as cpu_offload
    activation_offload: bool = False  # inputs of recomputed blocks wait on the host
    mlp_tiles: int = 1  # of recomputed blocks (../memory/tiled_mlp.py)
    activation_policy: str = "recompute_all"  # as --activation_policy: one name, or name:count,...
    quant: str = "nf4"
    absmax_bytes: int = 4
    adapter: str = "lora"
    lora_rank: int = 64
    rank_pattern: tuple[tuple[str, int], ...] = ()  # (layer name, its rank), where another
    targets: str | tuple[str, ...] | None = "all-linear"
    expert_targets: tuple[str, ...] = ()  # adapted weights of experts, by the ends of their names
    bias: str = "none"  # biases that are trained: all, or lora_only
    lora_dropout: float = 0.1
    whole_modules: tuple[str, ...] = ()  # trained beside the adapters, by the ends of their names
    only_modules: tuple[
        str, ...
    ] = ()  # all that full fine-tuning trains, by the same; (): everything
    blocks_adapted: int | None = None  # of all blocks; None: each
    changes_base: bool = False  # adapters begin as a part of the weights
    adapter_dtype: str = "fp32"
    optimizer: str = "adamw"
    precision: str = "bf16"  # that weights are stored in
    product_dtype: str = ""  # where autocast multiplies in another
    compute_dtype: str = "auto"  # fp8: products of frozen weights; else the precision
    keep_fp8_weights: bool = False  # made once, and kept (quantization/fp8_weight_cache.py)
    batch_size: float = 1  # rows per GPU and micro-batch; these three are means where rows
    context_length: float = 512  # differ in length (lengths.py)
    accumulation: float = 1
    no_sync: bool = False
    compile: bool = False  # where RunConfig says nothing, true on a GPU
    cuda_graphs: bool = False  # micro-batches are replayed, without the host's launches
    attention: str = "sdpa"
    padded_rows: bool = False  # a mask goes into attention, as where rows are padded

    def __post_init__(self):
        for name in (
            "world_size",
            "lora_rank",
            "batch_size",
            "context_length",
            "accumulation",
            "mlp_tiles",
        ):
            if not getattr(self, name) > 0:  # a mean may be below 1
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer}: choose {', '.join(OPTIMIZERS)}")

    @property
    def tokens(self) -> float:
        """N, the tokens of one micro-batch on one GPU."""
        return self.batch_size * self.context_length

    @property
    def node_gpus(self) -> int:
        return min(self.world_size, self.gpus_per_node or self.world_size)

    @property
    def shard_ranks(self) -> int:
        """n: ranks that share one copy of the weights; 1 under ddp."""
        strategy = STRATEGIES[self.strategy]
        if not strategy.shards:
            return 1
        if not strategy.is_hybrid:
            return self.world_size
        if self.shard_group_size > 0:
            return min(self.shard_group_size, self.world_size)
        if self.node_gpus < self.world_size:
            return self.node_gpus
        return max(1, self.world_size // 2)

    @property
    def sharded(self) -> bool:
        """True if FSDP owns the weights, which it does for one rank only to offload them."""
        return STRATEGIES[self.strategy].shards and (self.world_size > 1 or self.cpu_offload)

    @property
    def product_bytes(self) -> int:
        """Of a value that a product takes or gives."""
        return BYTES[self.product_dtype or self.precision]

    @property
    def has_lora(self) -> bool:
        """Whether there are adapters beside the weights."""
        return self.adapter in ("lora", "dora")

    @property
    def by_rows(self) -> bool:
        """True if a frozen embedding and head are sharded but no business of FSDP's."""
        return self.sharded and self.adapter != "none"

    @property
    def vocabulary_on_host(self) -> bool:
        """True if their shards wait in host memory."""
        off = self.cpu_offload if self.vocabulary_offload is None else self.vocabulary_offload
        return off and self.adapter != "none"

    @property
    def resharded(self) -> bool:
        """True if a unit's gathered weights are freed after its forward."""
        return not self.gather_once and bool(STRATEGIES[self.strategy].reshard_after_forward)

    def trains(self, name: str) -> bool:
        """True if the weights of a module are trained themselves."""
        return self.adapter == "none" or any(
            name.endswith(end.rsplit(".", 1)[-1]) for end in self.whole_modules
        )

    def dtype(self, name: str) -> str:
        """Storage of a module that is not quantized."""
        return (
            self.adapter_dtype if self.adapter != "none" and self.trains(name) else self.precision
        )

    def rank(self, name: str) -> int:
        """R of a layer's adapter."""
        ranks = dict(self.rank_pattern)
        return ranks.get(name, ranks.get(name.rsplit(".", 1)[-1], self.lora_rank))

    def tiles(self, policy: str) -> int:
        """Parts in which the MLP of a block with this policy is computed."""
        return self.mlp_tiles if POLICIES[policy].reruns_mlp else 1

    def replays(self, shape: ModelShape) -> bool:
        """Whether micro-batches are CUDA graphs, which some models rule out (training/cuda_graphs.py)."""
        no_masks = ("varlen", "fa4", "fa4_packed", *(() if shape.traits.windows else ("sdpa",)))
        return self.cuda_graphs and self.attention in no_masks and not shape.traits.experts

    def policies(self, shape: ModelShape) -> list[str]:
        """The activation policy of each block, from the first on; ValueError if it has no sense."""
        return block_policies(self.activation_policy, shape.layers)

    def runs(self, shape: ModelShape) -> Runs:
        """The same, blocks of one policy that follow each other together."""
        return [(policy, len([*blocks])) for policy, blocks in groupby(self.policies(shape))]


def setup_from_config(config: RunConfig, world_size: int, **changes) -> Setup:
    """The `Setup` of a run's settings on `world_size` GPUs, with `changes` to it.

    Where the policy is still to be chosen (--activation_budget_gib) every block is recomputed, where
    tiles are, MLPs are whole, and where it is open whether weights are kept in fp8, they are not.
    """
    batches, targets = plan_batches(config, world_size), config.target_modules
    return replace(
        Setup(
            world_size=world_size,
            strategy=config.sharding_strategy,
            shard_group_size=config.shard_group_size,
            wrap_policy=config.wrap_policy,
            backward_prefetch=config.backward_prefetch != "none",
            gather_once=config.gather_once,
            cpu_offload=config.use_cpu_offload,
            activation_offload=config.use_activation_cpu_offload,
            mlp_tiles=max(1, config.mlp_tiles),
            trained_offload=config.use_trained_cpu_offload,
            vocabulary_offload=config.use_vocabulary_cpu_offload,
            activation_policy=(
                "recompute_all" if config.activation_policy == "auto" else config.activation_policy
            ),
            quant=config.quant_type,
            absmax_bytes=1 if config.absmax_dtype == "int8" else 4,
            adapter=config.adapter,
            lora_rank=config.lora_rank,
            rank_pattern=tuple(config.rank_pattern.items()),
            targets=tuple(targets) if isinstance(targets, list) else targets,
            expert_targets=tuple(config.target_parameters or ()),
            bias=config.bias,
            lora_dropout=config.lora_dropout,
            whole_modules=(
                *config.whole_modules,
                *(("embed_tokens", "lm_head") if config.added_tokens else ()),
            ),
            changes_base=config.changes_base,
            only_modules=tuple(config.only_modules),
            blocks_adapted=len(config.adapted_blocks) if config.adapted_blocks else None,
            adapter_dtype=config.adapter_dtype,
            optimizer=config.optimizer,
            precision=config.stored_dtype,
            product_dtype=config.product_dtype * (config.product_dtype != config.stored_dtype),
            compute_dtype=config.compute_dtype,
            keep_fp8_weights=bool(config.keep_fp8_weights),
            batch_size=batches.micro_batch_size,
            context_length=config.context_length,
            accumulation=batches.accumulation,
            no_sync=config.no_sync,
            compile=config.compile is not False,
            attention=_estimated_attention(config),
            cuda_graphs=(
                graphs_pay(config, world_size) if config.cuda_graphs is None else config.cuda_graphs
            ),
        ),
        **changes,
    )


def _estimated_attention(config: RunConfig) -> str:
    """The attention kernel that is reckoned with; packed rows have their own (model/attention.py).

    FlashAttention 4 is, where it is installed on the machine that is asked.
    """
    name = config.attn_implementation
    if name == "flash_attention_4" or name == "auto" and has_flash_attention_4():
        return "fa4_packed" if config.packing else "fa4"
    if name == "auto":
        name = "sdpa"
    return "varlen" if config.packing and name == "sdpa" else name


def check_context(shape: ModelShape, setup: Setup):
    """Refuse rows longer than the model's positions, with a ValueError."""
    if shape.max_positions and setup.context_length > shape.max_positions:
        raise ValueError(
            f"--context_length {setup.context_length}: {shape.name} has "
            f"{shape.max_positions} positions; give at most as many"
        )
