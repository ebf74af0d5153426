"""SIGTERM or SIGUSR1 to any one rank, in any phase: all ranks end soon, and nothing is lost."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from fsdp_qlora.checkpoint.folder import all_checkpoints, fault_of, read_run
from fsdp_qlora.lifecycle.signals import EXIT_STOPPED
from tests.chaos.harness import STEPS, Hit, command, make_inputs, outcome

PHASES = ("tokenize", "restore", "load", "step", "eval", "stage", "write", "save")


def signalled_runs(folder: Path, scratch: Path, signals: int, seed: int = 0) -> dict:
    """Signal a rank `signals` times over several runs; each saves what was done and goes on from it."""
    rng = random.Random(seed)
    reference = command(folder, scratch / "undisturbed")
    assert reference.start().codes == [0, 0]
    expected = outcome(scratch / "undisturbed")
    seen, runs, slowest = Counter(), 0, 0.0
    while sum(seen.values()) < signals:
        run = command(folder, scratch / f"run-{runs}")
        while True:
            hit = None
            if sum(seen.values()) < signals:
                hit = Hit.at_random(rng, rng.choice(["stop", "usr1"]), PHASES)
                hit.nth %= 2
            ended = run.start(hit)
            if ended.codes == [0, 0]:
                break
            told = {EXIT_STOPPED} | (set() if "stopped after step" in ended.text else {1, -15})
            assert ended.codes[hit.rank] == EXIT_STOPPED, (hit, ended.codes, ended.text)
            assert set(ended.codes) <= told, (hit, ended.codes, ended.text)
            check_nothing_is_lost(run.out, hit, ended.text)
            seen[hit.phase] += 1
            slowest = max(slowest, ended.seconds)
        assert outcome(run.out) == expected, (runs, seen)
        runs += 1
    return dict(signals=dict(seen), runs=runs, slowest_seconds=round(slowest, 2))


def check_nothing_is_lost(out: Path, hit: Hit, text: str):
    """Every step that was logged is in the newest checkpoint."""
    if not (out / "metrics.jsonl").exists():
        return
    steps = max((f[1] for f in outcome_steps(out)), default=0)
    if not steps:
        return
    newest = all_checkpoints(out / "checkpoints")[0]
    assert fault_of(newest) is None
    if hit.phase in ("step", "eval", "stage", "write", "save"):
        assert read_run(newest)["step"] >= steps, (hit, steps, newest, text)
        assert f"stopped after step {read_run(newest)['step']}; saved in" in text, text


def outcome_steps(out: Path) -> list[tuple]:
    """(kind, step) of the steps in metrics.jsonl."""
    import json

    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(r["kind"], r["step"]) for r in records if r["kind"] == "step"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_on_all_ends_with_75_and_the_run_goes_on_bit_equal(
    folder, tmp_path
):
    report = signalled_runs(folder, tmp_path, signals=10)
    assert report["slowest_seconds"] < 30 and len(report["signals"]) >= 4 and STEPS, report
