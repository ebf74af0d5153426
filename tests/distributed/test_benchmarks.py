"""The benchmark scripts run: every row makes a configuration, and a tiny model goes through."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from fsdp_qlora.bench.cell_processes import How, Job, run_jobs
from tests.ranks import run_ranks
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
SMALL = dict(
    batch_size=1,
    context_length=16,
    lora_rank=4,
    compile=False,
    device="cpu",
    use_activation_cpu_offload=False,
    activation_policy="recompute_all",
)


def measured(folder: str, results: str, ours: list[str], peers: list[tuple[str, str]]):
    """Run rows of ours and of peers on a tiny model."""
    import peers as peer_rows
    import speed_rows

    options = SimpleNamespace(
        steps=2, warmup=1, results=results, layers=None, profile=str(Path(results).parent)
    )
    for name in ours:
        speed_rows.run_case(name, folder, options, **SMALL)
    for name, peer in peers:
        peer_rows.run_peer(name, peer, folder, options, **SMALL)


def test_every_row_of_the_table_is_a_configuration_with_a_target():
    from speed_rows import CASES, chosen

    for name, case in CASES.items():
        config = case.config("model")
        assert config.random_weights and config.lora_dropout == 0, name
        assert case.target is None or case.target > 0, name
    assert chosen(["8b_qlora_*"], 2) == [
        "8b_qlora_full_shard",
        "8b_qlora_ddp",
        "8b_qlora_shard_grad_op",
    ]
    with pytest.raises(ValueError, match="no row matches 9b"):
        chosen(["9b"], 1)


def one_rank(folder: str, results: str):
    """Rank 0 of two and of four, launched in this process, with half and a quarter of each weight."""
    import one_rank

    for world_size in (2, 4):
        options = SimpleNamespace(
            steps=2,
            warmup=1,
            results=results,
            profile=None,
            model=None,
            world_size=world_size,
            settings=["--gradient_accumulation_steps", "2"],
        )
        one_rank.run_row("8b_qlora_full_shard", folder, options, lr=1e-2, **SMALL)


def one_rank_of_shared_rows(folder: str) -> tuple[str, float, float, float]:
    """The first of four ranks that share rows: what it prints, and the bytes that it would exchange."""
    import one_rank

    rows = "--sequence_parallel 4 --context_length 64 --activation_policy keep_attention".split()
    options = SimpleNamespace(
        steps=1, warmup=1, results=None, profile=None, model=None, world_size=4, settings=rows
    )
    row = one_rank.run_row("8b_qlora_full_shard", folder, options, lr=1e-2, **SMALL)
    said = one_rank.exchanged_in_a_step(row, options)
    return said, one_rank.Exchanged.bytes / 2, row.loss_first, row.loss_last


@pytest.mark.parametrize(
    "argv, fault",
    [
        (["9b"], "no row is named 9b; there are 8b_qlora"),
        (["8b_qlora_full_shard", "--world_size", "1"], "--world_size must be 2 or more, got 1"),
        (["8b_qlora_full_shard", "--steps", "0"], "--steps must be 1 or more, got 0"),
    ],
)
def test_one_rank_says_what_it_is_not_for(argv, fault, monkeypatch, capsys):
    import one_rank

    monkeypatch.setattr(sys, "argv", ["one_rank.py", *argv])
    monkeypatch.setattr(one_rank, "run_row", lambda *_: None)
    with pytest.raises(SystemExit):
        one_rank.main()
    assert fault in capsys.readouterr().err


@pytest.mark.slow
def test_one_rank_of_several_trains_alone_on_its_share(tmp_path):
    from fsdp_qlora.bench.accuracy import compare
    from fsdp_qlora.bench.row import read_rows

    results = str(tmp_path / "rows.jsonl")
    run_ranks(
        one_rank, 1, save_tiny(tmp_path / "tiny", num_hidden_layers=12), results, grouped=False
    )
    rows = read_rows(results)
    assert [(row.gpus, row.gradient_accumulation_steps, row.peer) for row in rows] == [
        (2, 2, "one rank"),
        (4, 2, "one rank"),
    ]
    assert all(
        row.loss_last < row.loss_first for row in rows
    )  # a gradient that is no number moves none
    assert not compare(rows)


def test_one_rank_of_a_shared_row_copies_what_it_would_exchange(tmp_path):
    ((said, sent, first, last),) = run_ranks(
        one_rank_of_shared_rows, 1, save_tiny(tmp_path / "tiny"), grouped=False
    )
    # Queries, outputs, and two key-value heads made four for four ranks: 4 heads of 16 in bf16, for a
    # quarter of 64 tokens, in 2 blocks: forward, again and backward.
    assert sent == 4 * 4 * 16 * 2 * (64 // 4) * 2 * 3
    assert "75% leave the GPU" in said and last < first


def test_a_step_of_experts_is_measured_with_its_kernels(tmp_path, capsys):
    import experts

    from tests.families import save_family

    settings = ["--batch_size", "1", "--context_length", "16", "--compile", "false"]
    options = SimpleNamespace(
        steps=1, warmup=1, rows=400, tables=True, results=None, settings=settings
    )
    folder = save_family(tmp_path, "Qwen3-MoE")
    for case, op in (("attention", "grouped_linear"), ("experts", "adapted_experts")):
        row = experts.run_case(case, folder, options, device="cpu")
        assert row.status == "ok" and row.tokens_per_second_per_gpu > 0
        assert f"fsdp_qlora::{op}" in capsys.readouterr().out


def test_what_is_alive_at_the_peak_is_counted_by_the_line_that_made_it():
    from experts import alive_at_peak

    def event(action, address, size, line):
        frames = [
            dict(filename="torch/nn.py", line=1, name="f"),
            dict(filename="fsdp_qlora/x.py", line=line, name="g"),
        ]
        return dict(action=action, addr=address, size=size, frames=frames)

    events = [
        event("free_completed", 9, 5, 0),  # made before
        event("alloc", 1, 10, 1),
        event("segment_alloc", 1, 1000, 1),
        event("alloc", 2, 20, 2),
        event("free_requested", 1, 10, 1),
        event("alloc", 3, 20, 2),
        event("free_completed", 1, 10, 1),
        event("free_completed", 2, 20, 2),
        event("alloc", 4, 1, 3),
    ]
    snapshot = dict(device_traces=[[], events], segments=[dict(allocated_size=121)])
    before, peak, sizes, counts = alive_at_peak(snapshot)
    assert (before, peak) == (105, 150)
    assert list(sizes.values()) == [10, 40] and list(counts.values()) == [1, 2]


def test_what_is_measured_in_stages_exists():
    from speed_rows import chosen

    from fsdp_qlora.bench.grid import read_grid

    stages = {
        1: "auto packed dpo dpo_mixed recipes adapted long mixtures hybrids tests",
        2: "tests checkpoints replayed memory auto shared packed trl experts",
        4: "replayed loading shared packed strategies experts",
    }
    for gpus, names in stages.items():
        command = [ROOT / "benchmarks/stages.sh", str(gpus), "rows", *names.split()]
        lines = subprocess.run(
            command, env=os.environ | {"ECHO": "echo"}, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert len(lines) >= len(names.split()) and not any("no stage" in line for line in lines)
        for line in lines:
            assert all(
                (ROOT / word).exists()
                for word in line.split()
                if word.startswith(("benchmarks/", "tests/"))
            )
            if match := re.search(r"--grid (\S+) --only (.*) --warmup", line):
                cells = [c for c in read_grid(ROOT / match[1]).cells if re.search(match[2], c.name)]
                assert len(cells) >= 2 and {c.gpus for c in cells} == {gpus}
            if match := re.search(r"speed_rows.py (.*) --steps", line):
                assert chosen(match[1].split(), gpus)


def test_the_table_of_targets_is_what_the_rows_say():
    made = runpy.run_path(str(ROOT / "scripts/speed_page.py"))["table"]()
    assert made in (ROOT / "docs/performance.md").read_text(), "run: make -C docs speed"
    assert "| 8b_qlora | 1 | 15,500 |" in made and "| 8b_full_bf16 | 1 | 2.2 s |" in made


def test_quality_runs_each_variant_and_seed_of_a_task_alike_but_for_what_it_compares(tmp_path):
    from quality import TASKS, VARIANTS, Job, all_jobs, config_of

    jobs = all_jobs(3)
    assert len(jobs) == len(set(jobs)) == len(VARIANTS) * len(TASKS) * (3 + 1)
    assert {job.seed for job in jobs[: len(VARIANTS) * len(TASKS)]} == {
        0
    }  # whole seeds, one by one
    for task in TASKS:
        configs = {v: config_of(Job(task, v, 1), tmp_path, model_name="model") for v in VARIANTS}
        formats = {
            (c.quant_type, c.absmax_dtype, c.adapter, c.compute_dtype) for c in configs.values()
        }
        assert len(formats) == len(VARIANTS)
        assert (
            len(
                {
                    (
                        c.lr,
                        c.lora_rank,
                        c.lora_alpha,
                        c.global_batch_size,
                        c.max_steps,
                        c.eval_dataset,
                        c.seed,
                    )
                    for c in configs.values()
                }
            )
            == 1
        )
        assert len({c.output_dir for c in configs.values()}) == len(VARIANTS)
    assert configs["hqq 3 bits"].quant_type == "hqq3" and configs["nf4, DoRA"].adapter == "dora"


def test_the_table_of_quality_takes_differences_seed_by_seed():
    from quality_table import tables

    losses = {
        ("bf16", 0): 1.0,
        ("bf16", 1): 2.0,
        ("nf4", 0): 1.1,
        ("nf4", 1): 2.1,
        ("nf4", 2): 7.0,
        ("nf4", None): 3.0,
    }
    rows = [
        dict(task="stdlib", variant=variant, seed=seed, status="ok", held_out_loss=loss)
        for (variant, seed), loss in losses.items()
    ]
    rows += [dict(task="stdlib", variant="fp4", seed=0, status="error", error="out of memory")]
    assert tables(rows).splitlines()[4:] == [
        "| bf16 |  | 1.5000 ± 0.7071 |  | 2 |",
        "| nf4 | 3.000 | 3.4000 ± 3.1575 | +0.1000 ± 0.0000 | 3 |",
    ]


def test_a_difference_that_three_seeds_agree_on_is_bold():
    from quality_table import against

    ends = {0: 1.0, 1: 2.0, 2: 3.0}
    losses = {
        "bf16": ends,
        "nf4": {seed: loss + 0.3 + 0.1 * seed for seed, loss in ends.items()},
        "fp4": {seed: loss + 0.1 + 0.1 * seed for seed, loss in ends.items()},
    }
    assert [against(losses, v) for v in losses] == ["", "**+0.4000 ± 0.1000**", "+0.2000 ± 0.1000"]


def test_runs_of_two_bases_make_no_table():
    check = runpy.run_path(str(ROOT / "scripts/quality_page.py"))["check_one_base"]
    check(
        [dict(model="base", commit="a", weights="1"), dict(model="base", commit="b", weights="1")]
    )
    with pytest.raises(ValueError, match="several bases"):
        check([dict(model="base", commit="a"), dict(model="base", commit="b")])


def test_every_kind_of_block_that_a_plan_a_row_or_a_recipe_names_is_compiled_ahead(tmp_path):
    from compile_ahead import planned, read_grid, recipe_cell, thin_cells, wanted_cells

    folder = save_tiny(tmp_path / "tiny", num_hidden_layers=24, max_position_embeddings=512)
    (tmp_path / "grid.yaml").write_text(f"""
defaults: {{model_name: {folder}, random_weights: true, device: cpu, context_length: 256,
            global_batch_size: 8, batch_size: 4, sharding_strategy: ddp}}
cells:
  - {{name: auto, sharding_strategy: auto, gpu_memory_gib: 0.63}}  # 0.59 recomputed, 0.66 kept
  - {{name: by hand, activation_policy: "keep_linears:8,recompute_all:16"}}
""")
    auto, by_hand = read_grid(tmp_path / "grid.yaml").cells
    kinds = {part.split(":")[0] for part in planned(auto)["activation_policy"].split(",")}
    thin = thin_cells([auto])
    assert {c.settings["activation_policy"] for c in thin} == kinds and len(kinds) > 1
    assert {(c.shape.layers, c.gpu_memory_gib, c.config.is_auto) for c in thin} == {
        (2, None, False)
    }
    assert len(thin_cells([auto, replace(auto, name="again"), by_hand])) == len(
        kinds | {"keep_linears", "recompute_all"}
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name: {folder}\ndataset: rows.jsonl\nmlp_tiles: -1\n"
        "activation_policy: keep_all:4,recompute_all:20\nbatch_size: 4\n"
        "global_batch_size: 4\nlayers_to_transform: 20,21\n"
    )
    options = SimpleNamespace(grids=[], only="", config=[], rows=["70b_qlora"], world_size=None)
    assert [
        (c.settings["activation_policy"], c.gpus) for c in thin_cells(wanted_cells(options))
    ] == [("keep_linears", 4), ("keep_attention", 4)]  # what its 70 GiB allow
    thin = thin_cells([recipe_cell(str(recipe), gpus=2)])
    assert [(c.settings["activation_policy"], c.gpus) for c in thin] == [
        ("keep_all", 2),
        ("recompute_all", 2),
    ]
    assert all(
        c.config.random_weights
        and c.config.batch_size == 2
        and c.config.mlp_tiles > 0
        and c.config.adapted_blocks == [0]
        for c in thin
    )


def test_graphs_of_a_hybrid_are_made_ahead_from_blocks_of_each_kind():
    from compile_ahead import thin_cells, wanted_cells

    options = SimpleNamespace(
        grids=[],
        rows=["qwen3_5_9b_qlora"],
        only="",
        config=[],
        world_size=None,
        gpu_memory_gib=None,
    )
    thin = thin_cells(wanted_cells(options))
    assert {(c.shape.layers, len(c.shape.block_kinds())) for c in thin} == {(4, 2)}


@pytest.mark.parametrize(
    "ranks, ours, peers",
    [
        (1, ["8b_qlora", "8b_full_8bit", "8b_lora_qkv"], [("8b_qlora", "hf"), ("8b_lora", "hf")]),
        (2, ["8b_qlora_full_shard"], [("8b_qlora_full_shard", "accelerate")]),
    ],
)
def test_rows_of_ours_and_of_peers_are_measured_one_after_the_other(tmp_path, ranks, ours, peers):
    results = tmp_path / "rows.jsonl"
    folder = save_tiny(tmp_path / "tiny", max_position_embeddings=128)
    run_ranks(measured, ranks, folder, str(results), ours, peers, grouped=False)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [r["name"] for r in rows] == [f"{n} on {ranks}" for n in [*ours, *(n for n, _ in peers)]]
    assert all(r["status"] == "ok" and r["seconds_per_step"] > 0 for r in rows)
    for row, name in zip(rows, ours, strict=False):
        assert row["peer"] is None
        table = (tmp_path / name / "table_steps_2-2_rank_0.txt").read_text()
        assert table.startswith("one of 1 recorded steps") and "products" in table
    for row, (_, peer) in zip(rows[len(ours) :], peers, strict=True):
        assert row["peer"].startswith(f"{peer}: transformers ")
        assert row["loss_first"] == pytest.approx(4.57, abs=0.2)  # log(97)


@pytest.mark.slow
def test_a_cell_that_runs_out_of_time_leaves_no_rank_behind(tmp_path):
    """A rank left alone would hold the GPU that the next cell is measured on."""
    folder = save_tiny(tmp_path)
    job = Job(
        "endless",
        [
            "--model_name",
            folder,
            "--random_weights",
            "--device",
            "cpu",
            "--context_length",
            "16",
            "--world_size",
            "2",
        ],
        gpus=2,
    )
    how = How(steps=10**6, warmup=1, minutes=0.2)
    (row,) = run_jobs([job], how)
    assert (row.status, row.error) == ("error", "stopped: out of time")
    seen = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in seen if f"--steps {how.steps}" in line]


# ---- real rows ----------------------------------------------------------------------------------


def test_real_rows_have_the_lengths_of_their_kind_and_are_the_same_each_time(tmp_path):
    from real_rows_data import KINDS, save_tokenizer, write_rows

    from fsdp_qlora.data import load_dataset

    tokenizer = save_tokenizer(tmp_path)
    sizes = dict(a=(80, 250, 610), b=(50, 1100, 8100), c=(500, 9000, 32_010))
    for name, (least, mean, most) in sizes.items():
        path = tmp_path / f"{name}.jsonl"
        write_rows(name, path, tokenizer, 400_000)
        rows = load_dataset(path, tokenizer, context_length=KINDS[name].context_length)
        assert rows.lengths.min() >= least - 10 and rows.lengths.max() <= most
        assert rows.lengths.mean() == pytest.approx(mean, rel=0.35) and rows.lengths.sum() > 390_000
        assert tokenizer.pad_token_id not in rows.input_ids  # the peers' padding is told by it
        assert 0.3 < rows.trained_counts.sum() / rows.lengths.sum() <= (1 if name == "c" else 0.7)
        written = path.read_text()
        write_rows(name, path, tokenizer, 400_000)
        assert path.read_text() == written


@pytest.mark.slow
def test_train_py_is_measured_on_real_rows_beside_the_bench(tmp_path):
    import real_rows

    results = tmp_path / "real_rows.jsonl"
    real_rows.main(
        [
            "--tiny",
            "--only",
            "packed_b,padded_a,packed_b:2",
            "--results",
            str(results),
            "--logs",
            str(tmp_path / "logs"),
        ]
    )
    packed, padded, again = rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(r["name"], r["status"], r["peer"], r["is_repeated"]) for r in rows] == [
        ("packed_b", "ok", None, False),
        ("padded_a", "ok", None, False),
        ("packed_b", "ok", None, True),
    ]
    for row in (packed, padded):
        assert row["ratio"] == row["tokens_per_second"] / row["bench_tokens_per_second"] > 0
        assert 0 < row["filled_share"] <= 1 and row["steps_measured"] == 2
        assert row["loss_first"] == pytest.approx(7.62, abs=0.2)  # log(2048)
        assert row["loss_last"] and row["estimate_peak_gib"] > 0
        assert row["seconds_to_first_step"] > 0 and row["commit"] and row["versions"]["torch"]
    assert 8 * 16 < padded["tokens_per_micro_batch"] < 8 * 40  # rows of a 16th, and the template
    assert again["tokens_per_second"] is None and again["loss_first"] == packed["loss_first"]


def test_a_run_on_real_rows_that_fails_is_a_row_that_says_why(tmp_path):
    import real_rows

    (row,) = real_rows.main(["--tiny", "--only", "packed_a", "--lora_rank", "0"])
    assert row.status == "error" and "--lora_rank" in row.error and row.tokens_per_second is None


def test_figures_are_of_rows_alone_and_of_the_steps_that_count():
    from real_rows import figures

    steps = [
        dict(
            kind="step",
            step=n,
            tokens=80,
            padded_tokens=100,
            seconds=1.0 if n < 10 else 0.5,
            loss=2.0,
            peak_allocated_gib=n,
            compilations=min(n, 12),
        )
        for n in range(1, 21)
    ]
    found = figures(
        [dict(kind="start", accumulation=2, estimate=dict(tokens_per_second=170.0)), *steps],
        first=10,
    )
    assert (found["tokens_per_second"], found["filled_share"], found["steps_measured"]) == (
        160,
        0.8,
        11,
    )
    assert found["tokens_per_second_from_5"] == 80 * 16 / (5 + 11 / 2)
    assert (found["compilations"], found["compilations_after_first"]) == (12, 3)
    assert found["tokens_per_micro_batch"] == 40 and found["estimate_tokens_per_second"] == 170


def test_a_peer_is_measured_by_its_steps_tokens_and_seconds(tmp_path):
    """As a trainer calls it: two micro-batches a step, of which the last step is not done."""
    from real_rows import figures, records_of
    from real_rows_peers import StepLog

    log = StepLog(tmp_path / "metrics.jsonl", torch.device("cpu"), pad=1, micro_batches=2)
    trainer = SimpleNamespace(training_step=lambda model, inputs, items: torch.tensor(1.5))
    log.keep(kind="start", accumulation=2)
    log.watch(trainer)
    for _ in range(7):
        trainer.training_step(None, dict(input_ids=torch.tensor([[5, 6, 7, 1]])), 3)
    log.end()
    records = records_of(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["tokens"], r["padded_tokens"], r["loss"]) for r in records[1:]] == [
        (n, 6, 8, 3.0) for n in (1, 2, 3)
    ]
    assert figures(records, first=2)["steps_measured"] == 2


def test_a_peer_that_looks_for_grouped_heads_finds_them_in_every_torch():
    import inspect

    from real_rows_peers import takes_grouped_heads

    def attend(q, k, *, scale=None):
        return q, k, scale

    module = SimpleNamespace(varlen_attn=attend)
    takes_grouped_heads(module)
    assert "enable_gqa" in inspect.signature(module.varlen_attn).parameters
    assert module.varlen_attn(1, 2, scale=3, enable_gqa=True) == (1, 2, 3)


def test_dpo_rows_have_as_many_tokens_as_are_counted(tmp_path):
    import dpo_8b

    folder = save_tiny(tmp_path / "tiny")  # whose own tokenizer AutoTokenizer would take
    options = dpo_8b.options_of([folder, "--length", "64", "--batch_size", "2"])
    tokenizer = dpo_8b.number_tokenizer(folder)
    lengths = dpo_8b.row_lengths(options, mixed=True)
    for wanted, row in zip(lengths, dpo_8b.rows(lengths, len(tokenizer)), strict=True):
        ids = [tokenizer(row["prompt"] + row[way]).input_ids for way in ("chosen", "rejected")]
        assert tuple(len(row) + 1 for row in ids) == wanted  # TRL adds the end


@pytest.mark.slow
def test_dpo_is_measured_beside_trl_alone_with_the_same_losses(tmp_path):
    import dpo_8b

    model = save_tiny(tmp_path / "tiny")
    results = tmp_path / "rows.jsonl"
    small = "--batch_size 2 --length 24 --steps 2 --lora_rank 4".split()
    profile = ["--profile", str(tmp_path / "profile")]
    rows = dpo_8b.main([model, "--model", "tiny", "--results", str(results), *small, *profile])
    assert [json.loads(line) for line in results.read_text().splitlines()] == rows
    assert [(row["status"], row["peer"]) for row in rows] == [
        ("ok", None),
        ("ok", "trl + peft + bitsandbytes"),
    ]
    for row in rows:
        assert row["steps_measured"] == 2 and row["tokens_per_second"] > 0
        assert abs(row["loss_first"] - math.log(2)) < 1e-3  # both policies are one at first
        assert row["loss_last"] != row["loss_first"]
    for way in ("ours", "peer"):
        assert "matmul" in (tmp_path / f"profile/{way}.txt").read_text()
    mixed = dpo_8b.main([model, "--model", "tiny", *small, "--lengths", "mixed"])
    assert [(row["status"], row["lengths"], row["padding_free"]) for row in mixed] == [
        ("ok", "mixed", True),
        ("ok", "mixed", False),
    ]
    for row in mixed:  # of two steps, their median is their mean
        real = row["tokens_per_second"] * 2 * row["seconds_per_step"]
        assert 2 * 2 * 2 * 3 < real < 2 * 2 * 2 * 24
    (late,) = dpo_8b.main([model, "--model", "tiny", "--ways", "peer", "--minutes", "0.01", *small])
    assert late["status"] == "timeout" and "tokens_per_second" not in late


def trl_two_ranks(folder: str, results: str):
    from trl_two_ranks import main

    small = "--layers 2 --batch_size 2 --length 24 --answer 6 --steps 1 --lora_rank 4".split()
    main([folder, "--model", "tiny", *small, "--results", results])


@pytest.mark.slow
def test_dpo_and_grpo_of_two_sharded_ranks_are_measured(tmp_path):
    results = tmp_path / "rows.jsonl"
    run_ranks(trl_two_ranks, 2, save_tiny(tmp_path / "tiny"), str(results), timeout=300)
    dpo, grpo = [json.loads(line) for line in results.read_text().splitlines()]
    assert (dpo["name"], grpo["name"]) == ("dpo_two_ranks", "grpo_two_ranks")
    assert abs(dpo["loss_first"] - math.log(2)) < 1e-3
    for row, tokens in ((dpo, 2 * 24), (grpo, 24 // 4 + 6)):
        assert row["gpus"] == 2 and row["seconds"] > row["seconds_per_step"] > 0
        seconds = row["tokens_per_second"] * row["seconds_per_step"]
        assert seconds == pytest.approx(2 * 2 * tokens)


def test_the_benchmark_of_defaults_tries_all_rates_on_each_task_a_seed_at_a_time(tmp_path):
    from defaults import config_of, jobs_of
    from defaults_table import FACTORS, TASKS, rate

    jobs = jobs_of(3, ["default", "lr", "full", "classic"])
    assert len(jobs) == len(set(jobs)) == 3 * (2 * len(FACTORS) + 3) * len(TASKS)
    assert {job.seed for job in jobs[: len(jobs) // 3]} == {0}
    options = SimpleNamespace(
        hidden_size=512, base=tmp_path / "base", folder=tmp_path, device="cpu"
    )
    configs = {job: config_of(job, options) for job in jobs}
    assert len({c.output_dir for c in configs.values()}) == len(jobs)
    rates = {c.lr for job, c in configs.items() if job.variant.startswith("lr")}
    assert sorted(rates) == [factor * rate(512) for factor in FACTORS]
    assert {c.lr for job, c in configs.items() if job.variant.endswith("default")} == {None}
    of_all_weights = {c.lr for c in configs.values() if c.train_type == "full"} - {None}
    assert sorted(of_all_weights) == [factor / 10 * rate(512) for factor in FACTORS]


def test_the_table_of_defaults_measures_each_kind_of_training_against_its_own_best_rate():
    from defaults_table import tables

    ends = {"lr x1": (2.0, 2.4), "lr x2": (2.0, 2.0), "full lr x1": (5.0,), "classic": (3.0, 5.0)}
    rows = [
        dict(task="stdlib", variant=v, seed=n, status="ok", held_out_loss=loss, hidden_size=512)
        for v, losses in ends.items()
        for n, loss in enumerate(losses)
    ]
    rows += [dict(task="stdlib", variant="lr x4", seed=0, status="error", hidden_size=512)]
    assert tables(rows).splitlines()[4:] == [
        "| lr x1 |  | 2.2000 (+10.0%) |  | 2 |",
        "| lr x2 |  | 2.0000 (+0.0%) |  | 2 |",
        "| full lr x1 |  | 5.0000 (+0.0%) |  | 1 |",
        "| classic |  | 4.0000 (+100.0%) |  | 2 |",
    ]


def test_the_page_of_defaults_is_what_the_rows_say():
    made = runpy.run_path(str(ROOT / "scripts/defaults_page.py"))
    text = (ROOT / "docs/defaults.md").read_text()
    assert made["page"](text, made["read_rows"]()) == text, "run: make -C docs defaults"


@pytest.mark.slow
def test_a_recipe_is_measured_by_the_command_of_its_page(tmp_path, capsys):
    import recipes
    from real_rows import tiny_model
    from real_rows_data import save_tokenizer

    tiny_model(tmp_path / "tiny")
    save_tokenizer(tmp_path / "tiny")
    given = "chat --shrink 16 --steps 3 --first 2 --device cpu --context_length 512 --batch_size 1".split()
    results = tmp_path / "rows.jsonl"
    recipes.main(
        [str(tmp_path), *given, "--model", str(tmp_path / "tiny"), "--results", str(results)]
    )
    row = json.loads(results.read_text())
    assert (row["name"], row["data"], row["status"], row["steps_measured"]) == (
        *("recipe chat", "b", "ok"),
        2,
    )
    assert f"recipe chat: {row['tokens_per_second']:,.0f} tokens/s" in capsys.readouterr().out


def test_rows_of_a_recipe_are_enough_for_its_steps():
    import recipes

    from fsdp_qlora.config import plan_batches
    from fsdp_qlora.config.flags import parse

    for path in recipes.RECIPES.glob("*.yaml"):
        (config,) = parse(["--config", str(path)])
        if not config.is_auto:
            rows = plan_batches(config, 1).per_step
            least = rows * min(config.context_length, 256)
            assert recipes.tokens_of(config, 3) >= 3 * least, path.stem
