"""One measurement as one JSON line: all that is needed to repeat it, and what came out. No torch.

`of_plan` and `plan_of` go from a plan to what a row says of it and back, by one table.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..config.lists import names_in
from ..config.options import OLD_ALL_TARGETS, TRAIN_TYPES
from ..plan import Plan

# How names of other files begin.
_NO_ROWS = (
    "attention",
    "checkpointing",
    "defaults",
    "dpo",
    "packing",
    "quality",
    "real_rows",
    "trl",
)


@dataclass
class BenchRow:
    """One measurement. Sizes in GiB, times in seconds; `status` is ok, oom or error."""

    name: str
    model: str
    num_hidden_layers: int
    train_type: str
    quant: str
    compute_dtype: str
    gpu: str
    gpus: int
    nodes: int
    gpu_memory_limit_gib: float | None
    sharding_strategy: str
    activation_policy: str
    cpu_offload: bool
    activation_offload: bool
    batch_size: int
    context_length: int
    gradient_accumulation_steps: int
    lora_rank: int | None
    lora_targets: str | None
    lora_dropout: float | None
    adapter_dtype: str | None
    absmax_dtype: str | None
    optimizer: str
    optimizer_state_dtype: str
    compile: bool
    attention_backend: str
    packed: bool
    versions: dict[str, str]
    commit: str
    date: str
    status: str = "ok"
    error: str | None = None  # the first line of what went wrong
    peer: str | None = (
        None  # another tool, or "one rank" without the others (benchmarks/one_rank.py)
    )
    trained_offload: bool | None = None  # None: as the run chose by itself
    vocabulary_offload: bool | None = None  # None: as cpu_offload
    cuda_graphs: bool = False  # whether micro-batches were replayed
    adapter: str | None = None  # None: as train_type says
    expert_targets: str | None = None  # adapted weights of experts, separated by commas
    mlp_tiles: int = 1
    attention_tiles: int = 1
    attention_offload: bool = False  # older code's rows kept attention's outputs on the GPU
    sequence_parallel: int = 1
    keep_fp8_weights: bool = False
    state_kernels: bool = False  # of mixers with a state, which no older row had
    steps_measured: int = 0
    seconds_per_step: float | None = None
    seconds_p10: float | None = None
    seconds_p90: float | None = None
    tokens_per_second_per_gpu: float | None = None
    model_tflops_per_gpu: float | None = None
    peak_allocated_gib: float | None = None
    peak_reserved_gib: float | None = None
    peak_driver_gib: float | None = None  # as the driver counts: torch, CUDA and NCCL
    peak_host_gib: float | None = (
        None  # anonymous and pinned memory of all ranks, the load included
    )
    load_seconds: float | None = None
    loss_first: float | None = None
    loss_last: float | None = None
    estimate_peak_gib: float | None = None
    estimate_seconds_per_step: float | None = None


# Which field of a plan each of these fields of a row is.
_FIELDS = dict(
    gpus="world_size",
    sharding_strategy="strategy",
    activation_policy="activation_policy",
    cpu_offload="cpu_offload",
    trained_offload="trained_offload",
    vocabulary_offload="vocabulary_offload",
    activation_offload="activation_offload",
    mlp_tiles="mlp_tiles",
    attention_tiles="attention_tiles",
    attention_offload="attention_offload",
    quant="quant",
    absmax_dtype="absmax_dtype",
    compute_dtype="compute_dtype",
    keep_fp8_weights="keep_fp8_weights",
    state_kernels="state_kernels",
    adapter="adapter",
    lora_rank="lora_rank",
    lora_targets="targets",
    expert_targets="expert_targets",
    lora_dropout="lora_dropout",
    adapter_dtype="adapter_dtype",
    optimizer="optimizer",
    batch_size="micro_batch_size",
    context_length="context_length",
    gradient_accumulation_steps="accumulation",
    sequence_parallel="ranks_per_row",
    compile="compile",
    cuda_graphs="cuda_graphs",
)
_OF_ADAPTERS = ("lora_rank", "lora_targets", "lora_dropout", "adapter_dtype")
_TARGETS = {"all-linear": "all-linear", "default": None, "all": OLD_ALL_TARGETS}


def of_plan(plan: Plan) -> dict[str, Any]:
    """What a row says of a plan; None where it says nothing of a thing that is not there."""
    found = {name: plan.value(field) for name, field in _FIELDS.items()}
    targets = {value: name for name, value in _TARGETS.items()}
    given = found["lora_targets"]
    found["lora_targets"] = targets.get(given) or ",".join(given)
    found["expert_targets"] = ",".join(found["expert_targets"]) or None
    if found["compute_dtype"] == "auto":
        found["compute_dtype"] = plan.model.product_dtype
    if plan.adapter.is_full:
        found |= dict.fromkeys(_OF_ADAPTERS)
    if plan.quantization.quant == "none":
        found["absmax_dtype"] = None
    return found


_KERNELS = ("eager", "fa4", "torch_fa")  # of rows alone, beside sdpa


def plan_of(row: BenchRow) -> Plan:
    """The plan that a row was measured with, as far as it says; older rows say less."""
    found = {field: getattr(row, name) for name, field in _FIELDS.items()}
    targets = row.lora_targets or "all-linear"
    kernel = (row.attention_backend or "").partition(":")[0]  # of shared rows "fa4:exchanging"
    found |= dict(
        gpus_per_node=row.gpus // (row.nodes or 1),
        targets=_TARGETS.get(targets, tuple(names_in(targets))),
        adapter=row.adapter or _older_adapter(row),
        expert_targets=tuple(names_in(row.expert_targets or "")),
        quant="hqq4" if row.quant == "hqq" else row.quant,
        lora_dropout=row.lora_dropout or 0.0,
        attention=kernel if kernel in _KERNELS else "sdpa",
    )
    known = {name: value for name, value in found.items() if value is not None}
    return Plan().change(**known | dict(targets=found["targets"]))


def _older_adapter(row: BenchRow) -> str:
    """The adapter of a row that does not name it."""
    if row.train_type in TRAIN_TYPES:
        return TRAIN_TYPES[row.train_type][1]
    return "lora" if row.lora_rank else "none"


def append_row(row: BenchRow, path: str | Path):
    """Add a row to a results file. Raises ValueError that holds the row, so that it is not lost."""
    text = json.dumps(asdict(row))
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(text + "\n")
    except OSError as error:
        raise ValueError(
            f"--results {path}: {error.strerror or error}; the row was {text}"
        ) from error


def row_files(folder: Path) -> list[Path]:
    """The files of a folder of results that hold rows; others hold what other scripts measured."""
    return [path for path in sorted(folder.glob("*.jsonl")) if not path.name.startswith(_NO_ROWS)]


def read_rows(path: str | Path) -> list[BenchRow]:
    """The rows of a results file; of a file of another project, what it has in common.

    Raises ValueError naming the file and the line that is no row.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    return [
        _read_row(line, f"{path} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _read_row(line: str, where: str) -> BenchRow:
    """A row from its JSON; settings that it does not name are None."""
    try:
        given = json.loads(line)
        if not {"name", "model"} <= set(given):
            raise ValueError("it has no name or no model")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: not a row of measurements: {error}") from None
    return row_from_dict(given)


def row_from_dict(given: dict) -> BenchRow:
    """A row of what `given` has of its fields; those without a default are None where it has none."""
    found = {f.name: None for f in fields(BenchRow) if f.default is MISSING}
    return BenchRow(**found | {f.name: given[f.name] for f in fields(BenchRow) if f.name in given})


def empty_row(name: str) -> BenchRow:
    """A row of which nothing but the name is known."""
    return row_from_dict(dict(name=name))
