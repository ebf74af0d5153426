"""`--eval_command`: what a program prints is recorded, and its failures never end a run."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path

import pytest

from fsdp_qlora.cli import main
from fsdp_qlora.observe.eval_command import scores_of

from .tokenizers import save_chat_model


def python(code: str) -> str:
    return f"{sys.executable} -S -c {shlex.quote(code)}"


@pytest.mark.parametrize(
    "printed, scores",
    [
        ("0.5", {"score": 0.5}),
        ("loading 3 tasks\n0.25\n", {"score": 0.25}),
        ('{"acc": 0.5, "n": 3, "name": "x", "ok": true}', {"acc": 0.5, "n": 3.0}),
        ('0.1\n{"acc": 0.5}\nsaved to out', {"acc": 0.5}),
        (
            json.dumps({"results": {"arc": {"acc": 0.5, "err": float("nan")}}}, indent=2),
            {"results/arc/acc": 0.5},
        ),
    ],
)
def test_the_last_number_or_object_of_numbers_is_the_score(printed, scores):
    assert scores_of(python(f"print({printed!r})"), {}) == scores


@pytest.mark.parametrize(
    "command, words",
    [
        (python("raise SystemExit(3)"), "exit code 3"),
        ("no-such-program-here", "exit code 127"),
        (python("print('fine')"), "printed no number"),
        (python("pass"), "printed no number"),
        (python("print('[' * 100000)"), "printed no number"),
    ],
)
def test_a_command_that_gives_nothing_is_said_in_one_line(command, words):
    with pytest.raises(ValueError, match=words) as caught:
        scores_of(command, {})
    assert "\n" not in str(caught.value)


def test_a_command_that_takes_too_long_or_outlives_the_run_is_ended_with_what_it_started(tmp_path):
    """The shell's own child goes on writing unless it is ended too."""
    file = tmp_path / "beats"
    beat = f"while true; do echo x >> {file}; sleep 0.05; done"
    with pytest.raises(ValueError, match="--timeout_minutes"):
        scores_of(f"sh -c '{beat}' & wait", {}, most_seconds=1)
    with pytest.raises(ValueError, match="the run stops"):
        scores_of(f"sh -c '{beat}' & wait", {}, is_asked_to_stop=file.exists)
    size = file.stat().st_size
    time.sleep(0.5)
    assert file.stat().st_size == size


def test_a_run_records_the_scores_of_its_evaluations_and_outlives_a_failure(
    tmp_path, capsys, monkeypatch
):
    folder, rows, out = (
        save_chat_model(tmp_path / "model"),
        tmp_path / "rows.jsonl",
        tmp_path / "out",
    )
    rows.write_text(
        "".join(json.dumps(dict(prompt=f"{i}?", completion="yes")) + "\n" for i in range(6))
    )
    code = (
        "import json, os, pathlib; step = int(os.environ['FSDP_QLORA_STEP']); "
        "folder = pathlib.Path(os.environ['FSDP_QLORA_WEIGHTS']); "
        "assert step != 4; print(json.dumps({'step': step, "
        "'bytes': (folder / 'adapter_model.safetensors').stat().st_size}))"
    )
    argv = ["train", "--model_name", folder, "--dataset", str(rows), "--output_dir", str(out)]
    argv += ["--device", "cpu", "--world_size", "1", "--lora_rank", "2", "--global_batch_size", "1"]
    assert main([*argv, "--eval_every", "2", "--eval_command", python(code)]) == 0
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    records = [line for line in lines if line["kind"] == "scores"]
    size = (Path(out) / "adapter" / "adapter_model.safetensors").stat().st_size
    assert [r["scores"] for r in records] == [dict(step=s, bytes=size) for s in (2, 6)]
    said = capsys.readouterr().out
    assert "after step 4, --eval_command: exit code 1" in said and "the run goes on" in said
    assert "step 2" in said
