"""The launch examples: they parse, and the flags in them are those of torchrun and train.py."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from torch.distributed import TCPStore
from torch.distributed.run import get_args_parser

from fsdp_qlora.cli import TrainOptions
from fsdp_qlora.config.flags import parse
from fsdp_qlora.dist import rendezvous
from tests.chaos.harness import command, make_inputs, outcome
from tests.hosts import Hosts
from tests.parts import rest, slow
from tests.patience import patience

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "examples/launch"
VALUES = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "#hosts[@]": "2", "GPUS:-8": "8"}
VALUES |= {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
VALUES |= {"DSTACK_NODES_NUM": "2", "DSTACK_GPUS_PER_NODE": "8"}
# What each command's options take, by SLURM's own pages (scripts/slurm_options.py).
SLURM = json.loads((ROOT / "tests/slurm_options.json").read_text())


def filled(text: str) -> str:
    """A script's text with a value for each variable."""
    text = re.sub(r"\$\{([^}]*)\}|\$(\w+)", lambda m: VALUES.get(m[1] or m[2], "x"), text)
    return text.replace("\\\n", " ")


@pytest.mark.parametrize("name, key", [("skypilot.yaml", "run"), ("dstack.yaml", "commands")])
def test_task_files_start_torchrun_on_all_gpus_with_flags_that_it_and_train_have(name, key):
    task = yaml.safe_load((LAUNCH / name).read_text())
    commands = task[key] if isinstance(task[key], str) else "\n".join(task[key])
    line = re.search(r"torchrun\s+(--nnodes.*)", filled(commands), re.S)[1]
    assert "--rdzv_backend c10d" in line and "--max_restarts 3" in line
    flags = [flag.replace("examples/", f"{ROOT}/examples/") for flag in check_torchrun(line)]
    config, _ = parse(flags, TrainOptions)
    assert config.sharding_strategy == "hybrid_full_shard" and config.output_dir == "/runs/70b"


def check_torchrun(line: str) -> list[str]:
    """The flags of train.py after a torchrun command, whose own flags must be known."""
    known = get_args_parser().parse_args(shlex.split(line))
    assert Path(known.training_script).name == "train.py"
    assert known.nnodes in ("1:1", "2") and known.nproc_per_node in ("1", "8")
    return known.training_script_args


@pytest.mark.parametrize(
    "name, flags", [("slurm.sbatch", ' --stop_grace_seconds 100 "$@"'), ("ssh.sh", "$flags")]
)
def test_scripts_parse_and_start_torchrun_with_flags_that_it_has(name, flags):
    path = LAUNCH / name
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text()
    found = re.search(r"torchrun\s+(--nnodes.*?train\.py)", filled(text), re.S)
    assert check_torchrun(found[1]) == [] and f"train.py{flags}" in text
    assert re.search(
        r"--rdzv_backend c10d\s.*--rdzv_endpoint .*:.*--max_restarts 3", found[1], re.S
    )
    example = re.search(r"^# .*(--config .*)$", text, re.M)[1]
    parse(shlex.split(example), TrainOptions)


def unknown_to_slurm(program: str, flags: list[str]) -> list[str]:
    """Of these flags, as `--name=value` or `--name`, those that a SLURM command does not take so."""
    given = {False: ("none", "optional"), True: ("needed", "optional")}
    return [
        flag
        for flag in flags
        if SLURM[program].get(flag[2:].partition("=")[0]) not in given["=" in flag]
    ]


def test_slurm_settings_give_one_torchrun_to_a_machine_and_time_to_save():
    text = (LAUNCH / "slurm.sbatch").read_text()
    lines = re.findall(r"^#SBATCH (--.*)$", text, re.M)
    assert lines and unknown_to_slurm("sbatch", lines) == []
    for program in ("srun", "scancel"):  # up to the program or the job
        called = re.findall(rf"\b{program}((?: --[\w-]+=\S+)+)", text)
        assert called and unknown_to_slurm(program, " ".join(called).split()) == []
    mistaken = ["--requeue=1", "--nodes", "--gpus-per-nod=8"]
    assert unknown_to_slurm("sbatch", [*mistaken, "--nodes=2"]) == mistaken
    options = dict(line[2:].partition("=")[::2] for line in lines)
    assert options["ntasks-per-node"] == "1" and "requeue" in options
    told, killed, ended = (
        int(re.search(rf"{name}[= ]?(\d+)", text)[1])
        for name in ("USR1@", "SHUTDOWN_TIMEOUT", "stop_grace_seconds")
    )
    assert told - 10 > killed > ended >= 60


def test_the_kubernetes_job_runs_in_its_runtime_with_flags_that_train_has():
    runtime, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    assert job["kind"] == "TrainJob" and job["apiVersion"] == runtime["apiVersion"]
    assert job["spec"]["runtimeRef"] == {
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    trainer, pod = job["spec"]["trainer"], runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    pod = pod["template"]["spec"]["template"]["spec"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert trainer["command"] == ["torchrun"]
    here = [arg.replace("/workspace", str(ROOT)) for arg in trainer["args"]]
    config, _ = parse(check_torchrun(shlex.join(here)), TrainOptions)
    assert config.sharding_strategy == "hybrid_full_shard" and config.output_dir == "/runs/70b"
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 2


def test_the_store_of_a_machine_that_stays_serves_others_until_it_is_told_to_end():
    place = subprocess.Popen(
        [sys.executable, LAUNCH / "rendezvous.py", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(re.search(r"port (\d+)", place.stdout.readline())[1])
        TCPStore("127.0.0.1", port).set("key", "value")
        assert TCPStore("127.0.0.1", port).get("key") == b"value"
        place.terminate()
        assert place.wait(patience(30)) == 0
    finally:
        place.kill()
        place.communicate()


@pytest.mark.slow
def test_the_ssh_script_runs_on_two_hosts_and_carries_on_after_a_long_cut(tmp_path):
    """`ssh` enters a namespace here. Both hosts see one folder; the cut outlasts any patience."""
    inputs = make_inputs(tmp_path / "inputs")
    flags = (
        "--global_batch_size",
        "4",
        "--lora_dropout",
        "0",
        "--num_epochs",
        "8",
        "--stall_seconds",
        "5",
        "--sharding_strategy",
        "hybrid_full_shard",
    )
    run, whole = (command(inputs, tmp_path / name, *flags) for name in ("out", "whole"))
    with Hosts(2, tmp_path / "hosts") as hosts:
        (tmp_path / "bin").mkdir()
        for host in range(2):
            entering = shlex.join(hosts.inside(host))
            (tmp_path / f"bin/host{host}").write_text(f'{entering} bash -c "$1"\n')
        ssh = tmp_path / "bin/ssh"
        ssh.write_text(
            f"#!/bin/bash\nwhile [[ $1 == -o ]]; do shift 2; done\n"
            f'exec bash {tmp_path}/bin/$1 "$2"\n'
        )
        (tmp_path / "bin/torchrun").write_text(
            f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
        )
        for path in (ssh, tmp_path / "bin/torchrun"):
            path.chmod(0o755)
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        env |= dict(
            HOSTS="host0 host1", GPUS="2", TRIES="20", PATH=f"{tmp_path}/bin:{os.environ['PATH']}"
        )

        def started(which) -> subprocess.Popen:
            with open(f"{which.out}.ssh", "w") as log:
                return subprocess.Popen(
                    [LAUNCH / "ssh.sh", *which.argv[1:]], cwd=ROOT, env=env, stdout=log, stderr=log
                )

        launched = started(run)
        while not (run.out / "checkpoints/step-000010").exists():
            assert launched.poll() is None, Path(f"{run.out}.ssh").read_text()
            time.sleep(0.05)
        hosts.cable(1, "down")
        time.sleep(90)
        hosts.cable(1, "up")
        assert launched.wait(patience(400)) == 0, Path(f"{run.out}.ssh").read_text()[-3000:]
        assert started(whole).wait(patience(300)) == 0
    assert "resumed from" in Path(f"{run.out}.ssh").read_text()
    assert outcome(run.out) == outcome(whole.out)


@pytest.mark.ray
def test_ray_train_starts_the_ranks_and_starts_them_again_after_one_was_killed(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    run = command(inputs, tmp_path / "out", "--num_epochs", "4")
    reference = command(inputs, tmp_path / "reference", "--num_epochs", "4")
    assert reference.start().codes == [0, 0]
    with open(tmp_path / "log", "w") as log:
        ray = subprocess.Popen(
            [sys.executable, LAUNCH / "ray_train.py", "--workers", "2", "--cpu", *run.argv[1:]],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
        )
    while not (run.out / "checkpoints/step-000006").exists():
        assert ray.poll() is None, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.05)
    os.kill(next(rank_processes(run.out)), signal.SIGKILL)
    assert ray.wait(patience(400)) == 0, (tmp_path / "log").read_text()[-3000:]
    assert "resumed from" in (tmp_path / "log").read_text()
    assert outcome(run.out) == outcome(reference.out)


# ---- the launcher of train.py ------------------------------------------------------------------

RANK = """
import os, sys, torch.distributed as dist
from fsdp_qlora.dist import process_group, rank_device, sum_over_ranks
sys.path.insert(0, "{root}")
from tests.test_launch import listeners
with process_group(rank_device("cpu")):
    total = sum_over_ranks(1)
    print(total, *listeners(os.getpid()), *listeners(os.getppid()),
          file=open(f"{out}/" + os.environ["RANK"], "w"))
"""


def listeners(process: int) -> list[str]:
    """The addresses, in hexadecimal, on which a process listens."""
    sockets = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.add(os.readlink(descriptor))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [
        row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    ]


@pytest.mark.slow
def test_ranks_that_are_started_here_listen_on_this_machine_alone(tmp_path):
    code = (
        "import sys; from torch.distributed.launcher.api import elastic_launch\n"
        "from fsdp_qlora.config import RunConfig\nfrom fsdp_qlora.lifecycle import launcher\n"
        "launcher.os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')\n"
        "elastic_launch(launcher._how_to_launch(2, RunConfig()), sys.executable)('-c', sys.argv[1])"
    )
    script = RANK.format(root=ROOT, out=tmp_path)
    subprocess.run(
        [sys.executable, "-c", code, script],
        check=True,
        timeout=patience(200),
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    )
    found = [(tmp_path / rank).read_text().split() for rank in "01"]
    assert {total for total, *_ in found} == {"[2]"}
    addresses = {address for _, *more in found for address in more}
    assert addresses == {"0100007F"}, addresses  # 127.0.0.1; 00000000 is every interface


def test_a_run_of_one_rank_opens_no_store(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    before = listeners(os.getpid())
    store, rank, world_size = rendezvous()
    assert (rank, world_size) == (0, 1) and listeners(os.getpid()) == before
    store.set("key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    "given, kept",
    [
        slow({}, False),
        slow(dict(OMP_NUM_THREADS="1"), True),
        rest(dict(OMP_NUM_THREADS="3"), True),
        slow(dict(MKL_NUM_THREADS="2"), True),
    ],
)
def test_a_number_of_threads_that_was_given_stays(given, kept, tmp_path):
    code = (
        "import os; from fsdp_qlora.lifecycle import launcher\nlauncher.torch.set_num_threads(5)\n"
        "launcher.share_cores(1)\n"
        "out = open(os.environ['OUT'] + os.getenv('RANK', ''), 'w')\n"
        "print(launcher.torch.get_num_threads(), file=out)"
    )
    (tmp_path / "script.py").write_text(code)
    ours = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    env |= given | dict(OUT=str(tmp_path / "out"), PYTHONPATH=str(ROOT))
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2"]
    for how in ([], torchrun):
        subprocess.run(
            [sys.executable, *how, tmp_path / "script.py"],
            check=True,
            env=env,
            timeout=patience(200),
        )
    wanted = 5 if kept else len(os.sched_getaffinity(0))
    for name in ("out", "out0", "out1"):
        assert int((tmp_path / name).read_text()) == wanted, name


def rank_processes(out: Path):
    """Process ids of ranks that write to a folder."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_text()
            if "fsdp_qlora.cli\0train" in line and str(out) in line:
                yield int(folder.name)
