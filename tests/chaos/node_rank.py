"""A rank as torchrun starts it for `test_lost_nodes.py`: fsdp_qlora.cli, and a log of what it trains.

CHAOS_FOLDER: where each rank writes `steps/PID.jsonl`. Steps are slow until `CHAOS_FOLDER/hurry` is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from fsdp_qlora.cli import main
from fsdp_qlora.training.loop import Training

SLOW_SECONDS = 0.2


def trained_tokens(micro_batches: list[dict]) -> list[list[int]]:
    """The tokens with a loss of each row that this rank was given; fillers have none."""
    rows = [row[row != -100].tolist() for batch in micro_batches for row in batch["labels"]]
    return [row for row in rows if row]


def log_steps(folder: Path):
    """Each step is told with its rows before it is taken, and with its time when it is over."""
    file = (folder / "steps" / f"{os.getpid()}.jsonl").open("a")
    who = dict(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    original = Training.step

    def tell(step, **what):
        file.write(json.dumps(who | dict(step=step.index + 1, time=time.time()) | what) + "\n")
        file.flush()

    def logged(training, step):
        tell(step, rows=trained_tokens(step.micro_batches))
        if not (folder / "hurry").exists():
            time.sleep(SLOW_SECONDS)
        original(training, step)
        tell(step)

    Training.step = logged


if __name__ == "__main__":
    log_steps(Path(os.environ["CHAOS_FOLDER"]))
    sys.exit(main())
