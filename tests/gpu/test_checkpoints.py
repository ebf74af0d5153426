"""Checkpoints, resuming and skipped steps where steps run ahead of the host."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_bad_steps import config_of, poisoned_run
from tests.distributed.test_resume import STEPS, STOP_AT, metrics, run_once, settings
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = dict(device="cuda", compile=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def whole_and_resumed(folder: str, out: str, cases: list[dict]) -> list[int]:
    """For each case: a run of six steps, and one stopped in the fifth and resumed; its new steps."""
    counts = []
    for number, case in enumerate(cases):
        run_once(settings(folder, Path(out, f"{number}-whole"), **case))
        config = settings(folder, Path(out, f"{number}-resumed"), **case)
        run_once(config, STOP_AT)
        counts.append(len(run_once(config)))
    return counts


def test_a_resumed_run_is_bit_equal_under_deterministic(folder, tmp_path):
    cases = [
        GPU | dict(deterministic=True, sharding_strategy=s, train_type=t)
        for s, t in (("full_shard", "qlora"), ("ddp", "lora"))
    ]
    cases.append(cases[0] | dict(use_cpu_offload=True))
    for counts in run_ranks(whole_and_resumed, 2, folder, str(tmp_path), cases, device="cuda"):
        assert counts == [STEPS - 3] * len(cases)
    for number, case in enumerate(cases):
        whole, resumed = tmp_path / f"{number}-whole", tmp_path / f"{number}-resumed"
        assert metrics(whole) == metrics(resumed), case
        expected, found = (
            load_file(p / "adapter/adapter_model.safetensors") for p in (whole, resumed)
        )
        assert all(torch.equal(found[k], expected[k]) for k in expected), case


def test_bad_steps_are_skipped_on_the_device_and_seen_a_step_later(folder, tmp_path):
    config = config_of(folder, tmp_path / "few", **GPU)
    assert run_ranks(poisoned_run, 2, config, {4: 1, 5: 1, 8: 1}, device="cuda") == ["", ""]
    bad = [m["step"] for m in metrics(tmp_path / "few") if not math.isfinite(m["grad_norm"])]
    assert bad == [4, 5, 8] and len(metrics(tmp_path / "few")) == 12
    config = config_of(folder, tmp_path / "many", **GPU)
    for said in run_ranks(poisoned_run, 2, config, {5: 1, 6: 1, 7: 1}, device="cuda"):
        assert "steps 5 to 7 is not finite" in said
    config = config_of(folder, tmp_path / "rolled", on_bad_steps="rollback", max_bad_steps=2, **GPU)
    assert run_ranks(poisoned_run, 2, config, {6: 9, 7: 9}, device="cuda") == ["", ""]
    assert [m["step"] for m in metrics(tmp_path / "rolled")] == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]
