"""The first hour, command by command, as README and quickstart have it (scripts/walk.sh)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .patience import patience
from .tokenizers import save_chat_model

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_every_command_of_the_first_hour_runs(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    found = subprocess.run(
        [ROOT / "scripts/walk.sh", save_chat_model(tmp_path / "model"), tmp_path / "work"],
        env=os.environ | dict(PATH=path, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=patience(600),
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert "the walk came to its end" in found.stdout
    assert (
        tmp_path / "work" / "first" / "earlier-1" / "report.html"
    ).is_file()  # the rerun moved it
    assert (tmp_path / "work" / "exported" / "Modelfile").is_file()
