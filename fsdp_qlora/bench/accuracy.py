"""Estimates beside measurements, computed anew by the code as it is now, never read from the row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from ..catalog.arch import ModelShape
from ..catalog.gpu import Gpu
from ..catalog.hardware import find_gpu
from ..catalog.shapes import model_shape
from ..choices import OPTIMIZERS
from ..estimate import Memory, Peak, StepTime, memory, step_seconds
from ..estimate.constants import CONTEXT_GIB, NCCL_GIB
from ..estimate.mixers import on_plain_torch
from ..plan import Plan
from .row import BenchRow, plan_of

# Rows that constants were set on (scripts/fit_constants.py): they say nothing about accuracy, nor does
# any other row of the same name.
CALIBRATED_ON = (
    "8B 2x8192 every block recomputed, 1 GPU",  # products, attention, passes, unpacking
    "8B 2x8192 ddp activation offload, 1 GPU",  # nothing kept on the GPU
    "70B width 8 layers 4x2048 ddp keep_linears, 1 GPU",
    "8B 4x2048 ddp 8-bit Adam, 1 GPU",  # an optimizer that is written here
    "8B 1x512 ddp eager, 1 GPU",  # launches: steps that the host holds up
    "8B 1x512 ddp eager keep_all, 1 GPU",
    "1x2048_fp8 on 1",  # the same compiled, and replayed without the host
    "70B both offloads 2x2048, 2 GPUs of 8 GB",  # the allocator beside gathers
    "70B 2x2048x4 keep_linears",  # gathers on four GPUs, and FSDP's launches, by the code
    "8B 2x2048 shard_grad_op compile=true",  # of then; no row of two GPUs with today's sets any
)
# What is known of mixtures alone was set by hand on these: products of experts' adapters, launches, the holes
# that experts' weights leave, the time of routing and of eager sinks. The fit leaves them alone.
_MIXTURES_SET_ON = (
    "qwen3_30b_qlora_experts on 1",
    "qwen3_30b_qlora_experts_fp8 on 1",
    "qwen3_30b_qlora_fp8 on 1",  # the holes alone, as experts are frozen
    "qwen3_30b_qlora_experts_full_shard on 2",  # launches in bf16 alone
    "gpt_oss_20b_qlora on 1",
    "qwen3_30b_qlora_experts_recomputed_8bit on 1",  # whose profile has the time of routing
)
# And on these by hand what gathers of replayed graphs cost.
_REPLAYED_SET_ON = (
    "7B 1x512 replayed, 2 GPUs of 8 GB",
    "30B-A3B experts 1x2048 replayed, 2 GPUs",
)
# Commits whose kernels and hooks the code no longer has: the times of their rows are history, but for
# the launches that are set on them. Those of the second list lack only today's 4-bit and fp8 products.
_OLD_COMMITS = ("ae215fd", "f251e71", "989a742", "da4c632", "4d00b20", "2bd4447")
_OLD_PRODUCTS = ("f8e8940", "fc55a1e", "8e7a833", "0734433", "ee8b4e9", "bb323ea")
# One tensor was updated after the other; then places of many were written by a kernel of 1.7 ms.
_OLD_OPTIMIZERS = ("cc5469f", "c585e58", "a9a801c")
# Two dequantized weights of one sum were there at once, which is the peak where tokens are few.
_OLD_SUMS = ("638255a",)
# Attention with sinks kept its output in the order of heads, and again in that of tokens.
_OLD_SINKS = ("208ff0b", "0342d6a")
# The input of a compiled first block stayed on the GPU beside what offload had moved.
_OLD_INPUTS = ("853ac22", "a9a801c")
# Delta nets on plain torch solved triangular systems, and had three products and more for each chunk.
_OLD_RULES = ("c585e58",)
_EARLY_PEAKS = "5e23f3d"  # whose peaks of replayed rows are those of the row before
# Their final norm was eager: in fp32, which was the widest that came and went where tokens are many, and
# that is what the allocator's unused memory follows. fp8 products joined since (2b8e2e6) are no list of
# their own: 1.2 ms for 4,096 tokens, less than what two runs differ by.
_EAGER_NORM = (*_OLD_COMMITS, *_OLD_PRODUCTS, *_OLD_OPTIMIZERS, *_OLD_SUMS, _EARLY_PEAKS, "27b2239")


@dataclass(frozen=True)
class Compared:
    """One measured row with the estimates for it; errors are (estimate - measured) / measured."""

    row: BenchRow
    shape: ModelShape
    gpu: Gpu
    plan: Plan
    memory: Memory
    step: StepTime
    superseded: bool = False  # by a later row of the same `what`

    @property
    def what(self) -> tuple:
        """What was measured: a name, launched or replayed, by which attention."""
        return self.row.name, self.row.cuda_graphs, self.plan.model.attention

    @property
    def memory_error(self) -> float:
        return self.memory.peak_allocated / self.row.peak_allocated_gib - 1

    @property
    def reserved_error(self) -> float:
        return self.memory.peak_reserved / self.row.peak_reserved_gib - 1

    @property
    def time_error(self) -> float:
        return self.step.total / self.row.seconds_per_step - 1

    @property
    def calibrates(self) -> bool:
        """Whether constants were set on this row."""
        return self.row.name in (*CALIBRATED_ON, *_MIXTURES_SET_ON, *_REPLAYED_SET_ON)

    @property
    def fits(self) -> bool:
        """Whether scripts/fit_constants.py sets constants on it."""
        return self.row.name in CALIBRATED_ON

    @property
    def old_units(self) -> bool:
        """Whether FSDP still gathered embedding and head whole, which memory/vocab_parallel.py has ended."""
        return self.row.commit in _OLD_COMMITS and self.row.sharding_strategy != "ddp"

    @property
    def old_memory(self) -> bool:
        """Whether other code than today's took the memory, or torch's peak is not the step's."""
        sinks = self.row.commit in _OLD_SINKS and self.shape.traits.attention == "sinks"
        offloads = self.row.activation_offload and self.row.compile
        inputs = self.row.commit in _OLD_INPUTS and offloads
        sums = self.row.commit in _OLD_SUMS
        return self.old_units or sums or sinks or inputs or self.other_peak

    @property
    def old_reserved(self) -> bool:
        """Whether a limit or other code than today's made the unused memory (EAGER_NORM)."""
        if self.at_limit:
            return True
        if (
            self.row.commit not in _EAGER_NORM
            or not self.plan.loop.compile
            or self.plan.sharding.shard_ranks > 1
        ):
            return self.old_memory  # beside gathers, the norm was not the widest
        widest = max(
            Peak(self.shape, self.plan).slack_terms(self.plan.memory.runs(self.shape)).values()
        )
        return self.old_memory or 5 * 4 * self.plan.batch.tokens * self.shape.hidden > widest

    @property
    def at_limit(self) -> bool:
        """Whether torch had reserved all that it was allowed: what it would have is not known then."""
        if self.row.gpu_memory_limit_gib is None:
            return False
        allowed = self.row.gpu_memory_limit_gib - CONTEXT_GIB - NCCL_GIB * (self.row.gpus > 1)
        return self.row.peak_reserved_gib > 0.99 * allowed

    @property
    def other_peak(self) -> bool:
        """Whether torch's peak is not this step's, as where graphs are captured in the first step.

        The optimizer has no states by then.
        """
        several = self.row.gradient_accumulation_steps > 1
        return bool(self.row.cuda_graphs) and (several or self.row.commit == _EARLY_PEAKS)

    @property
    def old_code(self) -> bool:
        """Whether other code than today's was measured."""
        products = self.row.quant != "none" or self.row.compute_dtype == "fp8"
        return (
            self.row.commit in _OLD_COMMITS
            or self.row.commit in _OLD_PRODUCTS
            and products
            or self.row.commit in _OLD_OPTIMIZERS
            and OPTIMIZERS[self.row.optimizer].updates_together
            or self.row.commit in _OLD_RULES
            and any(on_plain_torch(kind, self.plan) for kind, _ in self.shape.block_kinds())
        )


def _shape_of_row(row: BenchRow) -> ModelShape:
    """The model's shape, cut as it was measured."""
    shape = model_shape(row.model)
    layers = row.num_hidden_layers
    return shape if layers in (None, shape.layers) else shape.cut(layers)


def compare(rows: list[BenchRow]) -> list[Compared]:
    """The rows of this project that were measured on a known GPU, with today's estimates."""
    found = []
    for row in rows:
        if row.status != "ok" or row.peer or row.peak_allocated_gib is None or row.packed:
            continue
        try:
            shape, plan, gpu = _shape_of_row(row), plan_of(row), find_gpu(row.gpu)
        except (ValueError, KeyError):
            continue  # a model or a card that no estimate knows
        found.append(
            Compared(row, shape, gpu, plan, memory(shape, plan), step_seconds(shape, gpu, plan))
        )
    last = {c.what: c for c in found}
    return [replace(c, superseded=last[c.what] is not c) for c in found]


@dataclass(frozen=True)
class Accuracy:
    """Errors over the newest rows of their names that no constant was set on, as shares."""

    rows: int  # whose allocated memory is compared
    memory_median: float
    memory_worst: float
    memory_lowest: float  # most below the measurement
    reserving: int  # whose reserved memory is today's code's
    reserved_median: float
    reserved_worst: float
    reserved_lowest: float
    timed: int  # whose time is
    time_median: float
    time_worst: float


def accuracy(compared: list[Compared]) -> Accuracy:
    """Medians and extremes. Raises ValueError without a row that sets nothing."""
    tested = [c for c in compared if not c.calibrates and not c.superseded]
    sizes = [c.memory_error for c in tested if not c.old_memory]
    reserved = [c.reserved_error for c in tested if not c.old_reserved]
    timed = [c for c in tested if not c.old_code and c.plan.model.attention != "eager"]
    times = [abs(c.time_error) for c in timed]  # that of eager attention is set on its only row
    if not sizes:
        raise ValueError("no measured row that estimates were not set on")
    return Accuracy(
        len(sizes), *spread(sizes), len(reserved), *spread(reserved), len(times), *spread(times)[:2]
    )


def spread(errors: list[float]) -> tuple[float, float, float]:
    """Median and largest size of errors, and the lowest; not a number where there is none."""
    errors = errors or [float("nan")]
    return median(map(abs, errors)), max(map(abs, errors)), min(errors)
