"""Estimates beside measurements, computed anew by the code as it is now, never read from the row."""
from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from ..catalog.arch import ModelShape, model_shape
from ..catalog.hardware import find_gpu
from ..config.options import OLD_ALL_TARGETS
from ..estimate import Memory, Setup, StepTime, memory, step_seconds
from .row import Row

# Rows that constants were set on: what is not measured on other rows says nothing about accuracy.
CALIBRATED_ON = (
    "8B 2x8192 recompute_all", "8B 2x8192 keep_linears", "8B 1x8192 keep_all",  # MATMUL, COPY shares
    "8B 2x8192 fp8 keep_linears",                                               # FP8_GAIN
)
# Commits whose kernels and hooks the code no longer has: the times of their rows are history.
OLD_COMMITS = ("ae215fd", "f251e71", "989a742", "da4c632")


@dataclass(frozen=True)
class Compared:
    """One measured row with the estimates for it; errors are (estimate - measured) / measured."""
    row: Row
    memory: Memory
    step: StepTime

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
        return self.row.name in CALIBRATED_ON

    @property
    def old_code(self) -> bool:
        """Whether other code than today's was measured."""
        return self.row.commit in OLD_COMMITS


def setup_from_row(row: Row) -> Setup:
    """The settings of a row as estimates take them."""
    targets = row.lora_targets or "all-linear"
    named = {"all-linear": "all-linear", "default": None, "all": OLD_ALL_TARGETS}
    return Setup(
        world_size=row.gpus, gpus_per_node=row.gpus // (row.nodes or 1),
        strategy=row.sharding_strategy, cpu_offload=bool(row.cpu_offload),
        activation_offload=bool(row.activation_offload), activation_policy=row.activation_policy,
        quant=row.quant, absmax_bytes=1 if row.absmax_dtype == "int8" else 4,
        adapter="lora" if row.lora_rank else "none", lora_rank=row.lora_rank or 64,
        targets=named.get(targets, tuple(t.strip() for t in targets.split(","))),
        lora_dropout=row.lora_dropout or 0.0, adapter_dtype=row.adapter_dtype or "fp32",
        optimizer=row.optimizer, compute_dtype=row.compute_dtype, batch_size=row.batch_size,
        context_length=row.context_length, accumulation=row.gradient_accumulation_steps,
        compile=bool(row.compile))


def shape_of_row(row: Row) -> ModelShape:
    """The model's shape, cut as it was measured."""
    shape = model_shape(row.model)
    layers = row.num_hidden_layers
    return shape if layers in (None, shape.layers) else shape.cut(layers)


def compare(rows: list[Row]) -> list[Compared]:
    """The rows of this project that were measured on a known GPU, with today's estimates."""
    found = []
    for row in rows:
        if row.status != "ok" or row.peer or row.peak_allocated_gib is None or row.packed: continue
        try:
            shape, setup, gpu = shape_of_row(row), setup_from_row(row), find_gpu(row.gpu)
        except (ValueError, KeyError):
            continue  # a model or a card that no estimate knows
        found.append(Compared(row, memory(shape, setup), step_seconds(shape, gpu, setup)))
    return found


@dataclass(frozen=True)
class Accuracy:
    """Errors over rows that no constant was set on, as shares."""
    rows: int
    memory_median: float
    memory_worst: float
    memory_lowest: float   # most below the measurement
    timed: int
    time_median: float
    time_worst: float


def accuracy(compared: list[Compared]) -> Accuracy:
    """Medians and extremes; times only of today's code. Raises ValueError without such rows."""
    tested = [c for c in compared if not c.calibrates]
    if not tested: raise ValueError("no measured row that estimates were not set on")
    # Sharded rows of old code gathered embedding and head whole, which vocabulary.py no longer does.
    sizes = [c.memory_error for c in tested if not c.old_code or c.row.sharding_strategy == "ddp"]
    times = [abs(c.time_error) for c in tested if not c.old_code] or [float("nan")]
    return Accuracy(len(sizes), median(map(abs, sizes)), max(map(abs, sizes)), min(sizes), len(times),
                    median(times), max(times))
