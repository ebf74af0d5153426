"""Two runs never write into one output folder; a dead run's lock holds nobody up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from fsdp_qlora.lifecycle.lock import LOCK, is_held, sole_run_in

HOLD = (
    "import sys, time; from fsdp_qlora.lifecycle.lock import sole_run_in\n"
    "with sole_run_in(sys.argv[1]): print('held', flush=True); time.sleep(100)"
)


@contextmanager
def held_by_another(folder):
    """A process that holds the folder until it is killed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            yield other
        finally:
            other.kill()


def test_a_second_run_is_refused_with_the_process_of_the_first(tmp_path):
    folder = tmp_path / "out put é"
    with held_by_another(folder) as other:
        with pytest.raises(ValueError) as caught, sole_run_in(folder):
            pass
        assert "--output_dir" in str(caught.value) and f"process {other.pid} on " in str(
            caught.value
        )


def test_the_lock_of_a_killed_run_is_taken_over(tmp_path):
    assert is_held(tmp_path) is None
    with held_by_another(tmp_path):
        assert is_held(tmp_path) is True
    assert (tmp_path / LOCK).exists() and is_held(tmp_path) is False
    with sole_run_in(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK).read_text()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_can_not_be_removed_hides_no_error_of_the_run(tmp_path):
    """As on a disk that became read-only."""
    with pytest.raises(KeyError), sole_run_in(tmp_path):
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).mkdir()
        raise KeyError
    with (
        pytest.raises(ValueError, match=f"--output_dir {tmp_path}: .*; give another folder"),
        sole_run_in(tmp_path),
    ):
        pass


def test_a_folder_that_was_made_and_not_used_is_removed(tmp_path):
    with sole_run_in(tmp_path / "new"):
        pass
    with sole_run_in(tmp_path / "used"):
        (tmp_path / "used" / "file").touch()
    assert [p.name for p in tmp_path.iterdir()] == ["used"]


def test_without_locks_one_warning_says_so_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    """As on some network file systems."""

    def refused(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refused)
    with sole_run_in(tmp_path):
        pass
    assert capsys.readouterr().out == (
        f"warning: --output_dir {tmp_path}: its file system has no locks (Function not implemented), so "
        "nothing keeps a second run from writing there\n"
    )
    assert not list(tmp_path.iterdir())


def test_a_file_of_a_users_own_is_not_taken_for_the_lock(tmp_path):
    (tmp_path / ".lock").write_text("mine")
    with sole_run_in(tmp_path):
        pass
    assert (tmp_path / ".lock").read_text() == "mine"


def test_a_lock_held_on_another_machine_says_which_file_to_delete_if_that_is_gone(tmp_path):
    with held_by_another(tmp_path) as other:
        holder = json.loads((tmp_path / LOCK).read_text())
        (tmp_path / LOCK).write_text(json.dumps(holder | dict(host="node-7")))
        with pytest.raises(ValueError) as caught, sole_run_in(tmp_path):
            pass
        told = str(caught.value)
        assert f"process {other.pid} on node-7" in told
        assert told.endswith(f"or delete {tmp_path / LOCK} if that machine is gone")
        (tmp_path / LOCK).unlink()
        with sole_run_in(tmp_path):
            assert str(os.getpid()) in (tmp_path / LOCK).read_text()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"pid": 1}', "\x00\xff"])
def test_a_held_lock_with_any_content_is_one_line(tmp_path, content):
    with held_by_another(tmp_path):
        (tmp_path / LOCK).write_text(content, encoding="latin-1")
        with pytest.raises(ValueError, match="--output_dir .*: another run writes there; stop it"):
            with sole_run_in(tmp_path):
                pass
