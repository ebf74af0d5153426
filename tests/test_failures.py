"""How often to save on machines that fail, against a simulated run and the published formulas."""

from __future__ import annotations

import json
import random
from math import sqrt

import pytest

from fsdp_qlora.cli import main
from fsdp_qlora.estimate import best_interval

ASKED = (
    "plan --params 8B --gpu h100 --gpus 8 --nodes 128 --sharding_strategy full_shard --batch_size 1 "
    "--activation_policy recompute_all --use_cpu_offload false --use_activation_cpu_offload false"
).split()


def share_of_work(interval: float, save: float, between: float, restart: float, seed: int) -> float:
    """Useful time over all time of a long run with failures at random, second by second."""
    draw, now, work = random.Random(seed), 0.0, 0.0
    fails = draw.expovariate(1 / between)
    while now < 3000 * between:
        if fails < interval + save:  # what was done since the last checkpoint is lost
            now += fails + restart
            fails = draw.expovariate(1 / between)
            continue
        now, work, fails = now + interval + save, work + interval, fails - interval - save
    return work / now


@pytest.mark.parametrize("save, between", [(1, 3600), (60, 3600)])
def test_no_other_interval_loses_less_in_a_run_with_random_failures(save, between):
    best = best_interval(save, between)
    at_best = share_of_work(best, save, between, 120, 1)
    for other in (best / 3, best * 3):
        assert share_of_work(other, save, between, 120, 1) < at_best


def test_rare_failures_give_youngs_interval():
    assert best_interval(1, 1e8) == pytest.approx(sqrt(2 * 1 * 1e8), rel=1e-3)
    assert best_interval(10, 4) == 4


def test_plan_says_how_often_to_save_and_what_is_lost(capsys):
    found = []
    for hours in ("6000", "60000"):
        assert main([*ASKED, "--mtbf_hours", hours, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["failures"])
    often, seldom = found
    assert often["between"] == 3600 * 6000 / 128
    assert often["interval"] < seldom["interval"] and often["lost"] > seldom["lost"]
    assert main([*ASKED, "--mtbf_hours", "6000"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"--checkpoint_minutes {often['interval'] / 60:.2g})" in said
