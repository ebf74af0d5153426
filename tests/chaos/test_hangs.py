"""A rank that hangs is named, with its phase and stack; a healthy run names nobody."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from torch.distributed import HashStore

from fsdp_qlora.dist.rank_store import RankStore
from fsdp_qlora.lifecycle.signals import StopRequested
from fsdp_qlora.lifecycle.watchdog import EXIT_STALLED, GONE_LOOKS, Watchdog, verdict
from tests.chaos.harness import WORLD, Hit, command, make_inputs
from tests.parts import rest, slow

PHASES = ("step", "eval", "stage", "forward", "optimizer")
STALL_SECONDS = "2"


def hung_runs(folder: Path, scratch: Path, hangs: int, seed: int = 0) -> dict:
    """Hang a random rank in a random phase; how often it was named."""
    rng = random.Random(seed)
    named, seen, missed = Counter(), Counter(), []
    for number in range(hangs):
        phase = PHASES[number % len(PHASES)]
        action = "freeze" if rng.random() < 0.15 else "stall"
        # A frozen rank 0 takes the store of these ranks with it; under torchrun the agent has it.
        rank = 1 if action == "freeze" else rng.randrange(WORLD)
        hit = Hit(rank, phase, rng.randrange(3), action, rng.random() < 0.5)
        ended = command(folder, scratch / f"hung-{number}", "--stall_seconds", STALL_SECONDS).start(
            hit
        )
        assert EXIT_STALLED in ended.codes, (hit, ended)
        seen[phase, action] += 1
        others = [f"rank {r}" for r in range(WORLD) if r != rank]
        line = next(
            x
            for x in ended.text.splitlines()
            if x.startswith("error: the run has made no progress")
        )
        if f"rank {rank}" in line and not any(o in line for o in others):
            named[phase, action] += 1
        else:
            missed.append((hit, ended.text[-3000:]))
        if action == "stall" and not missed:
            assert "strike" in ended.text  # the stack
    return dict(
        hangs=sum(seen.values()), named=sum(named.values()), by_phase=dict(seen), missed=missed
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("hangs", [rest(1), slow(5)])
def test_the_rank_that_hangs_is_named_with_its_stack(folder, tmp_path, hangs):
    report = hung_runs(folder, tmp_path, hangs)
    assert report["named"] == report["hangs"] == hangs, report


@pytest.mark.slow
def test_a_run_of_many_steps_under_a_short_limit_names_nobody(folder, tmp_path):
    run = command(folder, tmp_path / "out", "--stall_seconds", STALL_SECONDS, "--num_epochs", "10")
    ended = run.start()
    assert ended.codes == [0] * WORLD and "made no progress" not in ended.text, ended.text


def test_the_culprit_is_silent_or_outside_a_collective_or_behind():
    def place(count, waits):
        return [count, f"step {count}", waits, f"stack {count}"]

    assert "rank 1" in verdict(9, {0: place(5, True)}, {1: [4, "step 4", 0]})
    text = verdict(9, {0: place(5, True), 1: place(5, False)}, {})
    assert "wait for rank 1 at step 5" in text and "stack 5" in text
    assert "for rank 0 at step 4" in verdict(9, {0: place(4, False), 1: place(5, False)}, {})
    assert "for rank 0 at step 4" in verdict(9, {0: place(4, True), 1: place(5, True)}, {})
    alone = verdict(9, {0: place(4, False)}, {})
    assert "others" not in alone and "it is at step 4, whose stack is" in alone
    assert "the network or a GPU" in verdict(9, {0: place(5, True), 1: place(5, True)}, {})


def test_a_rank_counts_as_gone_after_so_many_looks_without_a_beat_unless_it_stopped_or_is_done():
    store = HashStore()
    mine, other = (Watchdog(RankStore(store, rank, 2), stall_seconds=60) for rank in range(2))
    mine.post_beat()
    assert not any(mine.missing() for _ in range(2 * GONE_LOOKS)), (
        "it has not begun, and this rank has"
    )
    for _ in range(2):  # a beat begins the count anew
        other.post_beat()
        assert [mine.missing() for _ in range(GONE_LOOKS + 1)] == [""] * GONE_LOOKS + ["rank 1"]
    for error, gone in ((ValueError, "rank 1"), (StopRequested, ""), (None, "")):
        other = Watchdog(RankStore(store, 1, 2), stall_seconds=60)
        with suppress(ValueError, StopRequested), other.watching():
            if error:
                raise error
        assert "watchdog" not in [thread.name for thread in threading.enumerate()], (
            "they may speak yet"
        )
        other.post_beat()  # as its thread may, which was about to
        assert [mine.missing() for _ in range(GONE_LOOKS + 1)][-1] == gone, error
