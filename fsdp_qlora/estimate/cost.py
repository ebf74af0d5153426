"""Hours and dollars of a whole run, from the time of a step."""

from __future__ import annotations

from dataclasses import dataclass

from ..catalog.hardware import Gpu
from .speed import StepTime


@dataclass(frozen=True)
class RunCost:
    """Wall time and money of a run."""

    hours: float
    dollars: float | None  # None where no price is known
    price_source: str
    price: float | None = None  # of a GPU and hour


def run_cost(
    step: StepTime,
    gpu: Gpu,
    *,
    gpus: int,
    examples: int,
    length: float,
    epochs: float = 1,
    price_per_hour: float | None = None,
) -> RunCost:
    """Hours and dollars to see `examples` rows of `length` tokens `epochs` times on `gpus` cards.

    `price_per_hour` of one GPU replaces the catalogue's. Loading and saving are not counted.
    """
    for name, value in (
        ("gpus", gpus),
        ("examples", examples),
        ("length", length),
        ("epochs", epochs),
    ):
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    tokens = examples * length * epochs
    hours = tokens / (step.tokens_per_second_per_gpu * gpus) / 3600
    price = gpu.price_per_hour if price_per_hour is None else price_per_hour
    source = gpu.price_source if price_per_hour is None else "given"
    return RunCost(hours, None if price is None else hours * price * gpus, source, price)
