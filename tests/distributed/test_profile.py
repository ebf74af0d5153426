"""`--profile` on two ranks: which steps are recorded, and what the files say."""

from __future__ import annotations

import gzip
import json
import re

import pytest
import torch
from torch.profiler import ProfilerAction

from fsdp_qlora.config import RunConfig
from fsdp_qlora.observe.profiling import phase, step_profiler
from fsdp_qlora.observe.trace import number_of_steps
from tests.distributed.test_command_line import call
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

LETTERS = {
    ProfilerAction.NONE: ".",
    ProfilerAction.WARMUP: "w",
    ProfilerAction.RECORD: "r",
    ProfilerAction.RECORD_AND_SAVE: "S",
}


@pytest.mark.parametrize(
    "settings, steps",
    [
        (dict(), "...wrS............"),
        (dict(wait_steps=0), "wrS..............."),
        (dict(wait_steps=1, repeat=2, profiling_frequency=6), ".wrS...wrS........"),
        (dict(wait_steps=0, repeat=0, profiling_frequency=1), "wrSwrSwrSwrSwrSwrS"),
        (
            dict(wait_steps=2, warmup_steps=0, active_steps=1, repeat=0, profiling_frequency=5),
            "..S....S....S....S",
        ),
    ],
)
def test_each_step_is_waited_warmed_up_or_recorded_as_the_settings_say(settings, steps):
    config = RunConfig(profile=True, **settings)
    assert "".join(LETTERS[phase(i, config)] for i in range(len(steps))) == steps


def test_recording_adds_no_lines_of_torchs_own(tmp_path, capfd):
    config = RunConfig(profile=True, wait_steps=0, profiling_output=str(tmp_path))
    with step_profiler(config, torch.device("cpu")) as step_done:
        for _ in range(config.warmup_steps + config.active_steps):
            torch.ones(3) + 1
            step_done()
    text, errors = capfd.readouterr()
    assert "trace: " in text and errors == ""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The output folder of a run of 5 steps on two ranks, and rank 0's output."""
    folder = save_chat_model(tmp_path_factory.mktemp("tiny"))
    rows, out = tmp_path_factory.mktemp("rows") / "rows.jsonl", tmp_path_factory.mktemp("out")
    rows.write_text(
        "".join(json.dumps(dict(prompt=f"{i}?", completion=f"{2 * i}")) + "\n" for i in range(10))
    )
    base = [
        "train",
        "--model_name",
        folder,
        "--dataset",
        str(rows),
        "--precision",
        "fp32",
        "--output_dir",
        str(out),
        "--gradient_accumulation_steps",
        "1",
        "--profile",
        "--profiling_output",
        str(out / "profiles"),
    ]
    argvs = [[*base, "--wait_steps", "1", "--with_shapes"], [*base, "--wait_steps", "10"]]
    results = run_ranks(call, 2, argvs, grouped=False)
    assert [code for code, _, _ in results[0]] == [0, 0], results[0]
    return out / "profiles", [text for _, text, _ in results[0]]


def test_every_rank_writes_a_trace_of_the_recorded_steps(run):
    folder, _ = run
    for rank in range(2):
        with gzip.open(folder / f"trace_steps_3-4_rank_{rank}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        assert number_of_steps(events) == 2
        assert any("Input Dims" in e.get("args", {}) for e in events)


def test_rank_0_prints_where_time_goes_and_what_communication_is_exposed(run):
    folder, (text, _) = run
    shown = (folder / "table_steps_3-4_rank_0.txt").read_text().strip()
    assert shown in text and shown.startswith("one of 2 recorded steps: ")
    rows = {line[:22].strip(): line[22:].split() for line in shown.splitlines()[2:]}
    for kind in ("all-gather", "all-reduce"):
        calls, ms, _, exposed = rows[kind]
        assert int(calls) > 0 and 0 <= float(exposed) <= float(ms)
    assert float(rows["products"][1]) > 0
    assert (folder / "streams_steps_3-4_rank_0.png").stat().st_size > 1000


def test_a_run_too_short_to_record_says_so(run):
    _, (_, text) = run
    assert "--profile recorded nothing: the run ended after 5 steps" in text


def test_a_run_says_how_long_its_start_took(run):
    _, (text, _) = run
    assert re.search(r"model ready in [\d.]+ s", text)
    parts = ("imports", "data", "checks", "meeting the other ranks", "model")
    before = ", ".join(rf"{part} [\d.]+ s" for part in parts)
    assert re.search(rf"^first step: [\d.]+ s; before it: {before}$", text, re.M)
