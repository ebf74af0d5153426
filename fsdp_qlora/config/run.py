"""RunConfig: the settings of one run, checked, and what follows from them alone.

All groups of `options/` in one flat namespace, which is what users know from the command line. Pure:
no torch here, so that `--help` and every check answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import metadata
from typing import Any

from ..choices import STRATEGIES, Strategy
from ..choices.formats import format_name
from .checks import check_choices, check_numbers, check_types
from .combinations import check_data_together, check_remote_code, check_together
from .lists import (
    TERMINAL_FORMS,
    block_numbers,
    module_pattern,
    names_in,
    token_list,
    whole_path,
)
from .options import (
    OLD_ALL_TARGETS,
    PRECISIONS,
    TRAIN_TYPES,
    AdapterOptions,
    BatchOptions,
    CheckpointOptions,
    DataOptions,
    EvaluationOptions,
    LaunchOptions,
    ModelOptions,
    OptimizerOptions,
    OutputOptions,
    ProfileOptions,
    ShardingOptions,
)
from .settings import AUTO, parts_of


@dataclass(kw_only=True)
class RunConfig(
    ModelOptions,
    AdapterOptions,
    DataOptions,
    EvaluationOptions,
    BatchOptions,
    ShardingOptions,
    OptimizerOptions,
    OutputOptions,
    CheckpointOptions,
    LaunchOptions,
    ProfileOptions,
):
    """All settings of one run. Raises ValueError, naming the flag and the remedy, if they clash."""

    typed = frozenset[str]()  # names of those on the command line, at their defaults too

    def __post_init__(self):
        check_types(self)
        check_choices(self)
        self.expand()
        check_numbers(self)
        check_together(self)
        check_data_together(self)
        check_remote_code(self)

    def expand(self) -> None:
        """Resolve `train_type` into `quant` and `adapter` where these are not given, and ~ and variables in
        paths: a shell leaves --output_dir=~/run and a recipe's path as they are.
        """
        for f in fields(self):
            if f.metadata["is_path"] and (given := getattr(self, f.name)):
                setattr(self, f.name, whole_path(f.name, given))
        quant, adapter = TRAIN_TYPES[self.train_type]
        if self.quant == "auto":
            self.quant = quant
        if self.adapter == "auto":
            self.adapter = adapter
        if self.activation_policy == "auto" and self.activation_budget_gib is None:
            recompute = self.use_gradient_checkpointing
            self.activation_policy = "recompute_all" if recompute else "keep_all"

    @property
    def source(self) -> dict[str, Any]:
        """Which version of --model_name is read, and whether its code is run."""
        return dict(revision=self.revision, trust_remote_code=self.trust_remote_code)

    @property
    def quant_type(self) -> str:
        """The format of frozen weights with its number of bits, as `choices.FORMATS` names it."""
        return format_name(self.quant, self.n_bits)

    @property
    def strategy(self) -> Strategy:
        """The facts of --sharding_strategy; while it is still to be planned, of its default."""
        return STRATEGIES.get(self.sharding_strategy, STRATEGIES["full_shard"])

    @property
    def stored_dtype(self) -> str:
        """What weights are stored in that are neither quantized nor adapters."""
        return PRECISIONS[self.precision][0]

    @property
    def autocast_dtype(self) -> str | None:
        """What autocast multiplies in, if it is on."""
        return PRECISIONS[self.precision][1]

    @property
    def product_dtype(self) -> str:
        """What --precision multiplies in."""
        return self.autocast_dtype or self.stored_dtype

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16, where small ones would be lost."""
        return self.autocast_dtype == "fp16"

    @property
    def has_lora(self) -> bool:
        """Whether there are adapters of PEFT's beside the weights."""
        return self.adapter in ("lora", "dora")

    @property
    def has_full_bins(self) -> bool:
        """Whether a step is a number of full bins, and so every micro-batch of one shape."""
        return self.packing and self.global_batch_size == AUTO

    @property
    def units_per_step(self) -> int:
        """Rows, or full bins, of a step where they are given; else AUTO."""
        return self.bins_per_step if self.has_full_bins else self.global_batch_size

    def accumulation(self, world_size: int) -> int:
        """Micro-batches of a step, where neither its rows nor its bins are given."""
        if self.gradient_accumulation_steps != AUTO:
            return self.gradient_accumulation_steps
        return max(1, -(-_ROWS_PER_STEP // (self.batch_size * row_shares(self, world_size))))

    @property
    def bins_are_open(self) -> bool:
        """Whether the data decide how many full bins a step has (`with_bins_of`)."""
        auto = self.gradient_accumulation_steps == AUTO != self.batch_size
        return self.has_full_bins and self.bins_per_step == AUTO and auto

    @property
    def schedule(self) -> str:
        """The learning rate's schedule; a stream's end is not known to one that decays."""
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        return "constant" if self.stream and self.max_steps == AUTO else "cosine"

    @property
    def is_auto(self) -> bool:
        """Whether something is still to be planned (commands/probe.py)."""
        return (
            self.sharding_strategy == "auto"
            or self.batch_size == AUTO
            or self.activation_budget_gib == AUTO
        )

    @property
    def holds_out_a_data_set(self) -> bool:
        """Whether held-out rows are a data set, or a split, of their own."""
        return self.eval_dataset is not None or self.eval_split is not None

    @property
    def evaluates(self) -> bool:
        """Whether there are held-out rows."""
        return self.holds_out_a_data_set or self.eval_share > 0

    @property
    def changes_base(self) -> bool:
        """Whether adapters begin as a part of the weights, which the frozen ones then lack."""
        if not self.has_lora or self.init_lora_weights == "default":
            return False
        return self.init_lora_weights != "loftq" or self.loftq_iter > 1

    @property
    def adapted_blocks(self) -> list[int] | None:
        """`layers_to_transform` as numbers; None is all."""
        return block_numbers(self.layers_to_transform)

    @property
    def only_modules(self) -> list[str]:
        """`trained_modules` as a list; empty where every weight is trained."""
        return names_in(self.trained_modules)

    @property
    def new_tokens(self) -> list[str]:
        """`added_tokens` as a list, read from the file if it is one."""
        return token_list(self.added_tokens)

    @property
    def whole_modules(self) -> list[str]:
        """`modules_to_save` as a list; empty where every weight is trained."""
        return names_in(self.modules_to_save) if self.has_lora else []

    @property
    def trackers(self) -> list[str]:
        """What --log_to names beside a form of terminal output."""
        return [name for name in dict.fromkeys(parts_of(self.log_to)) if name not in TERMINAL_FORMS]

    @property
    def rank_pattern(self) -> dict[str, int]:
        """`lora_rank_pattern` as PEFT takes it."""
        return module_pattern("lora_rank_pattern", self.lora_rank_pattern)

    @property
    def alpha_pattern(self) -> dict[str, int]:
        """`lora_alpha_pattern` as PEFT takes it."""
        return module_pattern("lora_alpha_pattern", self.lora_alpha_pattern)

    @property
    def target_modules(self) -> str | list[str] | None:
        """`lora_target_modules` as PEFT takes it: "all-linear", a list of names, or None."""
        if self.lora_target_modules == "all-linear":
            return "all-linear"
        if self.lora_target_modules == "default":
            return None
        if self.lora_target_modules == "all":
            return list(OLD_ALL_TARGETS)
        return names_in(self.lora_target_modules)

    @property
    def target_parameters(self) -> list[str] | None:
        """`lora_target_parameters` as PEFT takes it, but for "experts"; None without adapters."""
        if not self.has_lora or not self.lora_target_parameters:
            return None
        return names_in(self.lora_target_parameters)


_ON_RESUME = {f.name: f.metadata["on_resume"] for f in fields(RunConfig)}
assert all(_ON_RESUME.values()), "a setting of a run says what a resume does where it has changed"


def settings_that(on_resume: str) -> frozenset[str]:
    """Names of the settings with which a resume does so (`settings.py`)."""
    return frozenset(name for name, does in _ON_RESUME.items() if does == on_resume)


GROUPS = RunConfig.__bases__  # in the order in which help and pages show them


_ROWS_PER_STEP = 8  # or bins, where no setting says; as most peers have
_MOST_ROWS_IN_BINS = 32  # of a step, where a bin has many: with more, a run has few steps
_CHUNK_LOGITS = 2**27  # of one chunk, 256 MB in bf16: 1,024 tokens of a vocabulary of 128k


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits exist at once: 1024, or fewer where the vocabulary is larger."""
    return max(128, min(1024, _CHUNK_LOGITS // vocabulary // 128 * 128))


@cache
def has_flash_attention_4() -> bool:
    """Whether the package is installed here: FlashAttention 2 has a module of the same name."""
    try:
        return bool(metadata.version("flash-attn-4"))
    except metadata.PackageNotFoundError:
        return False


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step is cut up; a unit is a row, or a full bin of packed rows."""

    per_step: int = 1  # units over all ranks
    micro_batch_size: float = 1  # rows, or bins if packing, per rank and forward
    accumulation: float = 1  # forwards per rank and step
    unit: str = "row"  # row or bin
    ranks_per_row: int = 1  # --sequence_parallel
    context_length: float = 512  # these are means where an estimate is of rows of several lengths

    @property
    def tokens(self) -> float:
        """N, the tokens of one micro-batch on one GPU."""
        return self.micro_batch_size * self.context_length / self.ranks_per_row


def row_shares(config: RunConfig, world_size: int) -> int:
    """Ranks among which a step's rows are dealt out; those that share rows count as one."""
    return max(1, world_size // config.sequence_parallel)


def with_bins_of(config: RunConfig, mean_length: float, world_size: int) -> RunConfig:
    """The settings with as many bins a step as hold about 32 rows of a mean length, 8 at most.

    Unchanged where the size of a step is given or counts rows, or where there are no rows.
    """
    if not config.bins_are_open or not mean_length:
        return config
    bins = round(_MOST_ROWS_IN_BINS * mean_length / config.context_length)
    each = config.batch_size * row_shares(config, world_size)
    accumulation = max(1, -(-min(bins, _ROWS_PER_STEP) // each))
    return replace(config, gradient_accumulation_steps=accumulation)


def plan_batches(config: RunConfig, world_size: int) -> BatchPlan:
    """Rows or bins per step, micro-batch and accumulation for `world_size` ranks.

    `--global_batch_size` and `--bins_per_step` are the user's and are never changed: the accumulation
    follows from them, and where they do not divide evenly some ranks run micro-batches with fewer rows
    or bins, or none.
    """
    micro, groups = config.batch_size, row_shares(config, world_size)
    count, unit = config.units_per_step, "bin" if config.has_full_bins else "row"
    if count == AUTO:
        accumulation = config.accumulation(world_size)
        count = micro * accumulation * groups
    else:
        each = -(-count // groups)
        accumulation = -(-each // micro)
        micro = min(micro, each)
    if unit == "bin":  # none is filled up with more empty bins than it must be
        micro = -(-count // (groups * accumulation))
    return BatchPlan(
        count,
        micro,
        accumulation,
        unit,
        context_length=config.context_length,
        ranks_per_row=config.sequence_parallel,
    )
