"""Time that a run loses to failing machines, and how often to save so that it loses least.

A failure costs the work since the last checkpoint, on average half an interval, and a restart; saving
costs what it holds up the run for. Young, A First Order Approximation to the Optimum Checkpoint
Interval, 1974; Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, 2006.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from ..catalog.arch import ModelShape
from ..plan import Plan
from .question import Estimate
from .weights import all_trained, optimizer_bytes

_AGREE_SECONDS = 0.1  # for ranks to begin a checkpoint, whatever they copy; a guess


@dataclass(frozen=True)
class Failures:
    """Seconds of a run of many machines, and the share of its time that it loses."""

    between: float  # failures of any machine
    save: float  # that a checkpoint holds up the run
    interval: float  # between checkpoints
    restart: float
    lost: float

    def line(self) -> str:
        """What to do, for people."""
        minutes, hours = f"{self.interval / 60:.2g}", self.between / 3600
        return (
            f"one machine fails every {hours:,.{hours < 100:d}f} hours: save every {minutes} minutes "
            f"(--checkpoint_minutes {minutes}). Saving holds up the run for {self.save:.2g} s, a "
            f"restart takes {self.restart / 60:g} minutes, and {self.lost:.1%} of the time is lost"
        )


def failures(found: Estimate, mtbf_hours: float, restart_minutes: float) -> Failures:
    """What failures cost the run of an estimate. mtbf_hours: mean time between those of one machine."""
    machine = found.machine
    between = 3600 * mtbf_hours / machine.nodes
    save = _AGREE_SECONDS + _copied(found.shape, found.plan) / (
        1e9 * machine.gpu.shared_host_gb_s(machine.gpus)
    )
    interval, restart = best_interval(save, between), 60 * restart_minutes
    lost = min(1.0, save / (interval + save) + (interval / 2 + restart) / between)
    return Failures(between, save, interval, restart, lost)


def _copied(shape: ModelShape, plan: Plan) -> float:
    """Bytes of one rank that wait in host memory to be written: trained weights and their states."""
    return all_trained(shape, plan, plan.sharding.shard_ranks) + optimizer_bytes(shape, plan)


def best_interval(save: float, between: float) -> float:
    """Seconds of work between checkpoints of `save` seconds with which least is lost, after Daly.

    Its first term is Young's. Where a failure comes sooner than two saves, it is the time between them.
    """
    if save >= 2 * between:
        return between
    part = save / (2 * between)
    return sqrt(2 * save * between) * (1 + sqrt(part) / 3 + part / 9) - save
