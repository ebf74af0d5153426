"""Hours and dollars of a whole run, from the time of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..catalog.gpu import Gpu
from .speed import StepTime


@dataclass(frozen=True)
class RunCost:
    """Wall time and money of a run."""

    hours: float
    dollars: float | None  # None where no price is known
    price_source: str
    price: float | None = None  # of a GPU and hour
    owned: OwnedCost | None = None  # the same run on cards of one's own


@dataclass(frozen=True)
class OwnedCost:
    """What a run takes of cards that were bought: their wear and their power."""

    dollars: float
    card_price: float
    years: float  # of use around the clock over which a card is written off
    kwh_price: float
    watts: float | None  # None: not known, and not counted


def owned_cost(
    cost: RunCost, gpu: Gpu, gpus: int, card_price: float, years: float, kwh_price: float
) -> RunCost:
    """The cost of a run with that of owned cards beside it."""
    for name, value in (("card_price", card_price), ("kwh_price", kwh_price)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"--{name} must be 0 or more, got {value:g}")
    if not 0 < years < float("inf"):
        raise ValueError(f"--card_years must be above 0, got {years:g}")
    an_hour = card_price / (years * 365 * 24) + (gpu.watts or 0) / 1000 * kwh_price
    owned = OwnedCost(cost.hours * gpus * an_hour, card_price, years, kwh_price, gpu.watts)
    return replace(cost, owned=owned)


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
