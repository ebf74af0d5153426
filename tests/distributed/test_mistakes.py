"""Under torchrun, which ends all ranks when one ends, every rank still says what was wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parts import rest, slow
from tests.patience import patience
from tests.tokenizers import save_chat_model

ROOT = Path(__file__).parents[2]
LATE = """
import os, sys, time
import torch.distributed
from fsdp_qlora.cli import main
late, seconds, lacks, *argv = sys.argv[1:]
if os.environ["RANK"] == late: time.sleep(float(seconds))  # imports apart, which load makes longer
if os.environ["RANK"] == lacks: argv += ["--dataset", "/no/such/rows.jsonl"]
sys.exit(main(argv))
"""


def errors(tmp_path, late: str, seconds: float, lacks: str, *flags: str) -> dict[str, str]:
    """What each of two ranks said, of which one starts late and one lacks its data."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            "2",
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            "localhost:0",
            "--monitor_interval",
            "0.1",
            str(script),
            late,
            str(seconds),
            lacks,
            "train",
            "--device",
            "cpu",
            "--output_dir",
            str(tmp_path / "out"),
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=patience(120),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 1 and not (tmp_path / "out").exists(), run.stderr
    return dict(re.findall(r"^error \(rank (\d)\): (.*)$", run.stderr, re.M))


@pytest.mark.parametrize("late", [rest("0"), slow("1")])
def test_a_rank_that_comes_late_to_the_same_mistake_says_it_too(tmp_path, late):
    said = errors(tmp_path, late, 2.5, "-", "--lr", "fast")
    assert sorted(said) == ["0", "1"] and all("--lr" in line for line in said.values()), said


@pytest.mark.slow
def test_what_only_one_rank_lacks_is_said_by_the_one_that_waits_for_it(tmp_path):
    model = save_chat_model(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    said = errors(
        tmp_path,
        "1",
        1.5,
        "1",
        "--model_name",
        model,
        "--dataset",
        str(rows),
        "--precision",
        "fp32",
    )
    assert "/no/such/rows.jsonl" in said["1"] and said["0"] == f"rank 1: {said['1']}", said


@pytest.mark.slow
def test_ten_times_without_an_arranged_delay(tmp_path):
    for _ in range(10):
        assert sorted(errors(tmp_path, "-", 0, "-", "--lora_rank", "0")) == ["0", "1"]
