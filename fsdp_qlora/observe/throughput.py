"""How fast a run goes beside what its GPUs could do, how long it still takes, and what it has cost.

FLOPs are those that the task needs, as benchmark rows count them: 4 per frozen weight and token, 6 per
trained one, causal attention within rows; recomputation does not count. So a share of the peak
compares runs with different settings. Padding does not count either, here and in tokens per second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn

from ..catalog.arch import ModelShape
from ..catalog.shapes import shape_from_config
from ..config import RunConfig
from ..dist import ranks_from_env
from ..estimate import (
    Rows,
    batches_of,
    memory,
    model_flops_per_token,
    step_seconds,
)
from ..model.blocks import base_model, decoder_blocks
from ..plan import Plan
from ..run_plan import gpu_of
from .metrics import Record, StepMetrics

_RECENT = 20  # steps whose median speaks for those to come


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs of one token: `fixed`, and `per_position` for each token of its row."""

    fixed: float
    per_position: float
    ranks: int
    peak_tflops: float | None  # of one GPU, dense bf16, by its datasheet

    def of_step(self, tokens: int, rows: int, seconds: float) -> dict[str, float | None]:
        """`model_tflops_per_gpu` and `share_of_peak` of a step of all ranks."""
        flops = tokens * (self.fixed + self.per_position * tokens / max(rows, 1))
        rate = flops / seconds / self.ranks / 1e12
        return dict(
            model_tflops_per_gpu=rate,
            share_of_peak=rate / self.peak_tflops if self.peak_tflops else None,
        )


def shape_of(model: nn.Module, plan: Plan) -> ModelShape:
    """The shape of a run's model, in which Llama-Pro's new blocks are there already.

    Raises ValueError for a model whose shape can't be told.
    """
    shape = shape_from_config(base_model(model).config.to_dict())
    if plan.adapter.adapter == "llama_pro":
        new = [b for b in decoder_blocks(model) if all(p.requires_grad for p in b.parameters())]
        shape = replace(shape, new_blocks=len(new))
    return shape


def arithmetic(plan: Plan, model: nn.Module, device: torch.device) -> Arithmetic | None:
    """The FLOPs of a run's tokens; None for a model whose shape can't be told."""
    try:
        shape = shape_of(model, plan)
    except ValueError:
        return None
    ranks, gpu = plan.sharding.world_size, gpu_of(device)
    one, two = (model_flops_per_token(shape, plan.change(context_length=n)) for n in (1, 2))
    return Arithmetic(2 * one - two, two - one, ranks, gpu.bf16_tflops if gpu else None)


def predicted(
    config: RunConfig,
    plan: Plan,
    model: nn.Module,
    device: torch.device,
    rows: Rows | None = None,
) -> dict[str, float]:
    """GiB and seconds that the estimate gives this run; of an unknown card or model what it can.

    Seconds and tokens are those of a step of the data's `rows`; of full rows where they are not known.
    """
    ranks = plan.sharding.world_size
    try:
        shape = shape_of(model, plan)
        gpu = gpu_of(device)
        found = dict(peak_allocated_gib=memory(shape, plan).peak_allocated)
        if gpu is None:
            return found
        batches = batches_of(rows, config, ranks) if rows else None
        step = step_seconds(shape, gpu, batches.seen(plan) if batches else plan)
        if batches:
            step = replace(step, tokens_per_gpu=batches.tokens / ranks)
    except ValueError:
        return {}
    return found | dict(
        seconds_per_step=step.total,
        memory_gib=gpu.memory_gib,
        tokens_per_second=step.tokens_per_second_per_gpu * ranks,
    )


def dollars_per_hour(config: RunConfig, device: torch.device) -> float | None:
    """What all GPUs of a run cost an hour: --price_per_hour or the catalogue's; None if unknown."""
    price, gpu = config.price_per_hour, gpu_of(device)
    if price is None and gpu:
        price = gpu.price_per_hour
    return None if price is None else price * ranks_from_env().world_size


class Pace:
    """Seconds spent and to come, and dollars, from the records of a run as they are made.

    earlier: the lines of the same run before it was stopped; they count as spent.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        dollars_per_hour: float | None = None,
        earlier: Iterable[dict] = (),
    ):
        self.total_steps, self.dollars_per_hour = total_steps, dollars_per_hour
        self.seconds = sum(r.get("seconds", 0) + r.get("seconds_held", 0) for r in earlier)
        self.first: float | None = None  # seconds of a start's first step, which compiles
        self.recent = deque(maxlen=_RECENT)

    def add(self, record: Record):
        """Count a record's time."""
        self.seconds += getattr(record, "seconds", 0.0) + getattr(record, "seconds_held", 0.0)
        if not isinstance(record, StepMetrics):
            return
        if self.first is None:
            self.first = record.seconds
        else:
            self.recent.append(record.seconds)

    def where(self, step: int) -> dict[str, float | int | None]:
        """Where the run stands after `step` steps, as `Progress` keeps it."""
        each = median(self.recent) if self.recent else self.first
        left = None if each is None or not self.total_steps else (self.total_steps - step) * each
        cost = self.dollars_per_hour
        return dict(
            total_steps=self.total_steps,
            seconds_left=left,
            dollars=None if cost is None else cost * self.seconds / 3600,
        )
