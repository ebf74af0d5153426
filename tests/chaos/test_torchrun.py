"""torchrun starts a run again after a rank was killed, and it goes on by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.harness import command, make_inputs, outcome
from tests.patience import patience

ROOT, SECONDS = Path(__file__).parents[2], 120


def ranks_of(run: subprocess.Popen) -> list[int]:
    """Process ids of the ranks that torchrun started."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return [int(c) for c in children if "train.py" in Path(f"/proc/{c}/cmdline").read_text()]


@pytest.mark.slow
def test_torchrun_with_a_restart_carries_on_after_a_rank_was_killed(tmp_path):
    folder = make_inputs(tmp_path / "inputs")
    reference = command(folder, tmp_path / "undisturbed", "--num_epochs", "8")
    assert reference.start().codes == [0, 0]
    out = tmp_path / "out"
    flags = command(folder, out, "--num_epochs", "8").argv[1:]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc_per_node",
                "2",
                "--max_restarts",
                "1",
                "--monitor_interval",
                "0.2",
                "train.py",
                *flags,
            ],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=log,
        )
        try:
            deadline = time.monotonic() + patience(SECONDS)
            while not (out / "checkpoints" / "step-000020").exists():
                assert run.poll() is None and time.monotonic() < deadline, (
                    tmp_path / "log"
                ).read_text()
                time.sleep(0.02)
            os.kill(ranks_of(run)[1], signal.SIGKILL)
            code = run.wait(timeout=patience(SECONDS))
        finally:
            run.kill()
    text = (tmp_path / "log").read_text()
    assert code == 0 and "resumed from" in text, text[-3000:]
    assert outcome(out) == outcome(tmp_path / "undisturbed")
