"""A run that is stopped, killed or can't write ends soon, on all ranks, and leaves nothing half made."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from contextlib import redirect_stderr
from io import StringIO
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import free_port
from fsdp_qlora.lifecycle.closed_terminal import outlive_terminal
from fsdp_qlora.lifecycle.launcher import _how_to_launch
from fsdp_qlora.lifecycle.signals import STOP_SIGNALS, StopSignals
from tests.parts import rest, slow
from tests.patience import patience
from tests.ranks import run_ranks
from tests.tiny import padded_batch, tiny_rows
from tests.tokenizers import save_chat_model

ROOT = Path(__file__).parents[2]
SECONDS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(
        "".join(json.dumps(dict(prompt=str(i), completion=str(i))) + "\n" for i in range(8))
    )
    return str(path)


# ---- signals -----------------------------------------------------------------------------------


def flags_of(folder: str, rows: str, out: Path) -> list[str]:
    """A run that comes to no end."""
    return [
        "--model_name",
        folder,
        "--dataset",
        rows,
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--lora_rank",
        "2",
        "--num_epochs",
        "1000000",
        "--output_dir",
        str(out),
    ]


def endless_run(
    folder: str,
    rows: str,
    out: Path,
    world_size: int,
    prepare=None,
    terminal=None,
    more: tuple[str, ...] = (),
) -> subprocess.Popen:
    """train.py after its first steps; `prepare` is called in its process before it begins.

    terminal: the two ends of one, for what it prints. more: flags.
    """
    theirs = terminal[1] if terminal else subprocess.PIPE
    command = [
        sys.executable,
        "train.py",
        *flags_of(folder, rows, out),
        "--world_size",
        str(world_size),
        "--log_to",
        "stdout",
        "--log_every",
        "1",
        *more,
    ]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        text=True,
        stdin=terminal and theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=prepare or listen_to_ctrl_c,
        start_new_session=bool(terminal),
    )
    if terminal:
        os.close(theirs)
    for line in os.fdopen(os.dup(terminal[0])) if terminal else run.stdout:
        if line.startswith("step 3/"):
            return run
    raise AssertionError(run.stderr.read())


def listen_to_ctrl_c():
    """As in a terminal: a shell's background job, which tests may run in, starts with it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def own_the_terminal():
    """Be the one that is told when it closes, also where the tests run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def nohup():
    """As the command of that name."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def end_of(run: subprocess.Popen) -> tuple[int, str, float]:
    """Exit code, errors and seconds until the end."""
    started = time.monotonic()
    try:
        _, error = run.communicate(timeout=patience(SECONDS))
    finally:
        run.kill()
    return run.returncode, error, time.monotonic() - started


def ranks_of(run: subprocess.Popen) -> list[int]:
    """Process ids of the ranks that a run started."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return [int(c) for c in children if "fsdp_qlora.cli" in Path(f"/proc/{c}/cmdline").read_text()]


def is_alive(process: int) -> bool:
    """Whether a process runs, or is stopped; what nobody has asked about since it ended does not."""
    stat = Path(f"/proc/{process}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize(
    "world_size, to_a_rank, number",
    [
        slow(1, False, signal.SIGTERM),
        rest(2, False, signal.SIGTERM),
        slow(2, True, signal.SIGUSR1),
        (1, False, signal.SIGINT),
        slow(2, False, signal.SIGINT),
    ],
)
def test_a_signal_or_ctrl_c_to_the_launcher_or_a_rank_saves_and_ends_with_75(
    folder, rows, tmp_path, world_size, to_a_rank, number
):
    run = endless_run(folder, rows, tmp_path, world_size)
    ranks = ranks_of(run)
    assert len(ranks) == (world_size if world_size > 1 else 0)
    is_ctrl_c = number == signal.SIGINT
    for process in [*ranks, run.pid] if is_ctrl_c else [ranks[1] if to_a_rank else run.pid]:
        os.kill(process, number)  # a terminal tells all processes of Ctrl-C
    for _ in range(20 * (number == signal.SIGTERM)):  # some schedulers tell it again and again
        time.sleep(0.05)
        if run.poll() is None:
            os.kill(run.pid, number)
    code, error, seconds = end_of(run)
    assert code == 75 and seconds < patience(30) and "Traceback" not in error, error
    assert "death signal" not in error  # torch's own line
    assert ("press Ctrl-C again" in error) == is_ctrl_c
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    step = re.search(r"stopped after step (\d+); saved in", error)[1]
    (saved,) = (tmp_path / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == int(step) >= 3


@pytest.mark.slow
def test_a_run_whose_terminal_closes_saves_though_it_can_print_no_more(folder, rows, tmp_path):
    terminal = pty.openpty()
    run = endless_run(folder, rows, tmp_path, 2, own_the_terminal, terminal)
    os.close(terminal[0])
    assert run.wait(timeout=patience(SECONDS)) == 75
    (saved,) = (tmp_path / "checkpoints").glob("step-*")
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["status"] == "stopped" and f"saved in {saved}" in last["message"]


def test_what_is_no_terminal_is_printed_to_as_before(monkeypatch):
    """A file, and a stdout that was closed (`>&-`), which Python has as None."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", StringIO())
    before = sys.stderr
    outlive_terminal()
    assert sys.stdout is None and sys.stderr is before


@pytest.mark.slow
def test_a_run_under_nohup_outlives_its_terminal_and_is_stopped_as_ever(folder, rows, tmp_path):
    run = endless_run(folder, rows, tmp_path, 2, nohup)
    os.kill(run.pid, signal.SIGHUP)
    assert len(list(islice(run.stdout, 60))) == 60  # it goes on
    os.kill(run.pid, signal.SIGUSR1)
    code, error, _ = end_of(run)
    assert code == 75 and "; saved in" in error, error


def test_a_second_ctrl_c_ends_a_run_at_once(monkeypatch):
    monkeypatch.setattr("fsdp_qlora.lifecycle.signals.SAME_SECONDS", 0)
    before = {s: signal.getsignal(s) for s in (*STOP_SIGNALS, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # In a run, what has not ended by then is ended: here that would be the tests themselves.
        with StopSignals(grace_seconds=1e6) as signals:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)  # nothing to save
            signals.can_save = True
            signal.raise_signal(signal.SIGINT)
            while not signals.is_asked():
                time.sleep(0.01)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_run_that_ends_as_soon_as_it_is_asked_to_waits_for_threads_that_are_about_to_start(
    monkeypatch,
):
    start, ended = threading.Thread.start, []

    def late(thread):
        if thread.name == "looking":
            time.sleep(0.5)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", late)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals(grace_seconds=1e6) as signals:
            signals.can_save, signals.missing = True, lambda: ended.append(signals.is_over.is_set())
            signal.raise_signal(signal.SIGTERM)
            while not signals.is_asked():
                time.sleep(0.001)
        assert signals.looking and not signals.looking.is_alive()
        assert ended == [True]
    finally:
        signal.signal(signal.SIGTERM, before)


STOPPED = """
import sys, time
from torch.distributed import TCPStore
from fsdp_qlora.dist.rank_store import RankStore
from fsdp_qlora.lifecycle import signals, watchdog
signals.LOOK_SECONDS, watchdog.GONE_LOOKS = 0, 10**9
store = TCPStore("localhost", 0, 1, True, wait_for_workers=False)
mine, other = (watchdog.Watchdog(RankStore(store, rank, 2), 60) for rank in range(2))
with signals.StopSignals() as stop, mine.watching(), other.watching():
    stop.can_save, stop.missing = True, mine.missing
    stop.stop("SIGTERM")
    time.sleep(0.2)
sys.exit(75)
"""


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("localhost", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("up", flush=True)
sys.stdin.read()
"""
WATCHED = """
import atexit, os, signal, sys, time
from torch.distributed import TCPStore
from fsdp_qlora import cli
from fsdp_qlora.dist.rank_store import RankStore
from fsdp_qlora.lifecycle import watchdog
port, other = map(int, sys.argv[1:])
def stalled(argv):
    mine = watchdog.Watchdog(RankStore(TCPStore("localhost", port), 0, 2), 0.1)
    mine.grace, watchdog.END_SECONDS = 0, 0.2
    os.kill(other, signal.SIGSTOP)
    atexit.register(os.kill, other, signal.SIGCONT)  # the answers come as Python ends
    with mine.watching(): time.sleep(1)
    raise ValueError("wrong")
cli.COMMANDS["train"] = stalled
sys.exit(cli.main(["train"]))
"""


@pytest.mark.slow
def test_a_store_that_is_frozen_as_a_run_ends_does_not_abort_it():
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-c", STORE, str(port)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as store:
        try:
            assert store.stdout.readline() == "up\n"
            ended = subprocess.run(
                [sys.executable, "-c", WATCHED, str(port), str(store.pid)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=patience(SECONDS),
            )
        finally:
            store.kill()
    assert ended.returncode == 2 and "error: wrong" in ended.stderr, ended


@pytest.mark.slow
def test_a_look_for_other_ranks_does_not_abort_a_process_that_ends():
    """With looks one after another; without the wait for the last one it did five times of six."""
    ended = [
        subprocess.run([sys.executable, "-c", STOPPED], cwd=ROOT, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [run.returncode for run in ended] == [75, 75], ended


NEVER_WRITTEN = """
import os, signal, sys, time
from fsdp_qlora import cli
from fsdp_qlora.checkpoint import writer
from fsdp_qlora.training.loop import Training
writer._write_part = lambda *_: time.sleep(3600)
after_step = Training.after_step
def told(self):
    after_step(self)
    if self.boundary.step == 2: os.kill(os.getpid(), signal.SIGUSR1)
Training.after_step = told
sys.exit(cli.main(sys.argv[1:]))
"""


def run_of(script: str, flags: list[str]) -> subprocess.CompletedProcess:
    """One rank's run by a script that calls the command line."""
    return subprocess.run(
        [sys.executable, "-c", script, "train", "--world_size", "1", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_stop_may_save_for_as_long_as_it_is_given_and_its_launcher_waits(folder, rows, tmp_path):
    ended = run_of(
        NEVER_WRITTEN, [*flags_of(folder, rows, tmp_path), "--stop_grace_seconds", "1.5"]
    )
    assert ended.returncode == 75, ended.stderr
    assert "stopped by SIGUSR1: not saved within 1.5 s (--stop_grace_seconds)" in ended.stderr
    waits = [
        _how_to_launch(2, RunConfig(stop_grace_seconds=s)).shutdown_timeout for s in (25, 299.5)
    ]
    assert waits == [30, 305]  # 30 is torch's own


FAILS_AMID_A_WRITE = """
import sys, time, types
import torch
from fsdp_qlora import cli
from fsdp_qlora.dist import rank_store
from fsdp_qlora.checkpoint import writer
from fsdp_qlora.training import loop
def failing(self):
    self.save()
    raise RuntimeError("an error amid a write")
def endless(*_):
    while True: torch.ones(1000, 1000).sum()
loop.LAST_WAIT_SECONDS, writer.END_SECONDS, loop.Training.after_step = 0.2, 1, failing
if sys.argv.pop() == "disk": writer._write_part = endless
else:  # rank 0 asks the store again and again for a word that never comes
    rank_store.time = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None)
    rank_store.RankStore.post = lambda *_: None
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("waits_for", [rest("disk"), slow("another rank")])
def test_an_error_amid_a_write_ends_with_its_own_code(folder, rows, tmp_path, waits_for):
    """Python aborts a process that ends while a thread is in C++."""
    ended = run_of(FAILS_AMID_A_WRITE, [*flags_of(folder, rows, tmp_path), waits_for])
    assert ended.returncode == 1 and "RuntimeError: an error amid a write" in ended.stderr, ended
    assert "terminate called" not in ended.stderr
    assert not list((tmp_path / "checkpoints").glob("*"))


@pytest.mark.slow
def test_the_death_of_one_rank_ends_the_others_and_is_named(folder, rows, tmp_path):
    run = endless_run(folder, rows, tmp_path, 2)
    victim, other = ranks_of(run)
    os.kill(victim, signal.SIGKILL)
    code, error, _ = end_of(run)
    assert code == 128 + signal.SIGKILL
    assert "error: rank 0 was killed by SIGKILL" in error and "memory" in error, error
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.slow
def test_ranks_end_where_their_launcher_is_killed(folder, rows, tmp_path):
    """They would train on, and hold the GPUs, where nobody sees them. Their store was the launcher's, so
    they may not agree on a step to save.
    """
    run = endless_run(folder, rows, tmp_path, 2)
    ranks = ranks_of(run)
    run.kill()
    _, error, seconds = end_of(run)
    assert seconds < patience(30) and re.search("stopped (after step|by SIGTERM)", error), error
    assert not any(is_alive(rank) for rank in ranks)


@pytest.mark.slow
def test_a_stop_is_not_waited_for_where_a_rank_is_gone(folder, rows, tmp_path):
    """As after torchrun's SIGTERM to what a killed rank leaves; a frozen one answers as little."""
    told = tmp_path / "told"
    run = endless_run(
        folder,
        rows,
        tmp_path,
        2,
        more=("--on_end", f'echo "$FSDP_QLORA_STATUS $FSDP_QLORA_MESSAGE" >> {told}'),
    )
    ranks = ranks_of(run)
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(ranks[0], signal.SIGTERM)
    while is_alive(ranks[0]):
        time.sleep(0.1)
    os.kill(ranks[1], signal.SIGKILL)
    code, error, _ = end_of(run)
    assert code == 75 and "stopped by SIGTERM: rank 1 does not answer" in error, error
    assert told.read_text().startswith("stopped stopped by SIGTERM: rank 1 does not answer")
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


# ---- folders that can't be written to ----------------------------------------------------------


def refusal(argv: list[str]) -> str:
    from fsdp_qlora.cli import main

    error = StringIO()
    with redirect_stderr(error):
        assert main(argv) == 2
    return error.getvalue()


@pytest.mark.parametrize(
    "out, made, fault",
    [
        ("file", "file", "is a file"),
        ("file/deep/er", "file", "is a file"),
        ("out", "out/adapter", "is a file"),
    ],
)
def test_an_output_folder_that_is_a_file_is_refused_before_training(
    folder, rows, tmp_path, out, made, fault
):
    (tmp_path / made).parent.mkdir(exist_ok=True)
    (tmp_path / made).write_text("mine")
    error = refusal(
        [
            "train",
            "--model_name",
            folder,
            "--dataset",
            rows,
            "--device",
            "cpu",
            "--output_dir",
            str(tmp_path / out),
        ]
    )
    assert f"--output_dir {tmp_path / out}" in error and fault in error
    assert (tmp_path / made).read_text() == "mine"


@pytest.mark.parametrize(
    "fault, patched",
    [
        ("can't be written to", ("os.access", lambda *_: False)),
        (
            "has 1 kB free, but the result needs",
            (
                "fsdp_qlora.writable.shutil.disk_usage",
                lambda _: SimpleNamespace(total=10**9, free=1000),
            ),
        ),
    ],
)
def test_a_folder_without_rights_or_space_is_refused_before_training(
    folder, rows, tmp_path, fault, patched, monkeypatch
):
    monkeypatch.setattr(*patched)
    error = refusal(
        [
            "train",
            "--model_name",
            folder,
            "--dataset",
            rows,
            "--device",
            "cpu",
            "--output_dir",
            str(tmp_path / "new" / "out"),
        ]
    )
    assert f"--output_dir {tmp_path}/new/out: {tmp_path}" in error and fault in error, error
    assert not list(tmp_path.iterdir())


def save_twice(folder: str, out: str, train_type: str) -> list[str]:
    """Save, fail to save, train a step, save: what the failure said, and what the folder held."""
    import fsdp_qlora.export.save as export
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import ranks_from_env
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    model = build_model(
        RunConfig(model_name=folder, precision="fp32", lora_rank=2, train_type=train_type),
        torch.device("cpu"),
    )
    export.save_trained(model, out)
    before, write_tensors = listed(out), export.write_tensors
    export.SHARD_BYTES = 100_000  # so that writing begins while ranks still gather

    def full_disk(tensors, path, *_):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    said = []
    for failing in (full_disk, interrupted):
        if ranks_from_env().is_main:
            export.write_tensors = failing
        if failing is interrupted and ranks_from_env().world_size > 1:
            continue
        try:
            export.save_trained(model, out)
        except (OSError, KeyboardInterrupt) as error:
            said.append(str(error))
    after, export.write_tensors = listed(out), write_tensors  # rank 0 is the one that tidies up
    if ranks_from_env().is_main:
        assert before == after, (before, after)
    result = train_step(model, build_optimizer(model), [padded_batch(tiny_rows(1, 2)[0])])
    assert result.loss > 0
    export.save_trained(model, out)
    return said


def interrupted(tensors, path, *_):
    path.write_bytes(b"half")
    raise KeyboardInterrupt("Ctrl-C")


def listed(out: str) -> dict[str, int]:
    """Files beside and in a folder, with their sizes."""
    return {str(p): p.stat().st_size for p in Path(out).parent.rglob("*") if p.is_file()}


@pytest.mark.parametrize("train_type", ["lora", slow("full")])
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_failed_save_is_said_on_all_ranks_keeps_the_old_one_and_the_run_can_go_on(
    folder, tmp_path, world_size, train_type
):
    out = tmp_path / "saved" / "weights"
    ranks = run_ranks(save_twice, world_size, folder, str(out), train_type, timeout=60)
    for said in ranks:
        assert "rank 0 could not write" in said[0] and "No space left" in said[0]
    assert [p.name for p in out.parent.iterdir()] == ["weights"]
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == (1 if train_type == "lora" else 5) and all(load_file(f) for f in files)
