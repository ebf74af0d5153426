"""--on_end: a command of the user's hears once how a run ended, whatever becomes of it."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_qlora.cli import main
from fsdp_qlora.lifecycle.notify import told_at_end
from fsdp_qlora.lifecycle.signals import StopRequested
from tests.parts import slow
from tests.patience import patience

from .test_dryrun import folder  # noqa: F401  a model, rows and a recipe

ROOT = Path(__file__).parents[1]
WRITE = 'echo "$FSDP_QLORA_STATUS|$FSDP_QLORA_MESSAGE|$FSDP_QLORA_OUTPUT_DIR" >> '


@pytest.mark.parametrize(
    "error, told",
    [
        (None, "finished|after 0 s|out"),
        (ValueError("--lr: bad\nmore"), "failed|ValueError: --lr: bad|out"),
        (KeyboardInterrupt(), "stopped|by the keyboard|out"),
    ],
)
def test_the_command_hears_the_end_and_the_error_goes_on(tmp_path, error, told):
    def run():
        with told_at_end(WRITE + str(tmp_path / "told"), "out"):
            if error:
                raise error

    if error:
        with pytest.raises(type(error)) as caught:
            run()
        assert caught.value is error
    else:
        run()
    assert (tmp_path / "told").read_text() == told + "\n"


def test_a_stop_that_was_asked_for_is_no_failure(tmp_path):
    with pytest.raises(StopRequested), told_at_end(WRITE + str(tmp_path / "told"), "out"):
        raise StopRequested("told to stop")
    assert (tmp_path / "told").read_text().startswith("stopped|")


def test_a_command_that_fails_warns_and_changes_nothing(capfd):
    with told_at_end("exit 3", "out"):
        pass
    assert "warning: the --on_end command failed: exit code 3" in capfd.readouterr().err


ENDS_AT_ONCE = """
import os, signal, sys, time
from fsdp_qlora.lifecycle import watchdog
from fsdp_qlora.lifecycle.notify import told_at_end
from fsdp_qlora.lifecycle.signals import StopRequested, StopSignals
case, command = sys.argv[1:]
with StopSignals(grace_seconds=0.5 if case == "not saved" else 1.5) as stop, \\
        told_at_end(command, "out", stop.seconds_left):
    stop.can_save, stop.missing = True, lambda: "rank 1" if case == "a rank is gone" else ""
    if case == "stalled": watchdog.Watchdog(None, 600).end("the run has made no progress")
    if case == "before": stop.can_save = False
    stop.stop("SIGTERM")
    if case == "saved":
        try: raise StopRequested("saved")
        finally: print("left", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize(
    "case, code, told",
    [
        ("saved", 1, "stopped|saved"),
        ("not saved", 75, "stopped|stopped by SIGTERM: not saved within 0.5 s"),
        slow("before", 75, "stopped|stopped by SIGTERM before the first step"),
        slow("a rank is gone", 75, "stopped|stopped by SIGTERM: rank 1 does not answer"),
        slow("stalled", 70, "failed|error: the run has made no progress"),
    ],
)
def test_a_command_outlives_what_ends_the_run_at_once(tmp_path, case, code, told):
    """A process that has saved ends by itself (1: this one's error), and is not said to have not."""
    command = f"sleep 3; {WRITE}{tmp_path}/part; mv {tmp_path}/part {tmp_path}/told"
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, case, command],
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "error").open("w"),
    )
    error = (tmp_path / "error").read_text()
    assert ended.returncode == code and ("not saved" in error) == (case == "not saved"), error
    assert "--on_end" not in error  # no warning
    for _ in range(int(patience(600))):
        if (tmp_path / "told").exists():
            break
        time.sleep(0.1)
    (line,) = (tmp_path / "told").read_text().splitlines()
    assert line.startswith(told)


def test_a_command_without_end_is_ended_with_all_it_started(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("fsdp_qlora.lifecycle.notify.PATIENCE_S", 0.5)
    with told_at_end(f"(sleep 600; true) & echo $! > {tmp_path}/process; wait", "out"):
        pass
    assert "the --on_end command failed: it did not finish within 0.5 s" in capfd.readouterr().err
    stat = Path(f"/proc/{(tmp_path / 'process').read_text().strip()}/stat")
    for _ in range(int(patience(100))):
        if not stat.exists() or ") Z " in stat.read_text():
            break
        time.sleep(0.1)
    else:
        raise AssertionError("its process lives")


def test_secrets_of_an_error_are_not_passed_on(tmp_path):
    secret = "hf_" + "a" * 34
    with pytest.raises(ValueError), told_at_end(WRITE + str(tmp_path / "told"), "out"):
        raise ValueError(f"token {secret} was refused")
    assert secret not in (tmp_path / "told").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, code, told",
    [
        (["--max_steps", "1"], 0, "finished|"),
        (["--dataset", "absent.jsonl"], 2, "failed|ValueError: --dataset absent.jsonl"),
    ],
)
def test_two_ranks_tell_it_once(folder, tmp_path, monkeypatch, flags, code, told):  # noqa: F811
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RANK", raising=False)
    command = WRITE + str(tmp_path / "told")
    argv = [
        "train",
        "--config",
        "recipe.yaml",
        "--output_dir",
        str(tmp_path / "out"),
        "--precision",
        "fp32",
        "--on_end",
        command,
        *flags,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_qlora.cli", *argv], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    (line,) = (tmp_path / "told").read_text().splitlines()
    assert line.startswith(told)
    written = "".join(f.read_text() for f in (tmp_path / "out").rglob("*.json"))
    assert command not in written and bool(written) is not bool(code)


def test_a_dry_run_tells_nothing(folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(folder)
    assert (
        main(
            [
                "train",
                "--config",
                "recipe.yaml",
                "--dry_run",
                "--on_end",
                WRITE + str(tmp_path / "told"),
            ]
        )
        == 0
    )
    assert not (tmp_path / "told").exists()
