"""Grids become rows, whatever happens to a cell, and rows become tables with today's estimates."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fsdp_qlora.bench import cell_processes
from fsdp_qlora.bench.accuracy import CALIBRATED_ON, _shape_of_row, accuracy, compare
from fsdp_qlora.bench.command import BenchOptions
from fsdp_qlora.bench.grid import read_grid
from fsdp_qlora.bench.row import append_row, plan_of, read_rows, row_files
from fsdp_qlora.bench.tables import (
    _auto_table,
    _published_seconds,
    _published_table,
    accuracy_lines,
    against_table,
)
from fsdp_qlora.cli import main
from fsdp_qlora.config.flags import parse_own
from fsdp_qlora.estimate import memory
from tests.parts import rest, slow
from tests.patience import patience

ROOT = Path(__file__).parents[1]
GRIDS = sorted((ROOT / "benchmarks" / "grids").glob("*.yaml"))
RESULTS = [row for file in row_files(ROOT / "benchmarks" / "results") for row in read_rows(file)]
TINY = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=97,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    pad_token_id=0,
)


@pytest.fixture
def grid(tmp_path):
    """A grid of four cells; the second can't have the memory that it is allowed."""
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    path = tmp_path / "grid.yaml"
    path.write_text(f"""
title: tiny
defaults: {{model_name: {model}, random_weights: true, device: cpu, context_length: 16, gpus: 1}}
cells:
  - {{name: first, published: {{gpu: rtx 3090, seconds: 100, rows: 50}}}}
  - {{name: too much, gpu_memory_gib: 0.0001, batch_size: 256}}
  - {{name: "after {{batch_size}}", batch_size: [2, 3]}}
""")
    return path


@pytest.mark.parametrize("gpus", [rest(1), slow(2)])
def test_a_cell_without_memory_is_a_row_and_the_others_are_measured(grid, tmp_path, capfd, gpus):
    """Three processes: the first cell and the failing one, then the two after it."""
    grid.write_text(grid.read_text().replace("gpus: 1", f"gpus: {gpus}"))
    results = tmp_path / "rows.jsonl"
    assert (
        main(
            [
                "bench",
                "--grid",
                str(grid),
                "--results",
                str(results),
                "--steps",
                "1",
                "--warmup",
                "1",
                "--together",
                "4",
            ]
        )
        == 0
    )
    rows = read_rows(results)
    assert [(r.name, r.status) for r in rows] == [
        ("first", "ok"),
        ("too much", "oom"),
        ("after 2", "ok"),
        ("after 3", "ok"),
    ]
    assert "host memory" in rows[1].error and rows[1].context_length == 16
    assert all(r.gpus == gpus and r.seconds_per_step > 0 for r in rows if r.status == "ok")
    out = capfd.readouterr().out
    assert "3 measured, 1 out of memory, 0 failed" in out
    table = _published_table(read_grid(grid), rows)
    first = next(line for line in table.splitlines() if line.startswith("| first"))
    assert (
        f"{gpus}x rtx 3090" in first
        and f"{2 * gpus:.2f}" in first
        and f"{rows[0].seconds_per_step:,.2f}" in first
    )


@pytest.mark.slow
def test_what_auto_measured_is_kept_though_the_bench_is_cut_off(grid, tmp_path, monkeypatch):
    """As by a time limit, before the process that measured is seen to have ended."""
    run_process, results = cell_processes._run_process, tmp_path / "rows.jsonl"
    grid.write_text(
        grid.read_text().split("cells:")[0]
        + """cells:
  - {name: none fits, sharding_strategy: auto, gpu_memory_gib: 0.1}
  - {name: auto, sharding_strategy: auto}
"""
    )

    def cut_off(argv, seconds):
        run_process(argv, seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr(cell_processes, "_run_process", cut_off)
    assert (
        main(
            [
                "bench",
                "--grid",
                str(grid),
                "--results",
                str(results),
                "--steps",
                "1",
                "--warmup",
                "0",
            ]
        )
        == 130
    )
    assert [(r.name, r.status) for r in read_rows(results)] == [
        ("none fits", "error"),
        ("auto", "ok"),
    ]


@pytest.mark.parametrize("flags", [["--grid", "GRID"], ["--model_name", "llama-2-7b"]])
def test_a_bench_is_not_for_torchruns_ranks(grid, tmp_path, monkeypatch, capfd, flags):
    """Each would measure on the GPUs of the others."""
    monkeypatch.setattr("fsdp_qlora.cli._tell_other_ranks", lambda line: None)
    for name, value in dict(RANK=1, LOCAL_RANK=1, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2).items():
        monkeypatch.setenv(name, str(value))
    results = tmp_path / "rows.jsonl"
    flags = [str(grid) if flag == "GRID" else flag for flag in flags]
    assert main(["bench", *flags, "--results", str(results)]) == 2
    error = capfd.readouterr().err
    assert "error (rank 1): bench starts its ranks itself" in error and "--world_size" in error
    assert not results.exists()


@pytest.mark.parametrize("path", GRIDS, ids=lambda p: p.stem)
def test_every_shipped_grid_can_be_run(path):
    grid = read_grid(path)
    for cell in grid.cells:
        assert cell.shape.layers == (cell.num_hidden_layers or cell.shape.layers)
        assert cell.argv()[0].startswith("--")
        if cell.published:
            assert _published_seconds(cell) is None or _published_seconds(cell) > 0
    assert grid.title


def test_the_accuracy_grid_covers_what_it_should():
    cells = read_grid(ROOT / "benchmarks/grids/accuracy.yaml").cells
    assert len(cells) >= 40
    assert {c.gpus for c in cells} == {1, 2, 4}
    assert {c.settings.get("batch_size", 1) for c in cells} >= {1, 16}
    assert {c.settings.get("context_length") for c in cells} >= {512, 16384}


@pytest.mark.parametrize(
    "text,message",
    [
        ("cells: {", "not readable YAML"),
        ("a: 1", "takes title, source, defaults and a list"),
        ("cells: []", "takes title, source, defaults and a list of cells"),
        ("cells: [1]", "takes title"),
        ("default: {lr: 1}\ncells: [{name: x}]", "unknown default; takes title"),
        ("defaults: [1]\ncells: [{name: x}]", "defaults holds no settings"),
        ("cells: [{name: x}]", "cell 1: it has no model_name; give it here or under defaults"),
        (
            "cells: [{name: x, model_name: llama-2-7b, bach_size: 2}]",
            "cell 1: unknown setting bach_size",
        ),
        ("cells: [{name: x, model_name: llama-2-7b, batch_size: 0}]", "cell 1: --batch_size"),
        ("cells: [{name: x, model_name: llama-9}]", "cell 1: --model_name llama-9"),
        (
            "cells: [{name: x, model_name: llama-2-7b, batch_size: [1, 2]}]",
            "several cells are named 'x'",
        ),
    ],
)
def test_a_wrong_grid_is_named_with_the_cell(tmp_path, text, message):
    (tmp_path / "g.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"--grid .*g.yaml: {message}"):
        read_grid(tmp_path / "g.yaml")


def test_a_number_without_a_point_is_one(tmp_path):
    """YAML 1.1 takes 1e-4 for a text."""
    (tmp_path / "g.yaml").write_text("cells: [{name: x, model_name: llama-2-7b, lr: 1e-4}]")
    assert read_grid(tmp_path / "g.yaml").cells[0].config.lr == 1e-4


@pytest.mark.slow
def test_random_weights_of_a_known_model_need_no_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    results = tmp_path / "rows.jsonl"
    assert (
        main(
            [
                "bench",
                "--model_name",
                "HuggingFaceTB/SmolLM2-135M",
                "--random_weights",
                "--device",
                "cpu",
                "--world_size",
                "1",
                "--sharding_strategy",
                "ddp",
                "--context_length",
                "16",
                "--steps",
                "1",
                "--warmup",
                "0",
                "--results",
                str(results),
            ]
        )
        == 0
    )
    (row,) = read_rows(results)
    assert (row.status, row.model, row.num_hidden_layers) == ("ok", "smollm2-135m", 30)


def test_a_runs_own_flags_are_told_from_those_of_the_bench():
    argv = [
        "--steps",
        "3",
        "--model_name",
        "x",
        "--results=r",
        "--random_weights",
        "--again",
        "true",
    ]
    assert parse_own(argv, BenchOptions)[1] == ["--model_name", "x", "--random_weights"]


# Mixtures whose reserved memory is less well known.
FEW_RESERVED = ("qwen3_235b_qlora_4_blocks", "qwen3_30b_qlora_streamed")


def test_estimates_are_near_every_measured_peak():
    """Recomputed by today's code, on rows that no constant was set on; what torch reserves, on those of
    up to 16k tokens. A cut of four wide blocks of experts is told 1.9 GiB too much, 16% of its little;
    blocks of experts that stream from the host, 1.1 too little. Of one setting measured twice, in 4.87 and
    4.95 GiB, 0.2 and 0.3 too little.
    """
    compared = compare(RESULTS)
    found = accuracy(compared)
    assert found.rows >= 40
    assert (
        found.memory_median <= 0.05 and found.memory_worst <= 0.12 and found.memory_lowest >= -0.05
    )
    short = [c for c in compared if c.row.context_length <= 16384]
    cut = [c for c in short if c.row.name.startswith(FEW_RESERVED)]
    found = accuracy([c for c in short if c not in cut])
    assert found.reserving >= 40
    assert found.reserved_median <= 0.05 and found.reserved_worst <= 0.12
    assert found.reserved_lowest >= -0.06
    assert accuracy(cut).reserved_worst <= 0.16


def test_estimates_are_near_every_measured_time_of_todays_code():
    compared = compare(RESULTS)
    found = accuracy(compared)
    assert {c.row.gpus for c in compared if not c.old_code} >= {1, 2, 4}
    assert found.timed >= 40 and found.time_median <= 0.10 and found.time_worst <= 0.25


def test_pages_say_what_the_rows_do():
    found = runpy.run_path(str(ROOT / "scripts/accuracy_section.py"))
    stale = "the page is old; run: python scripts/accuracy_section.py"
    assert found["short_table"](accuracy(compare(RESULTS))) in found["README"].read_text(), stale
    assert accuracy_lines(RESULTS) in found["PAGE"].read_text(), stale


def test_reserved_memory_at_the_limit_is_not_compared():
    compared = [c for c in compare(RESULTS) if c.at_limit]
    assert compared and all(c.old_reserved and c.row.gpu_memory_limit_gib for c in compared)
    assert not any(
        replace(c, row=replace(c.row, gpu_memory_limit_gib=None)).at_limit for c in compared
    )


def test_few_rows_set_constants():
    assert len(CALIBRATED_ON) <= 10 and {r.name for r in RESULTS} >= set(CALIBRATED_ON)


def test_a_row_names_all_that_its_estimate_needs():
    row = next(r for r in RESULTS if r.name == "8B 2x8192 keep_linears")
    smaller = replace(row, absmax_dtype="int8", lora_rank=16, activation_policy="recompute_all")
    sizes = [memory(_shape_of_row(r), plan_of(r)).peak_allocated for r in (row, smaller)]
    assert sizes[1] < 0.3 * sizes[0]


def test_two_results_files_are_compared_by_name(tmp_path):
    row = next(r for r in RESULTS if r.status == "ok" and r.tokens_per_second_per_gpu)
    half = replace(row, tokens_per_second_per_gpu=row.tokens_per_second_per_gpu / 2)
    assert "50%" in against_table([row], [half])
    assert against_table([row], [replace(half, name="another")]) == "no row is in both files"
    append_row(half, tmp_path / "r.jsonl")
    assert read_rows(tmp_path / "r.jsonl") == [half] and asdict(half)["peer"] is None


def test_auto_is_compared_with_the_best_by_hand_of_its_own_limit():
    grid = read_grid(ROOT / "benchmarks/grids/auto_8b_1gpu.yaml")
    some = next(r for r in RESULTS if r.status == "ok" and r.tokens_per_second_per_gpu)
    speeds = {24: (90, 100), 80: (198, 200), None: (400, 300)}
    rows = [
        replace(
            some,
            name=c.name,
            tokens_per_second_per_gpu=speeds[c.gpu_memory_gib][0 if c.config.is_auto else 1],
        )
        for c in grid.cells
        if "recompute_all, 4" not in c.name
    ]
    text = _auto_table(grid, rows)
    for limit, share in (("24 GiB", "90.0%"), ("80 GiB", "99.0%"), ("1 GPU", "133.3%")):
        assert f"8B {limit} auto: {share} of 8B {limit} keep" in text
    assert "not measured" in text and "8B 24 GiB auto: not measured yet" in _auto_table(
        grid, rows[1:]
    )


def test_a_report_is_markdown_with_a_picture(tmp_path, capsys):
    results = ROOT / "benchmarks/results/llama-3.1-8b_h100_2026-11-27.jsonl"
    assert main(["bench", "--report", str(results), "--picture", str(tmp_path / "a.png")]) == 0
    text = capsys.readouterr().out
    assert "| 8B 2x8192 keep_all, 1x NVIDIA H100 80GB HBM3 | out of memory |" in text
    assert "median error" in text and "nan" not in text
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_says_nothing_of_what_no_row_measured(tmp_path, capsys):
    """These rows' reserved memory and times are of older code; and a file without rows draws nothing."""
    results = ROOT / "benchmarks/results/packing_h100_2026-11-28.jsonl"
    assert main(["bench", "--report", str(results)]) == 0
    text = capsys.readouterr().out
    assert (
        "2 rows: allocated memory" in text and "reserved memory" not in text and "nan" not in text
    )
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert main(["bench", "--report", str(empty), "--picture", str(tmp_path / "a.png")]) == 2
    assert "a.png: no row has an estimate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv,message",
    [
        (["--grid", "none.yaml"], "--grid none.yaml: No such file"),
        (["--report", "none.jsonl"], "none.jsonl: No such file"),
        (["--against", "x.jsonl"], "--against goes with --report"),
        (["--only", "8B"], "--only 8B names cells of a grid; give --grid too"),
        (["--grid", str(GRIDS[0]), "--only", "("], r"--only \(: missing \), unterminated"),
        (["--together", "0"], "--together must be 1 or more"),
        (["--gpu_memory_gib=-3"], "--gpu_memory_gib must be above 0"),
        (["--grid", str(GRIDS[0]), "--only", "nothing like it"], "no cell of .* is named so"),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, message):
    assert main(["bench", *argv]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and re.search(message, lines[0])


# What a cell's or a probe's process is to do for an hour, and the process that waits for it.
_CELL = """
import os, sys, time
from fsdp_qlora.config import RunConfig
from fsdp_qlora.lifecycle.launcher import run_on_ranks


def stay(config):
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(3600)


run_on_ranks(RunConfig(model_name=".", device="cpu", world_size=1), "bench", [], stay)
"""
_PARENT = """
import sys
from fsdp_qlora.bench.cell_processes import _run_process

_run_process(sys.argv[1:], 3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_measures_ends_with_what_waits_for_it(tmp_path, number):
    """It would hold the GPU on which the next run is measured; sessions of their own outlive a parent."""
    cell, file = tmp_path / "cell.py", tmp_path / "pid"
    cell.write_text(_CELL)
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, sys.executable, cell, file], env=env)
    deadline = time.monotonic() + patience(60)
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.send_signal(number)
    parent.wait(patience(30))
    while _is_alive(int(file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
