"""`--on_end`: a command of the user's that is told how a run ended, as a webhook or a mail needs it.

It is a flag and no setting, so that an address with a secret in it is in no recipe, model card or
checkpoint. Pure: no torch.
"""
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..redact import redact
from .signals import StopRequested

PATIENCE_S = 60  # for the command; a run's own exit code never depends on it


@contextmanager
def told_at_end(command: str | None, output_dir: str) -> Iterator[None]:
    """Run a shell command after the block, which learns in its environment how that ended.

    FSDP_QLORA_STATUS is finished, stopped or failed; FSDP_QLORA_MESSAGE a line about it;
    FSDP_QLORA_OUTPUT_DIR the folder of the run. An error of the block goes on as it was.
    """
    started = time.monotonic()
    try:
        yield
    except (StopRequested, KeyboardInterrupt) as stopped:
        tell(command, output_dir, "stopped", str(stopped) or "by the keyboard")
        raise
    except BaseException as error:
        tell(command, output_dir, "failed", f"{type(error).__name__}: {error}")
        raise
    tell(command, output_dir, "finished", f"after {time.monotonic() - started:.0f} s")


def tell(command: str | None, output_dir: str, status: str, message: str):
    """Run the command; if it fails, a warning is all."""
    if not command: return
    line = redact(message).strip().split("\n")[0]
    told = dict(FSDP_QLORA_STATUS=status, FSDP_QLORA_MESSAGE=line, FSDP_QLORA_OUTPUT_DIR=output_dir)
    try:
        subprocess.run(command, shell=True, env=os.environ | told, timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (f"exit code {error.returncode}" if isinstance(error, subprocess.CalledProcessError)
                  else f"no end within {PATIENCE_S} s")
        print(f"warning: the command of --on_end failed: {reason}", file=sys.stderr, flush=True)
