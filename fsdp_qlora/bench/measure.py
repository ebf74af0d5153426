"""Measure optimizer steps, and write each measurement as one JSON line.

A row says all that is needed to repeat it: settings, versions, commit, GPU. Out of memory is a row
too. The step is a median after warm-up; memory is the highest over ranks.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist

from ..choices import OPTIMIZERS
from ..config import RunConfig
from ..dist import all_reduce, ranks_from_env
from ..observe.compilations import say_what_runs_eager
from ..observe.device_timer import mark, seconds_between
from ..observe.peak_memory import PeakMemory, peak_resident_bytes
from ..plan import Plan
from .batches import RunRows, part_of, random_batches, tokens_computed
from .row import BenchRow, of_plan

_FEWEST = 2  # micro-batches: gradients are there while the second is computed
_STEP_SECONDS = 4.0  # of a run's own steps, where they are measured: longer ones are cut
VERSIONED = ("torch", "transformers", "peft", "bitsandbytes", "triton", "fsdp_qlora")


def describe_run(
    config: RunConfig, plan: Plan, name: str, layers: int, device: torch.device
) -> BenchRow:
    """A row with everything that is known before the first step."""
    return BenchRow(
        name=name,
        model=Path(config.model_name).name,
        num_hidden_layers=layers,
        train_type=config.train_type,
        gpu=device_name(device),
        nodes=ranks_from_env().nodes,
        gpu_memory_limit_gib=None,
        optimizer_state_dtype=state_dtype(plan),
        attention_backend=config.attn_implementation,
        packed=config.packing,
        versions=versions(),
        commit=commit(),
        date=date.today().isoformat(),
        **of_plan(plan),
    )


def state_dtype(plan: Plan) -> str:
    """What the optimizer's states are stored in: by its name, else as the trained weights."""
    return OPTIMIZERS[plan.optimizer.optimizer].state_dtype or plan.trained_dtype


def this_device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def versions() -> dict[str, str]:
    """Installed versions of what decides speed and memory."""
    found = {}
    for package in VERSIONED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """The project's commit, with + if the tree has changes; GIT_COMMIT says it outside a checkout."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
            check=True,
        )
        return run.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class MemoryLimit:
    """Host memory that a process may take from now on, looked at when `check` is called."""

    def __init__(self, gib: float | None):
        self.gib, self.start = gib, peak_resident_bytes()

    def check(self):
        """Raise MemoryError if this process has taken more."""
        taken = (peak_resident_bytes() - self.start) / 2**30
        if self.gib is not None and taken > self.gib:
            raise MemoryError(f"{taken:.2f} GiB of host memory, and {self.gib:g} are allowed")


def measure(
    row: BenchRow,
    config: RunConfig,
    plan: Plan,
    how,
    device: torch.device,
    limit: MemoryLimit,
    rows: RunRows | None = None,
):
    """Build, warm up, time the steps, and fill the row. On a run's own `rows`, or on random tokens."""
    with PeakMemory(device) as peaks:
        _measure_steps(row, config, plan, how, device, limit, rows)
    record_memory(row, device, peaks)
    _record_estimate(row, config, plan, rows)


def _measure_steps(
    row: BenchRow,
    config: RunConfig,
    plan: Plan,
    how,
    device: torch.device,
    limit: MemoryLimit,
    rows: RunRows | None,
):
    """Everything but memory and the estimate."""
    from ..build import build_model
    from ..observe.profiling import profile_steps
    from ..optim import build_optimizer
    from ..training.cuda_graphs import micro_batch_runner, uses_graphs
    from ..training.step import seed_everything, train_step

    seed_everything(config.seed, ranks_from_env().rank, config.deterministic)
    started = time.perf_counter()
    model = build_model(config, device, plan=plan)
    synchronize(device)
    row.attention_backend = model.config._attn_implementation
    row.cuda_graphs = uses_graphs(plan, model, device)
    row.load_seconds = time.perf_counter() - started
    optimizer = build_optimizer(
        model, config.optimizer, plan.optimizer.lr, config.wd, config.loraplus_lr_ratio
    )
    clip = config.grad_norm if config.apply_gradient_clipping else None
    one = partial(
        train_step,
        model,
        optimizer,
        max_grad_norm=clip,
        no_sync=config.no_sync,
        forward_backward=micro_batch_runner(config, plan, model, device),
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of the job before
    full = random_batches(config, model.config.vocab_size, row.gradient_accumulation_steps)
    # A shape that is seen again is captured, which is no part of a step that is replayed.
    rounds = max(how.warmup, 2) if row.cuda_graphs else how.warmup
    warmup, measured, tokens, cut = [full] * rounds, [full] * how.steps, None, 1.0
    if rows:
        # Full rows show what memory must hold; then each shape is compiled, and seen again for graphs.
        at_most = _enough_micro_batches(one, full[:_FEWEST], device)
        steps = rows.first_steps(plan, model, device, how.steps)
        parts = [part_of(step, at_most) for step in steps]
        measured = [part.micro_batches for part in parts]
        warmup = measured * rounds
        cut = sum(map(len, measured)) / sum(len(step.micro_batches) for step in steps)
        tokens = tokens_computed(parts, row.sequence_parallel) / cut
    for number, micro_batches in enumerate(warmup + measured):
        if number == len(warmup):
            timer = StepTimer(device, keep_peak=row.cuda_graphs or rows is not None)
        result = one(micro_batches)
        if number == 0:
            row.loss_first = result.loss
        if number >= len(warmup):
            timer.step_done()
        say_what_runs_eager()
        limit.check()
    row.loss_last = result.loss
    record_time(row, [seconds / cut for seconds in timer.seconds()], tokens)
    if config.profile:
        profile_steps(config, device, partial(one, full))


def _enough_micro_batches(one: Callable, full: list[dict], device: torch.device) -> int:
    """Micro-batches of a measured step at most, from the second of two steps of full rows.

    As many as take `_STEP_SECONDS` on the slowest rank: what else a step does is short beside them.
    """
    one(full)
    synchronize(device)
    started = time.perf_counter()
    one(full)
    synchronize(device)
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    all_reduce(seconds, op=dist.ReduceOp.MAX)
    return max(_FEWEST, math.ceil(_STEP_SECONDS * len(full) / seconds.item()))


class StepTimer:
    """Seconds of each step, without holding the host up between steps, as training doesn't either.

    keep_peak: leave torch's record of memory as it is, for steps that allocate nothing any more.
    """

    def __init__(self, device: torch.device, keep_peak: bool = False):
        self.device, self.marks = device, []
        synchronize(device)
        if device.type == "cuda" and not keep_peak:
            torch.cuda.reset_peak_memory_stats(device)
        self.step_done()

    def step_done(self):
        """Mark the end of a step."""
        self.marks.append(mark(self.device))

    def seconds(self) -> list[float]:
        """The time from each mark to the next; waits for the last."""
        return [seconds_between(*pair) for pair in zip(self.marks, self.marks[1:], strict=False)]


def record_time(row: BenchRow, seconds: list[float], tokens: float | None = None):
    """Median and spread of the measured steps. tokens: of a GPU in all of them, where rows differ."""
    row.steps_measured = len(seconds)
    row.seconds_per_step = statistics.median(seconds)
    ordered = sorted(seconds)
    row.seconds_p10 = ordered[int(0.1 * (len(ordered) - 1))]
    row.seconds_p90 = ordered[int(0.9 * (len(ordered) - 1) + 0.5)]
    full = row.batch_size * row.context_length * row.gradient_accumulation_steps
    full /= row.sequence_parallel
    row.tokens_per_second_per_gpu = (
        full / row.seconds_per_step if tokens is None else tokens / sum(seconds)
    )


def record_memory(row: BenchRow, device: torch.device, peaks: PeakMemory | None = None):
    """Highest memory of any rank, and the hosts' together; without `peaks`, the kernel's peak."""
    host = torch.tensor([(peaks.host if peaks else peak_resident_bytes()) / 2**30])
    all_reduce(host)
    row.peak_host_gib = host.item()
    if device.type != "cuda":
        return
    found = (
        torch.tensor(
            [
                torch.cuda.max_memory_allocated(device),
                torch.cuda.max_memory_reserved(device),
                peaks.driver if peaks else 0,
            ],
            dtype=torch.float64,
        )
        / 2**30
    )
    all_reduce(found, op=dist.ReduceOp.MAX)
    row.peak_allocated_gib, row.peak_reserved_gib, driver = found.tolist()
    row.peak_driver_gib = driver or None


def _record_estimate(row: BenchRow, config: RunConfig, plan: Plan, rows: RunRows | None = None):
    """What the estimate says of the same settings, and the model's arithmetic per second."""
    from ..catalog.hardware import find_gpu
    from ..catalog.llama_pro import expanded_shape
    from ..catalog.shapes import shape_from_config
    from ..estimate import batches_of, memory, model_tflops, step_seconds
    from ..loading import read_config

    shape = expanded_shape(
        shape_from_config(read_config(config.model_name, **config.source).to_dict(), row.model),
        config,
    )
    plan = plan.change(cuda_graphs=row.cuda_graphs)
    row.estimate_peak_gib = memory(shape, plan).peak_allocated
    if rows and rows.lengths:
        plan = batches_of(rows.lengths, rows.config, row.gpus).seen(plan)
    row.model_tflops_per_gpu = model_tflops(shape, plan, row.tokens_per_second_per_gpu)
    if row.gpu == "cpu":
        return
    try:
        row.estimate_seconds_per_step = step_seconds(shape, find_gpu(row.gpu), plan).total
    except ValueError:  # a card that is not in the catalogue
        return


def synchronize(device: torch.device):
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summary(row: BenchRow) -> str:
    """A row in one line."""
    if row.status != "ok":
        return f"{row.name}: {row.status}"
    memory = (
        f"  peak {row.peak_allocated_gib:.2f} GiB (estimate {row.estimate_peak_gib:.2f})"
        if row.peak_allocated_gib
        else ""
    )
    return (
        f"{row.name}: {row.seconds_per_step:.3f} s/step  "
        f"{row.tokens_per_second_per_gpu:,.0f} tok/s per GPU{memory}  "
        f"loss {row.loss_first:.4f} -> {row.loss_last:.4f}  load {row.load_seconds:.1f} s"
    )
