"""SIGKILL at any moment: the same command goes on, and ends where the undisturbed run ended."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.harness import PHASES, STEPS, Hit, command, make_inputs, outcome
from tests.parts import rest, slow

KILLS_PER_RUN = 10


def killed_runs(folder: Path, scratch: Path, kills: int, seed: int = 0) -> dict:
    """Kill ranks `kills` times over several runs; how often in which phase, and how it went."""
    rng = random.Random(seed)
    reference = command(folder, scratch / "undisturbed")
    ended = reference.start()
    assert ended.codes == [0, 0], ended.text
    expected = outcome(scratch / "undisturbed")
    assert [f[1] for f in expected[0] if f[0] == "step"] == list(range(1, STEPS + 1))
    without = command(folder, scratch / "without-dropout", "--lora_dropout", "0")
    assert without.start().codes == [0, 0]
    assert outcome(without.out)[0] != expected[0], "masks that differ would not be seen"
    seen, history, starts, resumed, runs = Counter(), [], 0, 0, 0
    while sum(seen.values()) < kills:
        run, mine = command(folder, scratch / f"run-{runs}"), 0
        while True:
            hit, kill_after = None, None
            if mine < KILLS_PER_RUN and sum(seen.values()) < kills:
                if rng.random() < 0.3:
                    kill_after = rng.uniform(0.2, 2.5)
                else:
                    hit = Hit.at_random(rng, "kill", choices(mine))
            ended = run.start(hit, kill_after)
            starts, resumed = starts + 1, resumed + ("resumed from" in ended.text)
            if ended.codes == [0, 0]:
                break
            if -9 not in ended.codes:
                raise AssertionError(ended.text)
            history.append((runs, hit or kill_after, ended.text.count("resumed from")))
            mine += 1
            seen[hit.phase if hit else "any time"] += 1
        found = outcome(run.out)
        assert found[0] == expected[0], (runs, seen, set(found[0]) ^ set(expected[0]), history)
        assert found[1:] == expected[1:], (runs, seen, history)
        runs += 1
    return dict(kills=dict(seen), starts=starts, resumed=resumed, runs=runs)


def choices(kills: int) -> tuple[str, ...]:
    """Phases; the end of a run only when it has been killed elsewhere."""
    late = ("export",)
    return tuple(PHASES) if kills > 1 else tuple(p for p in PHASES if p not in late)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.mark.parametrize("kills, runs, resumed", [rest(6, 1, 1), slow(20, 2, 8)])
def test_a_run_that_is_killed_again_and_again_ends_bit_equal_with_every_row_once(
    folder, tmp_path, kills, runs, resumed
):
    report = killed_runs(folder, tmp_path, kills=kills)
    assert report["runs"] >= runs and report["resumed"] >= resumed, report
