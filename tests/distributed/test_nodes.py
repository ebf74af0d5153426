"""Two and three hosts, each in a network namespace: the same losses, one writer, a cable pulled out."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.harness import command, make_inputs, outcome
from tests.hosts import Hosts, enter
from tests.patience import patience
from tests.ranks import PRELOAD

ROOT = Path(__file__).parents[2]
FLAGS = ("--global_batch_size", "4", "--lora_dropout", "0", "--eval_every", "6")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def reference(inputs, tmp_path_factory):
    """What two ranks of one host give."""
    run = command(inputs, tmp_path_factory.mktemp("reference") / "out", *FLAGS)
    assert run.start().codes == [0, 0]
    return outcome(run.out)


def rank_main(host: str, env: dict[str, str], argvs: list[list[str]], log: str):
    """A rank on a host: command lines one after another, until one fails."""
    enter(host)
    import torch

    os.environ.update(env)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    from fsdp_qlora.cli import main
    from fsdp_qlora.lifecycle import watchdog

    watchdog.WITHOUT_STORE_SECONDS = 5
    code = next(filter(None, map(main, argvs)), 0)
    sys.stdout.flush()
    os._exit(code)


class Ranks:
    """The ranks of a start, a few on each host; they begin at once."""

    def __init__(
        self, hosts: Hosts, per_host: int, log: Path, *argvs: list[str], main_host: int = 0
    ):
        self.log, count = log, hosts.count
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.processes = []
        for rank in range(count * per_host):
            host = (rank // per_host + main_host) % count
            env = dict(
                RANK=str(rank),
                LOCAL_RANK=str(rank % per_host),
                WORLD_SIZE=str(count * per_host),
                LOCAL_WORLD_SIZE=str(per_host),
                MASTER_ADDR=f"host{main_host}",
                MASTER_PORT="29500",
            )
            self.processes.append(
                context.Process(
                    target=rank_main, args=(hosts.pids[host], env, list(argvs), f"{log}.{rank}")
                )
            )
        for process in self.processes:
            process.start()

    def codes(self, timeout: float = 120) -> list[int]:
        """Exit codes, once all ranks have ended; -9 of those that did not in time."""
        deadline = time.monotonic() + patience(timeout)
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        return [process.exitcode for process in self.processes]

    def text(self, rank: int) -> str:
        return Path(f"{self.log}.{rank}").read_text()


def same(figures, reference) -> bool:
    """Losses of steps and evaluations within rounding, rates equal; padding depends on the ranks."""
    return len(figures) == len(reference) and all(
        a[:2] == b[:2] and a[4] == b[4] and (a[2] or a[3]) == pytest.approx(b[2] or b[3], rel=1e-4)
        for a, b in zip(figures, reference, strict=True)
    )


@pytest.mark.slow
def test_every_strategy_over_two_hosts_has_the_losses_of_one_host_and_one_writer(
    inputs, reference, tmp_path
):
    """Each host has a disk of its own: what any rank of the second wrote would be there."""
    disk = tmp_path / "disk"
    disk.mkdir()
    runs = {
        name: command(inputs, disk / name, *FLAGS, "--sharding_strategy", name)
        for name in ("hybrid_full_shard", "hybrid_shard_grad_op", "full_shard", "ddp")
    }
    with Hosts(2, tmp_path / "hosts", disk) as hosts:
        ranks = Ranks(hosts, 2, tmp_path / "log", *(run.argv for run in runs.values()))
        assert ranks.codes() == [0] * 4, ranks.text(0)
    for name in runs:
        figures = outcome(tmp_path / "hosts/disk0" / name)[0]
        assert same(figures, reference[0]), name
    assert "host1 can't see it" in ranks.text(0)
    left = [p for p in (tmp_path / "hosts/disk1").rglob("*") if p.is_file()]
    assert not left


def wait_for(path: Path, ranks: Ranks, seconds: float = 60):
    """Until a file is there, while the ranks run."""
    deadline = time.monotonic() + patience(seconds)
    while not path.exists():
        assert time.monotonic() < deadline and all(p.is_alive() for p in ranks.processes), (
            ranks.text(0)
        )
        time.sleep(0.02)


LONG = ("--num_epochs", "4", "--sharding_strategy", "full_shard")  # 24 steps


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_all_ranks_and_the_run_goes_on_with_another_host_as_the_first(
    inputs, tmp_path
):
    """On two disks: the second start has its rank 0, which keeps the run, where the files are not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    run = command(inputs, disk / "out", *FLAGS, *LONG, "--stall_seconds", "3")
    whole = command(inputs, disk / "whole", *FLAGS, *LONG)
    disks = [tmp_path / f"hosts/disk{host}" for host in range(2)]
    with Hosts(2, tmp_path / "hosts", disk) as hosts:
        first = Ranks(hosts, 2, tmp_path / "first", run.argv)
        wait_for(disks[0] / "out/checkpoints/step-000006", first)
        hosts.cable(1, "down")
        cut = time.monotonic()
        codes, said = first.codes(60), [first.text(rank) for rank in range(4)]
        assert sorted(codes) in ([1, 70, 70, 70], [70] * 4) and time.monotonic() - cut < patience(
            45
        ), said
        assert not any("Traceback" in text for text in said)
        assert "no answer from rank 2" in said[0] + said[1] and "rank 3" in said[0] + said[1], said[
            0
        ]
        # A rank that waits in a collective may see it break before the store is missed.
        for text in said[2:]:
            assert (
                "store on rank 0's machine: its process is stopped, or the machine is gone" in text
                or "lost the connection to another rank" in text
            ), text
        hosts.cable(1, "up")
        second = Ranks(hosts, 2, tmp_path / "second", run.argv, whole.argv, main_host=1)
        assert second.codes() == [0] * 4, second.text(0)
    assert "copied the newest checkpoint" in second.text(0) and "resumed from" in second.text(0)
    _, *undisturbed = outcome(disks[1] / "whole")
    figures, *weights = outcome(disks[1] / "out")
    assert weights == undisturbed and [f[1] for f in figures if f[0] == "step"] == [*range(1, 25)]
    assert not list((disks[0] / "whole").rglob("*.safetensors"))


class Launcher:
    """torchrun on each host, started again as a scheduler does, up to `starts` times each."""

    def __init__(self, hosts: Hosts, per_host: int, log: Path, run, *flags: str, starts: int = 1):
        self.hosts, self.log = hosts, log
        cores = sorted(os.sched_getaffinity(0))
        again = f'for _ in $(seq {starts}); do "$@" && exit; sleep 1; done; exit 1'
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self.processes = []
        for host in range(hosts.count):
            named = [flag.replace("HOST", str(host)) for flag in flags]
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc_per_node",
                str(per_host),
                "--monitor_interval",
                "0.2",
                *named,
                "-m",
                "fsdp_qlora.cli",
                *run.argv,
            ]
            with open(f"{log}.{host}", "w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [
                            *hosts.inside(host),
                            f"--wd={ROOT}",
                            "taskset",
                            "--cpu-list",
                            str(cores[host % len(cores)]),
                            "bash",
                            "-c",
                            again,
                            "again",
                            *torchrun,
                        ],
                        env=env,
                        stdout=file,
                        stderr=file,
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_):
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            process.wait(patience(60))

    def text(self, host: int) -> str:
        return Path(f"{self.log}.{host}").read_text()

    def codes(self, seconds: float) -> list[int]:
        return [process.wait(patience(seconds)) for process in self.processes]

    def rank_of(self, host: int) -> int:
        """Process id of a rank on a host."""
        commands = {
            pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in self.hosts.processes(host)
        }
        return next(
            pid
            for pid, line in commands.items()
            if "fsdp_qlora.cli" in line and "torch.distributed.run" not in line
        )


C10D = ("--rdzv_backend", "c10d", "--rdzv_endpoint", "host0:29400", "--rdzv_id", "run")
STATIC = (
    "--rdzv_backend",
    "static",
    "--node_rank",
    "HOST",
    "--master_addr",
    "host0",
    "--master_port",
    "29400",
)


def wait_until(condition, launcher: Launcher, seconds: float = 240):
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < deadline, launcher.text(0)[-3000:] + launcher.text(1)[-3000:]
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "count, how", [(2, C10D), (3, C10D), (2, STATIC)], ids=["two", "three", "static"]
)
def test_torchrun_starts_all_hosts_again_after_a_rank_of_one_was_killed(
    inputs, tmp_path, count, how
):
    """The agents count restarts differently then: only one of them has seen a failure of its own."""
    run = command(inputs, tmp_path / "out", *FLAGS, "--num_epochs", "6")
    reference = command(inputs, tmp_path / "reference", *FLAGS, "--num_epochs", "6")
    with Hosts(count, tmp_path / "hosts") as hosts:
        with Launcher(
            hosts, 1, tmp_path / "log", run, "--nnodes", str(count), "--max_restarts", "2", *how
        ) as launcher:
            wait_until((run.out / "checkpoints/step-000004").exists, launcher)
            os.kill(launcher.rank_of(1), signal.SIGKILL)
            assert launcher.codes(240) == [0] * count, launcher.text(0)[-3000:]
            text = "".join(map(launcher.text, range(count)))
    assert "resumed from" in text and reference.start().codes == [0, 0]
    assert same(outcome(run.out)[0], outcome(reference.out)[0])
