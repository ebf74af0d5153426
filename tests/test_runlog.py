"""What a run says while it runs: means over steps, speed beside the card's, time left, money."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_qlora.catalog.shapes import shape_from_config
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.without_effect import settings_without_effect
from fsdp_qlora.estimate import model_flops_per_token
from fsdp_qlora.observe.metrics import (
    CheckpointMetrics,
    EvalMetrics,
    Progress,
    SkippedMetrics,
    StepMetrics,
    clock,
    mean_of,
)
from fsdp_qlora.observe.runlog import RunLog
from fsdp_qlora.observe.sinks import Lines, Sink
from fsdp_qlora.observe.throughput import Arithmetic, Pace, arithmetic
from fsdp_qlora.plan import Plan
from fsdp_qlora.plan_draft import draft_plan


def step(
    number: int, loss: float = 2.0, seconds: float = 0.5, trained: int = 10, **more
) -> StepMetrics:
    return StepMetrics(
        number, loss, 1e-3, 1.0, trained, 2 * trained, seconds, 2 * trained / seconds, 0.0, **more
    )


class Kept(Sink):
    """Remembers what it was given."""

    def __init__(self):
        self.given = []

    def write(self, record):
        self.given.append(record)


# ---- means ---------------------------------------------------------------------------------------


def test_a_mean_is_per_trained_token_and_rates_are_of_all_seconds():
    steps = [
        step(1, loss=1.0, seconds=1.0, trained=10, model_tflops_per_gpu=100.0, share_of_peak=0.1),
        step(2, loss=4.0, seconds=3.0, trained=30, model_tflops_per_gpu=300.0, share_of_peak=0.3),
    ]
    mean = mean_of(steps)
    assert mean.step == 2 and mean.loss == pytest.approx((1 * 10 + 4 * 30) / 40)
    assert mean.tokens_per_second == pytest.approx(80 / 4) and mean.seconds == pytest.approx(2)
    assert mean.model_tflops_per_gpu == pytest.approx((100 * 1 + 300 * 3) / 4)
    assert mean.share_of_peak == pytest.approx(0.25)


def test_a_step_that_was_not_taken_is_not_in_the_mean_of_losses():
    overflow = replace(step(2, loss=1.0), grad_norm=float("inf"), loss_scale=64.0)
    mean = mean_of([step(1, loss=3.0), overflow])
    assert (mean.loss, mean.grad_norm, mean.tokens_per_second) == (3.0, 1.0, 40.0)
    assert mean_of([overflow]).grad_norm == float("inf")


def test_sinks_get_the_first_step_each_nth_and_what_is_left_and_the_file_gets_all(tmp_path):
    kept = Kept()
    with RunLog(tmp_path, terminal=kept, every=4, pace=Pace(10)) as log:
        for number in range(1, 11):
            log.log(step(number, loss=float(number)))
        log.end_steps()
    assert [p.step for p in kept.given] == [1, 4, 8, 10]
    assert [p.loss for p in kept.given] == [1.0, 3.0, 6.5, 9.5]  # of 1, 2-4, 5-8, 9-10
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, 11))


# ---- time and money ------------------------------------------------------------------------------


def test_time_left_is_that_of_recent_steps_without_the_first_and_cost_counts_all_seconds():
    pace = Pace(100, dollars_per_hour=36.0)
    pace.add(step(1, seconds=60.0))
    assert pace.where(1)["seconds_left"] == pytest.approx(99 * 60)
    for number in (2, 3, 4):
        pace.add(step(number, seconds=2.0))
    pace.add(EvalMetrics(4, 1.0, 2.7, 9, True, 30.0))
    pace.add(CheckpointMetrics(4, 4.0))
    where = pace.where(4)
    assert where["seconds_left"] == pytest.approx(96 * 2) and where["total_steps"] == 100
    assert where["dollars"] == pytest.approx((60 + 6 + 30 + 4) / 3600 * 36)


def test_what_was_spent_before_a_stop_counts_and_an_unknown_price_or_end_is_left_out():
    earlier = [
        dict(kind="step", seconds=1800),
        dict(kind="eval", seconds=900),
        dict(kind="start"),
        dict(kind="checkpoint", seconds_held=900),
    ]
    assert Pace(10, 4.0, earlier).where(5)["dollars"] == pytest.approx(4.0)
    assert Pace().where(5) == dict(total_steps=None, seconds_left=None, dollars=None)


@pytest.mark.parametrize(
    "seconds, text",
    [
        (45, "45 s"),
        (600, "10 min"),
        (3 * 3600 + 300, "3 h 05"),
        (100 * 3600, "4 d 4 h"),
        (float("inf"), "?"),
    ],
)
def test_times_are_read_as_people_say_them(seconds, text):
    assert clock(seconds) == text


def test_a_line_has_every_figure_and_none_that_is_not_known():
    full = Progress(
        120,
        1.25,
        1e-4,
        0.5,
        10,
        20,
        0.1,
        13986.4,
        41.8,
        model_tflops_per_gpu=512.3,
        share_of_peak=0.518,
        total_steps=1000,
        seconds_left=3700.0,
        dollars=3.2,
    )
    assert full.line() == (
        "step 120/1000  loss 1.2500  lr 1.00e-04  grad_norm 0.500  13,986 tok/s  "
        "512 TFLOP/s (52% of peak)  41.8 GiB  62 min left  $3.20"
    )
    bare = Progress(3, 1.25, 1e-4, 0.5, 10, 20, 0.1, 200.0, 0.0)
    assert bare.line() == "step 3  loss 1.2500  lr 1.00e-04  grad_norm 0.500  200 tok/s"
    assert set(bare.values()) < set(full.values()) and full.values()["run/dollars"] == 3.2


# ---- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qlora", "full"])
def test_flops_of_a_step_are_those_of_the_estimate_for_rows_of_that_length(kind):
    settings = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings)
    config = RunConfig(model_name="tiny", train_type=kind, lora_rank=8)
    found = arithmetic(draft_plan(config, 1), model, torch.device("cpu"))
    shape = shape_from_config(settings.to_dict(), "tiny")
    plan = Plan().change(
        adapter="none" if kind == "full" else "lora", lora_rank=8, context_length=300
    )
    expected = model_flops_per_token(shape, plan) * 4 * 300 / 2.0 / 1e12
    assert found.of_step(4 * 300, 4, 2.0)["model_tflops_per_gpu"] == pytest.approx(
        expected, rel=1e-9
    )
    assert found.of_step(1, 1, 1.0)["share_of_peak"] is None


def test_the_share_of_the_peak_is_per_gpu():
    of_two = Arithmetic(fixed=1e12, per_position=0.0, ranks=2, peak_tflops=1000.0).of_step(
        400, 4, 1.0
    )
    assert of_two == dict(model_tflops_per_gpu=200.0, share_of_peak=0.2)


# ---- the file ------------------------------------------------------------------------------------


def test_a_rewind_forgets_steps_and_keeps_what_went_wrong(tmp_path):
    with RunLog(tmp_path) as log:
        for number in (1, 2, 3):
            log.log(step(number))
        log.record(SkippedMetrics(3, [7]))
        log.rewind(1)
        log.log(step(2, loss=1.0))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["kind"], r["step"]) for r in records] == [
        ("step", 1),
        ("skipped", 3),
        ("rollback", 1),
        ("step", 2),
        ("end", 2),
    ]
    assert records[2]["from_step"] == 3 and records[-1]["status"] == "finished"


@pytest.mark.parametrize(
    "error, status, said",
    [
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
        (ValueError("--lr 9"), "failed", "--lr 9"),
        (
            RuntimeError("https://me:pass99word@host\nmore"),
            "failed",
            "RuntimeError: https://***@host",
        ),
    ],
)
def test_the_end_says_how_in_one_line_without_secrets(tmp_path, error, status, said):
    with pytest.raises(type(error)), RunLog(tmp_path) as log:
        log.log(step(5))
        raise error
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["kind"], last["step"], last["status"]) == ("end", 5, status)
    assert last["message"] == said


def test_a_sink_that_fails_is_left_out_and_the_run_goes_on(tmp_path, capsys):
    class Full(Sink):
        def write(self, record):
            raise OSError(28, "No space left on device")

    kept = Kept()
    with RunLog(tmp_path, terminal=Full(), trackers=[kept]) as log:
        for number in (1, 2, 3):
            log.log(step(number))
    assert len(kept.given) == 3
    assert capsys.readouterr().out.count("warning: Full failed") == 1


# ---- the terminal --------------------------------------------------------------------------------

PROGRAM = """
import sys
from tests.test_runlog import step
from fsdp_qlora.observe.throughput import Pace
from fsdp_qlora.observe.metrics import EvalMetrics
from fsdp_qlora.observe.runlog import RunLog
from fsdp_qlora.observe.sinks import terminal
with RunLog(sys.argv[1], terminal=terminal(["tqdm"], 30, 0), every=10, pace=Pace(30)) as log:
    for number in range(1, 31): log.log(step(number))
    log.log_evaluation(EvalMetrics(30, 1.5, 4.5, 9, True, 0.1))
"""


@pytest.mark.slow
def test_without_a_terminal_there_are_whole_lines_and_no_bar(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "\r" not in done.stdout + done.stderr and "%|" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["1/30", "10/30", "20/30", "30/30", "30"]
    assert lines[-1].startswith("step 30  held-out loss 1.5000")


def test_on_a_terminal_there_is_a_bar_with_evaluations_above_it(tmp_path):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        text += part
    assert child.wait() == 0
    shown = text.decode()
    assert "30/30" in shown and "loss 2.000" in shown and "held-out loss 1.5000" in shown
    assert "step 10/30" not in shown


def test_lines_say_nothing_of_records_without_a_line(capsys):
    Lines().write(CheckpointMetrics(3, 0.1))
    assert not capsys.readouterr().out


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "log_to, parts",
    [
        ("stdout,tqdm", ["--log_to", "stdout and tqdm", "one"]),
        ("wandb,neptune", ["--log_to", "tensorboard"]),
        ("", ["--log_to"]),
    ],
)
def test_a_wrong_log_to_is_refused_with_what_works(log_to, parts):
    with pytest.raises(ValueError) as caught:
        RunConfig(log_to=log_to)
    assert all(part in str(caught.value) for part in parts)


def test_trackers_are_named_beside_a_form_of_output_and_their_settings_need_them():
    config = RunConfig(log_to="stdout, wandb,tensorboard,wandb", name="run", group="g")
    assert config.trackers == ["wandb", "tensorboard"] and not settings_without_effect(config)
    (warning,) = settings_without_effect(RunConfig(log_to="mlflow", name="run", group="g"))
    assert warning.startswith("--group has no effect: it needs --log_to wandb")
