"""`--eval_command`: a program of the user's that scores the weights as they are, such as lm-eval.

It runs on rank 0 while the others wait, in a session of its own, and is told where the weights are by
its environment. What it prints last is recorded: a number, or an object of them (nested ones get names
with a slash). If it fails, one line says so and the run goes on.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.2


def scores_of(
    command: str,
    told: dict[str, str],
    most_seconds: float = math.inf,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """What the command measured, by name. Raises ValueError, in one line, if it gave nothing.

    told: environment variables. is_asked_to_stop: the command is then ended, as after `most_seconds`.
    """
    process = subprocess.Popen(
        command,
        shell=True,
        env=os.environ | told,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    started, printed = time.monotonic(), None
    while printed is None:
        try:
            printed, _ = process.communicate(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() - started > most_seconds:
                _end(process)
                raise ValueError(
                    f"--eval_command: ended after {most_seconds:.0f} s; give a larger --timeout_minutes"
                ) from None
            if is_asked_to_stop():
                _end(process)
                raise ValueError(
                    "--eval_command: ended, as the run stops; rerun the same command to resume"
                ) from None
    if process.returncode:
        raise ValueError(
            f"--eval_command: exit code {process.returncode}; run it by hand to see why"
        )
    return _last_scores(printed)


def _end(process: subprocess.Popen):
    """The command, and all that it started."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _last_scores(printed: str) -> dict[str, float]:
    """The numbers in the last JSON that was printed: on a line, or as the whole text."""
    for text in (printed, *reversed(printed.splitlines())):
        with suppress(ValueError, RecursionError):
            found = dict(_numbers(json.loads(text), ""))
            if found:
                return found
    raise ValueError(
        "--eval_command: it printed no number and no JSON object of numbers; let it print one last"
    )


def _numbers(value, name: str) -> Iterator[tuple[str, float]]:
    """(name, number) of all finite numbers in an object; a number alone is the score."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name or "score", float(value)


def told_of(step: int, weights: Path, model_name: str, output_dir: str) -> dict[str, str]:
    """What the command reads in its environment."""
    return dict(
        FSDP_QLORA_STEP=str(step),
        FSDP_QLORA_WEIGHTS=str(weights.resolve()),
        FSDP_QLORA_MODEL_NAME=model_name,
        FSDP_QLORA_OUTPUT_DIR=str(Path(output_dir).resolve()),
    )
