"""Plan: what a run does, decided once. The estimate, the planner, the model and the bench all read it.

`RunConfig` is what was asked, with None and auto where the user has no opinion; a Plan has a value
everywhere (`estimate.resolve`). A field of a section is filled from the setting of its name, or of the
one that its metadata names. Field names are unique over the sections, so `Plan.change` needs no
section. Pure: no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any

from .catalog.arch import ModelShape
from .choices import OPTIMIZERS, POLICIES, STRATEGIES, Strategy
from .config import BatchPlan, block_policies

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
Runs = list[tuple[str, int]]  # activation policies from the first block on: name, number of blocks


def _of(setting: str, default: Any):
    """A field that a setting of another name fills."""
    return field(default=default, metadata=dict(setting=setting))


def _derived(default: Any):
    """A field that no setting fills alone: `draft_plan` does (plan_draft.py)."""
    return field(default=default, metadata=dict(setting=None))


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """What weights are stored in, what products are computed in, and by which attention."""

    stored_dtype: str = "bf16"  # of weights that are neither quantized nor adapters
    product_dtype: str = "bf16"
    attention: str = _derived("sdpa")  # kernel
    masked: bool = _derived(False)  # a mask of T x T goes into attention, as sdpa has for windows
    state_kernels: bool = _derived(True)  # mixers with a state run on kernels, not on plain torch
    rows_apart: bool = _derived(False)  # these see each packed row by itself, not compiled

    @property
    def product_bytes(self) -> int:
        """Of a value that a product takes or gives."""
        return BYTES[self.product_dtype]


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """The format of frozen weights, and what their products are computed in."""

    quant: str = _of("quant_type", "nf4")
    absmax_dtype: str = "fp32"
    compute_dtype: str = "auto"  # fp8: products of frozen weights; else the model's product_dtype
    keep_fp8_weights: bool = _derived(False)  # made once, and kept

    @property
    def absmax_bytes(self) -> int:
        """Of a block's scale."""
        return 1 if self.absmax_dtype == "int8" else 4


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """What is trained."""

    adapter: str = "lora"
    lora_rank: int = 64
    rank_pattern: tuple[tuple[str, int], ...] = ()  # (layer name, its rank), where another
    targets: str | tuple[str, ...] | None = _of("target_modules", "all-linear")
    expert_targets: tuple[str, ...] = _derived(())  # weights of experts, by the ends of their names
    bias: str = "none"  # biases that are trained: all, or lora_only
    lora_dropout: float = 0.0
    whole_modules: tuple[str, ...] = _derived(())  # trained beside the adapters, by the same
    only_modules: tuple[str, ...] = ()  # all that full fine-tuning trains; (): everything
    blocks_adapted: int | None = _derived(None)  # of all blocks; None: each
    changes_base: bool = False  # adapters begin as a part of the weights
    adapter_dtype: str = "fp32"

    @property
    def is_full(self) -> bool:
        """Whether the model's own weights are trained, and nothing beside them."""
        return self.adapter == "none"

    @property
    def has_lora(self) -> bool:
        """Whether there are adapters beside the weights."""
        return self.adapter in ("lora", "dora")

    def trains(self, name: str) -> bool:
        """True if the weights of a module are trained themselves."""
        return self.is_full or any(
            name.endswith(end.rsplit(".", 1)[-1]) for end in self.whole_modules
        )

    def rank(self, name: str) -> int:
        """R of a layer's adapter: of the first key that fits, as in PEFT.

        Blocks are known by their kinds, and layers by their last names: keys of a single block, or of all
        that a module holds (`self_attn.*`), do not fit.
        """
        last = name.rsplit(".", 1)[-1]
        for key, rank in self.rank_pattern:
            end = re.sub(r"^(\w+\.)*(?=\w+$)", "", key)  # of self_attn.q_proj
            if not re.search(r"\.\d+\.", key) and re.fullmatch(end, last):
                return rank
        return self.lora_rank


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """How weights are split over ranks, and when they are gathered."""

    world_size: int = _derived(1)
    gpus_per_node: int | None = _derived(None)  # None: all on one machine
    strategy: str = _of("sharding_strategy", "full_shard")
    shard_group_size: int = -1  # hybrid strategies; -1: those of a node, or half of a single node's
    wrap_policy: str = "block"
    min_wrap_params: int = 100_000_000
    backward_prefetch: str = "backward_pre"
    forward_prefetch: bool = False
    gather_once: bool = False  # units stay gathered through the micro-batches of a step

    @property
    def node_gpus(self) -> int:
        """Ranks of one machine."""
        return min(self.world_size, self.gpus_per_node or self.world_size)

    @property
    def facts(self) -> Strategy:
        """What is to be known of the strategy."""
        return STRATEGIES[self.strategy]

    @property
    def shard_ranks(self) -> int:
        """n: ranks that share one copy of the weights; 1 under ddp."""
        if not self.facts.shards:
            return 1
        if not self.facts.is_hybrid:
            return self.world_size
        if self.shard_group_size > 0:
            return min(self.shard_group_size, self.world_size)
        if self.node_gpus < self.world_size:
            return self.node_gpus
        return max(1, self.world_size // 2)

    @property
    def resharded(self) -> bool:
        """True if a unit's gathered weights are freed after its forward."""
        return not self.gather_once and bool(self.facts.reshard_after_forward)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What blocks keep for their backward, and what waits in host memory."""

    activation_policy: str = _derived("recompute_all")  # one name, or name:count,...
    reentrant_checkpointing: bool = False
    mlp_tiles: int = _derived(1)  # of recomputed blocks
    attention_tiles: int = _derived(1)  # groups of key-value heads, one after the other
    cpu_offload: bool = _of("use_cpu_offload", False)
    trained_offload: bool | None = _of("use_trained_cpu_offload", None)
    vocabulary_offload: bool | None = _of(
        "use_vocabulary_cpu_offload", None
    )  # None: as cpu_offload
    activation_offload: bool = _of("use_activation_cpu_offload", False)  # recomputed blocks' inputs
    attention_offload: bool = _derived(
        False
    )  # and attention's outputs, where that is all they keep

    def tiles(self, policy: str) -> int:
        """Parts in which the MLP of a block with this policy is computed."""
        return self.mlp_tiles if POLICIES[policy].reruns_mlp else 1

    def policies(self, shape: ModelShape) -> list[str]:
        """The activation policy of each block, from the first on; ValueError if it has no sense."""
        return block_policies(self.activation_policy, shape.layers)

    def runs(self, shape: ModelShape) -> Runs:
        """The same, blocks of one policy that follow each other together."""
        return [(policy, len([*blocks])) for policy, blocks in groupby(self.policies(shape))]


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """What updates the trained weights."""

    optimizer: str = "adamw"
    lr: float | None = None  # at its peak; None: the default, of a model whose width is not known

    def __post_init__(self):
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {self.optimizer}: choose {', '.join(OPTIMIZERS)}")


@dataclass(frozen=True, kw_only=True)
class LoopPlan:
    """How micro-batches are computed."""

    no_sync: bool = False
    compile: bool = _derived(False)
    cuda_graphs: bool = _derived(False)  # they are replayed, without the host's launches


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run, decided: its sections, and what was chosen where the user left it open.

    `Plan()` has the settings' own defaults, with one row a step, on one GPU and eager.
    """

    model: ModelPlan = ModelPlan()
    quantization: QuantizationPlan = QuantizationPlan()
    adapter: AdapterPlan = AdapterPlan()
    sharding: ShardingPlan = ShardingPlan()
    memory: MemoryPlan = MemoryPlan()
    batch: BatchPlan = BatchPlan()
    optimizer: OptimizerPlan = OptimizerPlan()
    loop: LoopPlan = LoopPlan()
    choices: tuple[str, ...] = field(default=(), compare=False)  # with the reasons, a line each

    def __post_init__(self):
        for name in _POSITIVE:
            if not self.value(name) > 0:  # a mean may be below 1
                raise ValueError(f"{name} must be 1 or more, got {self.value(name)}")

    def change(self, **changes: Any) -> Plan:
        """The plan with other values of fields, whichever sections they are in.

        Raises TypeError for a name that no section has.
        """
        sections: dict[str, dict] = {}
        for name, value in changes.items():
            if name not in _SECTION_OF:
                raise TypeError(f"no section of a plan has a field {name}")
            sections.setdefault(_SECTION_OF[name], {})[name] = value
        return replace(
            self, **{s: replace(getattr(self, s), **values) for s, values in sections.items()}
        )

    def choose(self, reason: str, **changes: Any) -> Plan:
        """`change`, with a line that tells users what was chosen and why."""
        return replace(self.change(**changes), choices=(*self.choices, reason))

    def value(self, name: str) -> Any:
        """The value of a field, whichever section it is in."""
        return getattr(getattr(self, _SECTION_OF[name]), name)

    def setting(self, name: str) -> Any:
        """The value of the field that a setting fills, by the setting's name."""
        return self.value(_FIELD_OF.get(name, name))

    @property
    def sharded(self) -> bool:
        """True if FSDP owns the weights, which it does for one rank only to offload them."""
        split = self.sharding.world_size > 1 or self.memory.cpu_offload
        return self.sharding.facts.shards and split

    @property
    def gathers_inside_blocks(self) -> bool:
        """Whether FSDP has hooks inside of blocks, which break the graph that torch would make of one."""
        return self.sharded and self.sharding.wrap_policy in ("attention_mlp", "min_params")

    @property
    def weights_stay(self) -> bool:
        """Whether every GPU holds the blocks' weights whole, and in one place."""
        whole = not self.sharding.facts.shards or self.sharding.world_size == 1
        return whole and not self.memory.cpu_offload

    @property
    def by_rows(self) -> bool:
        """True if a frozen embedding and head are sharded but no business of FSDP's."""
        return self.sharded and not self.adapter.is_full

    @property
    def vocabulary_on_host(self) -> bool:
        """True if their shards wait in host memory."""
        off = self.memory.vocabulary_offload
        return (self.memory.cpu_offload if off is None else off) and not self.adapter.is_full

    @property
    def trained_dtype(self) -> str:
        """What trained weights are stored in, and their gradients."""
        return self.model.stored_dtype if self.adapter.is_full else self.adapter.adapter_dtype

    def dtype(self, name: str) -> str:
        """Storage of a module that is not quantized."""
        return self.trained_dtype if self.adapter.trains(name) else self.model.stored_dtype

    def replays(self, shape: ModelShape) -> bool:
        """Whether micro-batches are CUDA graphs, which some models rule out (training/cuda_graphs.py)."""
        no_masks = (*WITHOUT_MASKS, *(() if shape.traits.windows else ("sdpa",)))
        widths = (n for size in shape.expert_linears().values() for n in size)
        fits = not shape.has_state and not any(n % 8 for n in widths)
        return self.loop.cuda_graphs and self.model.attention in no_masks and fits


# Attention that needs no mask for windows and packed rows (model/attention.py).
WITHOUT_MASKS = ("varlen", "fa4", "fa4_packed", "torch_fa", "torch_fa_packed")
_POSITIVE = (
    "world_size",
    "lora_rank",
    "micro_batch_size",
    "context_length",
    "accumulation",
    "mlp_tiles",
    "attention_tiles",
)
SECTIONS: dict[str, Any] = {f.name: type(f.default) for f in fields(Plan) if f.name != "choices"}
_SECTION_OF = {f.name: name for name, section in SECTIONS.items() for f in fields(section)}
_FIELD_OF = {
    f.metadata["setting"]: f.name
    for section in SECTIONS.values()
    for f in fields(section)
    if f.metadata.get("setting")
}
