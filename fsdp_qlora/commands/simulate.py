"""`fsdp-qlora simulate`: what a rank of a run on many machines holds and moves, counted in one process."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.flags import parse
from ..config.settings import AUTO, opt
from .planning import show


@dataclass
class _SimulateOptions:
    """Simulate"""

    nodes: int = opt(1, "machines among which --world_size is divided", least=1)
    json: bool = opt(False, "print JSON, in bytes")


def simulate_command(argv: list[str]):
    """Count memory and communication of a rank of a run on any number of GPUs; needs none."""
    config, options = parse(
        argv, _SimulateOptions, prog="fsdp-qlora simulate", about=simulate_command.__doc__
    )
    if config.world_size == AUTO:
        raise ValueError("--world_size is needed; give the GPUs of all machines together")
    from ..simulation import as_json, report, simulate  # takes seconds

    show(as_json if options.json else report, simulate(config, config.world_size, options.nodes))
