"""A node is lost with all its processes, and comes back later: torchrun's `--nnodes 1:2` goes on.

Two agents on loopback, each with an address of its own. The store at which they meet is kept by neither,
so each may be lost. Every rank tells the rows that it trains, so what counts is seen from outside: the
last time that each step was taken.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

import pytest
from torch.distributed import TCPStore

from tests.chaos.harness import command, make_inputs, outcome
from tests.patience import patience

ROOT = Path(__file__).parents[2]
NODES, ROWS_PER_STEP, NEW_STEPS = 2, 4, 6  # more than between checkpoints
SECONDS = 300  # in which a step must come that was never taken before
RENDEZVOUS = "is_host=false,last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"
FLAGS = (
    "--eval_every", "1000",
    "--num_epochs", "1",
    "--lr_scheduler", "constant",
    "--checkpoint_every", "5",
)  # fmt: skip


@dataclass
class Taken:
    """One step as a rank took it."""

    step: int
    rank: int
    world_size: int
    rows: list[list[int]]
    time: float


class Nodes:
    """The agents of a run, each with the one rank that it starts."""

    def __init__(self, argv: list[str], scratch: Path, max_restarts: int):
        self.argv, self.scratch, self.max_restarts = argv, scratch, max_restarts
        (scratch / "steps").mkdir(parents=True)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.agents: dict[int, subprocess.Popen] = {}

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_):
        for node in list(self.agents):
            self.lose(node)

    def start(self, node: int):
        """Start the agent of a node, as a machine that boots does."""
        torchrun = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", f"1:{NODES}", "--nproc_per_node", "1", "--monitor_interval", "0.2",
            "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{self.store.port}",
            "--rdzv_id", "run", "--rdzv_conf", RENDEZVOUS, "--local_addr", f"127.0.0.{node + 1}",
            "--max_restarts", str(self.max_restarts), "-m", "tests.chaos.node_rank",
        ]  # fmt: skip
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        env |= dict(CHAOS_FOLDER=str(self.scratch), GLOO_SOCKET_IFNAME="lo")
        env |= dict(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # see docs/nodes.md
        with open(self.scratch / f"log.{node}", "a") as log:
            self.agents[node] = subprocess.Popen(
                [*torchrun, *self.argv], cwd=ROOT, env=env, stdout=log, stderr=log
            )

    def lose(self, node: int):
        """Everything on a node ends at once, without a word."""
        for pid in with_descendants(self.agents[node].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agents.pop(node).wait()

    def taken(self) -> list[Taken]:
        """Every step that a rank has begun, in the order of time."""
        found = []
        for path in (self.scratch / "steps").iterdir():
            lines = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
            found += [Taken(**told) for told in map(json.loads, lines) if "rows" in told]
        return sorted(found, key=lambda taken: taken.time)

    def wait_for_step(self, step: int, world_size: int) -> float:
        """When that many ranks took a step as late as this for the first time."""
        deadline = time.monotonic() + patience(SECONDS)
        while True:
            for one in self.taken():
                if one.step >= step and one.world_size == world_size:
                    return one.time
            assert time.monotonic() < deadline, self.text()
            assert all(agent.poll() is None for agent in self.agents.values()), self.text()
            time.sleep(0.1)

    def end(self) -> list[int]:
        """Let the run come to its end; exit codes of the agents."""
        (self.scratch / "hurry").touch()
        codes = [agent.wait(patience(SECONDS)) for agent in self.agents.values()]
        self.agents.clear()
        return codes

    def text(self) -> str:
        return "\n".join(
            f"-- node {node}\n{path.read_text()[-4000:]}"
            for node in range(NODES)
            if (path := self.scratch / f"log.{node}").exists()
        )


def with_descendants(pid: int) -> list[int]:
    """A process and all that it, and what it started, has started."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    return found


def make_many_inputs(folder: Path, rows: int) -> Path:
    """As `make_inputs`, with rows that differ in what is trained."""
    make_inputs(folder)
    told = [dict(prompt="?" * (i % 5), completion=f"{i:05d}") for i in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in told))
    return folder


def lost_nodes(folder: Path, scratch: Path, losses: int, seed: int = 0) -> dict:
    """Lose a node `losses` times and bring it back; seconds to a step that was never taken before."""
    rng = random.Random(seed)
    num_rows = ROWS_PER_STEP * (60 + 60 * losses) - 1
    turns = [node for _ in range(losses) for node in rng.sample(range(NODES), NODES)]
    run = command(make_many_inputs(folder, num_rows), scratch / "out", *FLAGS)
    shrunk, grown = [], []
    with Nodes(run.argv, scratch, max_restarts=losses + 5) as nodes:
        for node in range(NODES):
            nodes.start(node)
        nodes.wait_for_step(NEW_STEPS, NODES)
        for node in turns[:losses]:
            time.sleep(rng.uniform(0, 1.5))
            lost = time.time()
            nodes.lose(node)
            last = nodes.taken()[-1].step
            shrunk.append(nodes.wait_for_step(last + 1, NODES - 1) - lost)
            time.sleep(rng.uniform(0, 1.5))
            back, last = time.time(), nodes.taken()[-1].step
            nodes.start(node)
            grown.append(nodes.wait_for_step(last + NEW_STEPS, NODES) - back)
            print(f"loss of node {node}: {shrunk[-1]:.1f} s, back: {grown[-1]:.1f} s", flush=True)
        assert nodes.end() == [0] * NODES, nodes.text()
        taken = nodes.taken()
    history = history_of(taken)
    check_rows(history, num_rows)
    check_weights(history, folder, run.out, scratch / "planned")
    return dict(
        losses=losses,
        steps=len(history),
        steps_of_one_rank=sum(len(ranks) == 1 for ranks in history.values()),
        steps_again=len({(t.step, t.world_size, t.time) for t in taken if t.rank == 0})
        - len(history),
        seconds_to_new_step_with_fewer=summary(shrunk),
        seconds_to_new_step_when_back=summary(grown),
    )


def summary(seconds: list[float]) -> dict[str, float]:
    return dict(median=round(median(seconds), 1), most=round(max(seconds), 1))


def history_of(taken: list[Taken]) -> dict[int, list[Taken]]:
    """For each step what its ranks took the last time: that is what the weights have seen."""
    history = {}
    for step, tries in groupby(sorted(taken, key=lambda t: (t.step, t.time)), key=lambda t: t.step):
        tries = list(tries)
        history[step] = tries[-tries[-1].world_size :]
    return history


def check_rows(history: dict[int, list[Taken]], num_rows: int):
    """Whole steps of as many rows, and each row of the data set once."""
    assert list(history) == [*range(1, -(-num_rows // ROWS_PER_STEP) + 1)]
    for step, ranks in history.items():
        assert sorted(t.rank for t in ranks) == [*range(ranks[0].world_size)], step
        assert len({t.world_size for t in ranks}) == 1, step
        count = sum(len(t.rows) for t in ranks)
        assert count == ROWS_PER_STEP or step == len(history) and count, step
    seen = Counter(tuple(row) for ranks in history.values() for t in ranks for row in t.rows)
    assert len(seen) == num_rows and set(seen.values()) == {1}


def check_weights(history: dict[int, list[Taken]], folder: Path, out: Path, planned: Path):
    """Equal to the bit to a run that was stopped and resumed on these numbers of ranks on purpose."""
    steps = sorted(history)
    for world_size, part in groupby(steps, key=lambda step: len(history[step])):
        last = [*part][-1]
        until = () if last == steps[-1] else ("--max_steps", str(last))
        run = command(folder, planned, *FLAGS, *until, "--checkpoint_every", str(last))
        ended = run.start(world_size=world_size)
        assert ended.codes == [0] * world_size, ended.text
    assert figures(out) == figures(planned)


def figures(out: Path) -> tuple[list, bytes]:
    """Steps and trained weights; held-out losses are also known where a planned stop was."""
    steps = [figure for figure in outcome(out)[0] if figure[0] == "step"]
    return steps, (out / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_that_loses_nodes_goes_on_with_fewer_and_takes_them_back_with_every_row_once(
    tmp_path,
):
    report = lost_nodes(tmp_path / "inputs", tmp_path, losses=2)
    assert report["steps_of_one_rank"] and report["steps"] > report["steps_of_one_rank"], report
