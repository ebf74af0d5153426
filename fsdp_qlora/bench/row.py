"""One measurement as one JSON line: all that is needed to repeat it, and what came out. No torch."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

# How names of other files begin.
_NO_ROWS = ("attention", "checkpointing", "packing", "quality", "real_rows")


@dataclass
class Row:
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
    mlp_tiles: int = 1
    keep_fp8_weights: bool = False
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


def append_row(row: Row, path: str | Path):
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


def read_rows(path: str | Path) -> list[Row]:
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


def _read_row(line: str, where: str) -> Row:
    """A row from its JSON; settings that it does not name are None."""
    try:
        given = json.loads(line)
        if not {"name", "model"} <= set(given):
            raise ValueError("it has no name or no model")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: not a row of measurements: {error}") from None
    return row_from_dict(given)


def row_from_dict(given: dict) -> Row:
    """A row of what `given` has of its fields; those without a default are None where it has none."""
    found = {f.name: None for f in fields(Row) if f.default is MISSING}
    return Row(**found | {f.name: given[f.name] for f in fields(Row) if f.name in given})


def empty_row(name: str) -> Row:
    """A row of which nothing but the name is known."""
    return row_from_dict(dict(name=name))
