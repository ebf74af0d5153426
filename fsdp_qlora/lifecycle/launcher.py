"""Start the ranks of a run where torchrun did not: one per visible GPU, or one on the CPU."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config import AUTO, RunConfig
from ..config.options import LaunchOptions
from ..dist import check_ranks, common_store, free_port, launched, ranks_from_env
from .signals import EXIT_STOPPED, STOP_SIGNALS, is_ignored

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_PASSED_ON = (*STOP_SIGNALS, signal.SIGINT)  # from the launcher to its ranks
_KILL_SECONDS = 5  # after --stop_grace_seconds the launcher kills a rank that has not ended itself
_LAUNCHER = "FSDP_QLORA_LAUNCHER"  # the process that started this one
_PR_SET_PDEATHSIG = 1


def run_on_ranks(config: RunConfig, command: str, argv: list[str], body: Callable):
    """Run `body(config)` in every rank: here if this is one, else in ranks started for it."""
    wanted = world_size(config)
    _end_with_launcher()
    if launched():
        check_ranks()
        _check_world_size(config)
        share_cores(ranks_from_env().local_world_size)
        if ranks_from_env().world_size > 1:
            common_store()  # so that a rank sees at once that another ends
        body(config)
        return
    if not _is_launched_here():
        _check_started_once()
    if wanted == 1:
        share_cores(1)
        body(config)
    else:
        _start_ranks(wanted, config, command, argv)


def world_size(config: RunConfig) -> int:
    """Ranks to start when torchrun is not used."""
    if config.world_size != AUTO:
        return config.world_size
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    return torch.cuda.device_count() if on_gpu else 1


def _check_world_size(config: RunConfig):
    """--world_size and torchrun must not contradict each other."""
    started = ranks_from_env().world_size
    if config.world_size not in (AUTO, started):
        raise ValueError(
            f"--world_size {config.world_size}, but torchrun started {started} ranks; leave "
            "--world_size out, or change torchrun's --nproc_per_node"
        )


# Of programs that start copies without telling them their ranks as torchrun does: how many there are.
_COPIES = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE", "mpiexec": "PMI_SIZE"}


def _check_started_once():
    """Refuse to be one of several copies that each would train on all rows by itself.

    A shell in an allocation of several tasks (`srun --pty`) has these variables too, and a terminal.
    """
    for starter, variable in _COPIES.items():
        copies = os.environ.get(variable, "1")
        if copies not in ("", "1") and not (sys.stdin and sys.stdin.isatty()):
            raise ValueError(
                f"{variable}={copies}: {starter} started {copies} copies of this program, and none knows its "
                "rank; have it start one torchrun on each machine, as examples/launch/slurm.sbatch does, or "
                f"unset {variable} where only one was started"
            )


def share_cores(ranks_here: int):
    """Split the cores among this machine's ranks; torchrun would leave each with one thread.

    A number of threads that the user gave in the environment stays.
    """
    if _threads_are_given():
        return
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))


def _threads_are_given() -> bool:
    """Whether the user set OMP_NUM_THREADS or MKL_NUM_THREADS.

    Where nobody did, torchrun sets the first to 1 in its ranks: then its own environment lacks it.
    """
    if "MKL_NUM_THREADS" in os.environ:
        return True
    given = os.environ.get("OMP_NUM_THREADS")
    if given != "1" or "TORCHELASTIC_RUN_ID" not in os.environ or _is_launched_here():
        return given is not None
    with suppress(OSError):
        return b"OMP_NUM_THREADS=" in Path(f"/proc/{os.getppid()}/environ").read_bytes()
    return False


def _start_ranks(count: int, config: RunConfig, command: str, argv: list[str]):
    """Start `count` local ranks with torch's launcher and wait; exit as the first failed one did."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    # Each rank has said in one line what went wrong; torch's banner of all ranks would bury it. Some of
    # these loggers have a level of their own.
    for name in ("", ".agent.server.api", ".multiprocessing.errors"):
        logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)
    launch = _how_to_launch(count, config)
    os.environ[_LAUNCHER] = str(os.getpid())
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        with _signals_passed_on():
            elastic_launch(launch, sys.executable)("-m", "fsdp_qlora.cli", command, *argv)
    except ChildFailedError as error:
        # A rank that is told to stop while it loads takes the others' connections with it.
        told = any(f.exitcode == EXIT_STOPPED for f in error.failures.values())
        sys.exit(EXIT_STOPPED if told else _exit_code_of(*error.get_first_failure()))
    except (
        SignalException
    ) as stopped:  # Ctrl-C or a scheduler: the ranks have been told and are gone
        is_saved = stopped.sigval in (*STOP_SIGNALS, signal.SIGINT)
        sys.exit(EXIT_STOPPED if is_saved else 128 + stopped.sigval)


def _how_to_launch(count: int, config: RunConfig) -> LaunchConfig:
    """What torch's launcher is told: once, no restarts, and time to save for ranks that are to stop.

    torch 2.11 knows no shutdown_timeout: it kills ranks 30 s after a signal.
    """
    from torch.distributed.launcher.api import LaunchConfig

    from .local_rendezvous import ONE_MACHINE, register

    register()
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="fsdp_qlora",
        rdzv_backend=ONE_MACHINE,
        rdzv_endpoint=_rendezvous_endpoint(config),
        max_restarts=0,
        monitor_interval=0.2,
    )
    launch.signals_to_handle = "SIGQUIT"
    launch.shutdown_timeout = math.ceil(config.stop_grace_seconds) + _KILL_SECONDS
    return launch


@contextmanager
def _signals_passed_on() -> Iterator[None]:
    """The first signal ends torch's launcher, which passes it on to the ranks and waits for them.

    Another one would make it leave while they save, so it is deaf then, up to its end; but a second
    Ctrl-C it shall pass on as well.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    def pass_on(number, _):
        before.clear()
        for other in STOP_SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise SignalException(f"told to stop by signal {number}", signal.Signals(number))

    before = {s: signal.signal(s, pass_on) for s in _PASSED_ON if not is_ignored(s)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_launched_here() -> bool:
    """Whether the parent of this process is our own launcher; its environment is inherited further."""
    return os.environ.get(_LAUNCHER) == str(os.getppid())


def _end_with_launcher():
    """Have the system stop this process when the one of ours that started it is killed.

    A rank would train on unseen, and a probe measure, and hold their GPUs. torchrun's ranks are
    torchrun's business.
    """
    if not _is_launched_here() or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def as_launcher_of(env: dict[str, str]) -> dict[str, str]:
    """The environment of a process that is to end with this one, if it calls `run_on_ranks`."""
    return env | {_LAUNCHER: str(os.getpid())}


def _rendezvous_endpoint(config: RunConfig) -> str:
    """host:port of this machine where the ranks started here meet; a free port if none was asked for.

    Raises ValueError naming --master_addr and --master_port.
    """
    host, port = config.master_addr, config.master_port
    try:
        return f"{host}:{free_port(host, 0 if port == LaunchOptions.master_port else int(port))}"
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(
            f"--master_addr {host} --master_port {port}: {error}; all ranks started "
            "here are on this machine, so leave both out, or start several machines "
            "with torchrun"
        ) from error


def _exit_code_of(rank: int, failure) -> int:
    """The exit code of a failed rank, as a shell gives it; a killed rank could not say why itself."""
    if failure.exitcode >= 0:
        return failure.exitcode
    if -failure.exitcode in STOP_SIGNALS:
        return EXIT_STOPPED  # before it listened
    hint = (
        "; the usual cause is that host memory ran out (see dmesg)"
        if failure.exitcode == -signal.SIGKILL
        else ""
    )
    print(
        f"error: rank {rank} was killed by {failure.signal_name()}{hint}",
        file=sys.stderr,
        flush=True,
    )
    return 128 - failure.exitcode
