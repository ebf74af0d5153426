"""The steps that a run's loaders give, as a test sees them go by."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fsdp_qlora.data import Step, StepLoader, StreamLoader


def watch_steps(note: Callable[[Step], None]):
    """Have `note` called with each step of this process, before it is trained; for good."""

    def watched(iterate):
        def steps(self) -> Iterator[Step]:
            for step in iterate(self):
                note(step)
                yield step

        return steps

    for loader in (StepLoader, StreamLoader):
        loader.__iter__ = watched(loader.__iter__)
