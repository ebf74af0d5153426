"""--on_end: a command of the user's hears once how a run ended, whatever becomes of it."""
import subprocess
import sys

import pytest

from fsdp_qlora.cli import main
from fsdp_qlora.training.notice import told_at_end
from fsdp_qlora.training.signals import StopRequested

from .test_dryrun import folder  # noqa: F401  a model, rows and a recipe

WRITE = 'echo "$FSDP_QLORA_STATUS|$FSDP_QLORA_MESSAGE|$FSDP_QLORA_OUTPUT_DIR" >> '


@pytest.mark.parametrize("error, told", [
    (None, "finished|after 0 s|out"),
    (ValueError("--lr: bad\nmore"), "failed|ValueError: --lr: bad|out"),
    (KeyboardInterrupt(), "stopped|by the keyboard|out")])
def test_the_command_hears_the_end_and_the_error_goes_on(tmp_path, error, told):
    def run():
        with told_at_end(WRITE + str(tmp_path / "told"), "out"):
            if error: raise error
    if error:
        with pytest.raises(type(error)) as caught: run()
        assert caught.value is error
    else: run()
    assert (tmp_path / "told").read_text() == told + "\n"


def test_a_stop_that_was_asked_for_is_no_failure(tmp_path):
    with pytest.raises(StopRequested), told_at_end(WRITE + str(tmp_path / "told"), "out"):
        raise StopRequested("told to stop")
    assert (tmp_path / "told").read_text().startswith("stopped|")


def test_a_command_that_fails_warns_and_changes_nothing(capfd):
    with told_at_end("exit 3", "out"): pass
    assert "warning: the command of --on_end failed: exit code 3" in capfd.readouterr().err


def test_secrets_of_an_error_are_not_passed_on(tmp_path):
    secret = "hf_" + "a" * 34
    with pytest.raises(ValueError), told_at_end(WRITE + str(tmp_path / "told"), "out"):
        raise ValueError(f"token {secret} was refused")
    assert secret not in (tmp_path / "told").read_text()


@pytest.mark.parametrize("flags, code, told", [
    (["--max_steps", "1"], 0, "finished|"),
    (["--dataset", "absent.jsonl"], 2, "failed|ValueError: --dataset absent.jsonl")])
def test_two_ranks_tell_it_once(folder, tmp_path, monkeypatch, flags, code, told):  # noqa: F811
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RANK", raising=False)
    command = WRITE + str(tmp_path / "told")
    argv = ["train", "--config", "recipe.yaml", "--output_dir", str(tmp_path / "out"), "--precision",
            "fp32", "--on_end", command, *flags]
    done = subprocess.run([sys.executable, "-m", "fsdp_qlora.cli", *argv], capture_output=True,
                          text=True)
    assert done.returncode == code, done.stderr
    (line,) = (tmp_path / "told").read_text().splitlines()
    assert line.startswith(told)
    written = "".join(f.read_text() for f in (tmp_path / "out").rglob("*.json"))
    assert command not in written and bool(written) is not bool(code)


def test_a_dry_run_tells_nothing(folder, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(folder)
    assert main(["train", "--config", "recipe.yaml", "--dry_run", "--on_end",
                 WRITE + str(tmp_path / "told")]) == 0
    assert not (tmp_path / "told").exists()
