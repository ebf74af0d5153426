"""Nothing that tests have started is left behind, whatever ends them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import patience
from tests.reaper import processes_of

ROOT = Path(__file__).parents[1]
# A pytest whose test has ranks that never end, a launcher and what that started in a session of its own.
NEVER_ENDS = """
import os, subprocess, sys, time
from tests import ranks

ranks.PRELOAD = ["tests.ranks"]


def stay(folder):
    open(f"{folder}/{os.environ['RANK']}", "w").close()
    time.sleep(3600)


def test_never_ends():
    folder = os.environ["FOLDER"]
    subprocess.Popen(["bash", "-c", "setsid sleep 3600 & sleep 3600"])
    print("token", os.environ["FSDP_QLORA_TESTS"], file=sys.__stderr__, flush=True)
    ranks.run_ranks(stay, 2, folder, grouped=False)
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_ranks_and_launchers_end_with_a_pytest_that_a_signal_ends(tmp_path, number, monkeypatch):
    (tmp_path / "test_never.py").write_text(NEVER_ENDS)
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    pytest_run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pytest",
            "-s",
            "-p",
            "tests.conftest",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            str(tmp_path / "test_never.py"),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    token = next(line for line in pytest_run.stderr if line.startswith("token")).split()[1]
    deadline = time.monotonic() + patience(60)
    while not all((tmp_path / rank).exists() for rank in "01"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(processes_of(token)) >= 6  # the fork server, two ranks, bash and two sleeps
    pytest_run.send_signal(number)
    pytest_run.wait(patience(30))
    while processes_of(token):
        assert time.monotonic() < deadline
        time.sleep(0.05)
