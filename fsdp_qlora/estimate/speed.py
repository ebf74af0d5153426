"""Seconds of a step: kernels, transfers that these do not hide, the host, the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from ..catalog.arch import ModelShape
from ..catalog.gpu import Gpu
from ..catalog.machine import INTERNODE_GB_S
from ..choices import OPTIMIZERS
from ..choices.optimizers import TOGETHER
from ..plan import BYTES, Plan
from . import constants
from .compute import compute_parts, launch_seconds
from .transfers import exchange_seconds, once_per_step, transfer_seconds
from .weights import (
    all_trained,
    optimizer_bytes,
    trained_on_host,
    trained_tensors,
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part, none hidden behind another."""

    parts: dict[str, float]
    tokens_per_gpu: float  # in one optimizer step
    calibrated: bool  # False where only the GPU's datasheet is known

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_gpu / self.total

    def table(self) -> str:
        """The parts in lines for people; empty ones are left out."""
        lines = [
            f"{name:<14} {seconds:8.3f} s"
            for name, seconds in self.parts.items()
            if seconds >= 0.0005
        ]
        note = "" if self.calibrated else "; uncalibrated: from the GPU's datasheet"
        return "\n".join(
            lines
            + [
                f"{'step':<14} {self.total:8.3f} s  "
                f"{self.tokens_per_second_per_gpu:,.0f} tok/s per GPU{note}"
            ]
        )


def step_seconds(
    shape: ModelShape,
    gpu: Gpu,
    plan: Plan | None = None,
    *,
    link_gb_s: float | None = None,
    internode_gb_s: float = INTERNODE_GB_S,
    **changes,
) -> StepTime:
    """Predicted time of one optimizer step, with its parts.

    Products and attention over their rates, passes over memory over its own, then what transfers and
    the CPU's launches take beyond that. `link_gb_s` replaces the GPU's link between peers,
    `internode_gb_s` is that between machines, per GPU.
    """
    plan = (plan or Plan()).change(**changes)
    link = link_gb_s or gpu.peer_gb_s(plan.sharding.node_gpus)
    if plan.sharding.shard_ranks > plan.sharding.node_gpus:
        link = min(link, internode_gb_s)
    parts = {
        name: plan.batch.accumulation * seconds
        for name, seconds in compute_parts(shape, gpu, plan).items()
    }
    transfers = transfer_seconds(shape, gpu, plan, link)
    busy = sum(parts.values()) + sum(transfers)
    waits = max(0.0, plan.batch.accumulation * launch_seconds(shape, plan) - busy)
    parts["launches"] = waits + constants.STEP_SECONDS
    parts["communication"], parts["offload"] = transfers
    parts["communication"] += once_per_step(shape, plan, link, internode_gb_s)
    parts["communication"] += plan.batch.accumulation * exchange_seconds(shape, plan, link)
    parts["optimizer"] = _optimizer_seconds(shape, gpu, plan)
    return StepTime(parts, plan.batch.tokens * plan.batch.accumulation, gpu.calibrated)


def _optimizer_seconds(shape: ModelShape, gpu: Gpu, plan: Plan) -> float:
    """Seconds of the update: weight and states read and written, gradient read.

    On the host under CPU offload. Those of optim/ update small tensors together, some at a time, which
    takes the host.
    """
    size = all_trained(shape, plan, plan.sharding.shard_ranks)
    own = plan.trained_dtype
    if trained_on_host(shape, plan):
        return size / BYTES[own] / constants.HOST_OPTIMIZER_PER_SECOND
    moved = 3 * size + 2 * optimizer_bytes(shape, plan)
    updates = min(trained_tensors(shape, plan), 1 + size / BYTES[own] / TOGETHER)
    launches = (
        updates * constants.OPTIMIZER_LAUNCH * OPTIMIZERS[plan.optimizer.optimizer].updates_together
    )
    return max(launches, moved / (gpu.reached_bandwidth_gb_s * 1e9))
