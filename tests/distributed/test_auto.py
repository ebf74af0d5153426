"""--sharding_strategy auto on two CPU ranks: plans for the data, probes with it, goes down, remembers."""

from __future__ import annotations

import io
import json
import random
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fsdp_qlora.bench.auto import machine_here, with_changes
from fsdp_qlora.bench.batches import RunRows
from fsdp_qlora.bench.cell_processes import How
from fsdp_qlora.catalog.machine import MachineOptions, machine_from_options
from fsdp_qlora.catalog.shapes import shape_from_params
from fsdp_qlora.cli import TrainOptions
from fsdp_qlora.commands import probe
from fsdp_qlora.commands.probe import _confirmed_changes, _store_file
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.flags import parse
from fsdp_qlora.estimate import batches_of
from fsdp_qlora.planner import free_settings, packing_line, propose
from fsdp_qlora.preflight.sampled_lengths import sampled_lengths
from fsdp_qlora.run_plan import plan_run
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

CONTEXT = 512


def write_rows(path: Path, lengths) -> str:
    """Rows of about so many tokens: the tokenizer's are bytes."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=n)) + "." for n in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def metrics_of(folder) -> list[dict]:
    records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if "loss" in record and "tokens" in record]


def train_here(*runs: list[str]) -> list[str]:
    """What each run prints."""
    from fsdp_qlora.training import trainer
    from fsdp_qlora.training.rank import train_rank

    trainer.plot_loss = lambda *_: False
    said = []
    for argv in runs:
        (config,) = parse(argv)
        with redirect_stdout(io.StringIO()) as out:
            train_rank(config)
        said.append(out.getvalue())
    return said


@pytest.mark.slow
def test_a_plan_that_runs_out_of_memory_is_replaced_and_what_works_is_kept_and_keeps_its_promise(
    tmp_path, capfd, monkeypatch
):
    """All activations of the longest rows take a rank 0.57 GiB, the next plan's 0.43; probes may take 0.5."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("fsdp_qlora.commands.probe.STEPS", How(steps=1, warmup=0, minutes=10))
    deep = dict(num_hidden_layers=24, num_attention_heads=2, intermediate_size=192)
    folder = save_chat_model(tmp_path / "model", max_position_embeddings=2048, **deep)
    data = write_rows(tmp_path / "rows.jsonl", [*[40, 60] * 22, 600])
    flags = dict(
        model_name=folder,
        dataset=data,
        train_on="all",
        sharding_strategy="auto",
        batch_size=8,
        global_batch_size=16,
        packing="false",
        context_length=CONTEXT,
        device="cpu",
        world_size=2,
        compile="false",
        output_dir=str(tmp_path / "out"),
        log_to="jsonl",
        save_model="false",
    )
    argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    (config,) = parse(argv)
    changes = _confirmed_changes(config, argv, allowed_gib=0.5)
    said = capfd.readouterr().out
    assert "out of memory" in said and said.count("plan: ") >= 2 and "tokens/s per GPU" in said
    chosen_argv = with_changes(argv, changes)
    (chosen,) = parse(chosen_argv)
    assert not chosen.is_auto and (chosen.batch_size, chosen.global_batch_size) == (8, 16)
    assert chosen.activation_policy != "keep_all" and not chosen.packing
    assert _confirmed_changes(config, argv, allowed_gib=0.5) == changes
    assert "plan of " in capfd.readouterr().out

    (stored,) = (tmp_path / "cache" / "fsdp_qlora" / "plans").iterdir()
    promised = json.loads(stored.read_text())["batches"]
    assert f"16 rows of {promised['tokens']:,.0f} tokens a step" in said
    run_ranks(train_here, 2, chosen_argv, grouped=False)
    keeps_its_promise(promised, metrics_of(tmp_path / "out"))


def keeps_its_promise(promised: dict, steps: list[dict]):
    """Steps, tokens and places of the run are those that were planned with."""
    assert len(steps) == promised["steps"] > 1
    tokens, places = (sum(s[name] for s in steps) for name in ("tokens", "padded_tokens"))
    assert tokens / len(steps) == pytest.approx(promised["tokens"])
    assert tokens / places == pytest.approx(promised["share"])


CASES = dict(
    padded=dict(global_batch_size=6, batch_size=2),
    cut=dict(global_batch_size=20, batch_size=2),
    compiled_widths=dict(global_batch_size=6, batch_size=2, eval_share=0.2),
    bins=dict(packing=True, batch_size=1),
    packed_rows=dict(packing=True, global_batch_size=10),
    streamed=dict(stream=True, packing=True, max_steps=3),
)


def probe_and_run(folder: str, data: str, out: str, cases: dict) -> dict[str, dict]:
    """For each case: what a probe computes, what the run of the same settings does, and its metrics."""
    import torch

    from fsdp_qlora.bench import measure as bench
    from fsdp_qlora.bench.cell_processes import How
    from fsdp_qlora.bench.measure import MemoryLimit, describe_run, measure
    from fsdp_qlora.training import loop, step, trainer
    from fsdp_qlora.training.trainer import train

    trainer.plot_loss = lambda *_: False
    seen, found, original = [], {}, step.train_step

    def watched(model, optimizer, micro_batches, **kwargs):
        seen.append([batch["input_ids"].clone() for batch in micro_batches])
        return original(model, optimizer, micro_batches, **kwargs)

    step.train_step = loop.train_step = watched
    device = torch.device("cpu")
    for name, case in cases.items():
        config = RunConfig(
            **dict(
                model_name=folder,
                dataset=data,
                train_on="all",
                context_length=CONTEXT,
                sharding_strategy="ddp",
                gradient_accumulation_steps=1,
                output_dir=f"{out}/{name}",
                log_to="jsonl",
                save_model=False,
                device="cpu",
                compile=False,
            )
            | case
        )
        rows = RunRows.read(config)
        plan = plan_run(rows.planned, device)
        row = describe_run(rows.planned, plan, name, 2, device)
        how = How(steps=2, warmup=1)
        bench._STEP_SECONDS = 0 if name == "cut" else 1e6
        measure(row, rows.planned, plan, how, device, MemoryLimit(None), rows)
        probed, seen[:] = list(seen), []
        train(config, rows.data.train, device, rows.tokenizer, rows.data.held_out)
        ran, seen[:] = list(seen), []
        found[name] = dict(
            probed=probed, ran=ran, row=asdict(row), config=asdict(config), lengths=rows.lengths
        )
    return found


@pytest.mark.parametrize("names", [["padded"], rest(sorted({*CASES} - {"padded"}))])
def test_a_probe_computes_the_runs_own_first_steps_after_the_longest_rows_and_the_run_keeps_the_promise(
    tmp_path, names
):
    folder = save_chat_model(tmp_path / "model", num_hidden_layers=2)
    draw = random.Random(1)
    data = write_rows(tmp_path / "rows.jsonl", [draw.randint(5, 150) for _ in range(40)] + [300])
    cases = {name: CASES[name] for name in names}
    ranks = run_ranks(probe_and_run, 2, folder, data, str(tmp_path / "out"), cases)
    for name in cases:
        config = RunConfig(**ranks[0][name]["config"])
        tokens = 0
        for of_rank in ranks:
            probed, ran = of_rank[name]["probed"], of_rank[name]["ran"]
            full, again, *rounds = probed
            longest = CONTEXT if config.packing or config.stream else 320
            assert len(full) <= 2 and len(full) == len(again)
            assert all(batch.shape == (config.batch_size, longest) for batch in full + again)
            first = ran[:2]
            if name == "cut":
                assert all(len(step) == 5 for step in first)
                first = [[step[1], step[3]] for step in first]  # of five, by length
            first *= 2  # a round of warm-up, and the measured one
            assert len(rounds) == len(first)
            for ours, theirs in zip(rounds, first, strict=True):
                assert len(ours) == len(theirs)
                assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))
        steps = metrics_of(tmp_path / "out" / name)
        tokens, row = sum(step["tokens"] for step in steps[:2]), ranks[0][name]["row"]
        seconds = row["seconds_p10"] + row["seconds_p90"]  # the two measured steps
        if name in ("padded", "cut"):
            probed = [batch for r in ranks for step in r[name]["probed"][-2:] for batch in step]
            rows = [row for batch in probed for row in batch if row.any()]
            of_rows = sum(
                int(row.nonzero().max()) + 2 for row in rows
            )  # the end of a row is 0, too
            assert of_rows == tokens if name == "padded" else of_rows < tokens
            tokens = of_rows * (5 / 2 if name == "cut" else 1)
        assert row["tokens_per_second_per_gpu"] == pytest.approx(tokens / 2 / seconds)
        if not config.stream:
            promised = batches_of(ranks[0][name]["lengths"], config, 2)
            keeps_its_promise(asdict(promised), steps)


def test_other_data_replan_and_short_rows_get_other_plans_than_long_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = save_chat_model(tmp_path / "model", max_position_embeddings=4096)
    config = RunConfig(
        model_name=folder,
        train_on="all",
        sharding_strategy="auto",
        batch_size=-1,
        global_batch_size=64,
        context_length=2048,
        device="cpu",
    )
    files = dict(
        short=write_rows(tmp_path / "short.jsonl", [40, 60] * 50),
        long=write_rows(tmp_path / "long.jsonl", [1900, 2000] * 50),
        again=write_rows(tmp_path / "again.jsonl", [40, 60] * 50),
    )
    shape, card = shape_from_params("7B"), machine_from_options(MachineOptions(gpu="RTX 4090"))
    free, keys, plans = free_settings(config, set()), {}, {}
    for name, dataset in files.items():
        asked = replace(config, dataset=dataset)
        rows, why = sampled_lengths(asked)
        assert not why
        keys[name] = _store_file(shape, machine_here(asked), asked, free, rows)
        plans[name] = propose(shape, card, asked, free, rows)
    assert keys["short"] != keys["long"] and keys["short"] == keys["again"]
    assert plans["short"].choice.config.batch_size > plans["long"].choice.config.batch_size
    assert plans["short"].choice.memory.total < card.memory_gib
    assert not packing_line(plans["short"]) and not packing_line(plans["long"]), "little is padding"

    uneven = write_rows(tmp_path / "uneven.jsonl", [*[40, 60] * 22, 1900])
    padded = replace(config, dataset=uneven, batch_size=8, global_batch_size=16, packing=False)
    rows, _ = sampled_lengths(padded)
    plan = propose(shape, card, padded, free_settings(padded, {"batch_size", "packing"}), rows)
    assert "with --packing true the plan is" in packing_line(plan)


def test_only_what_is_auto_is_chosen():
    auto = RunConfig(sharding_strategy="auto")
    assert free_settings(auto, set()) == {
        "sharding_strategy",
        "shard_group_size",
        "activation_policy",
        "use_cpu_offload",
        "use_activation_cpu_offload",
        "sequence_parallel",
    }
    assert free_settings(auto, {"use_cpu_offload", "activation_policy"}) == {
        "sharding_strategy",
        "shard_group_size",
        "use_activation_cpu_offload",
        "sequence_parallel",
    }
    assert free_settings(RunConfig(batch_size=-1), set()) == {"batch_size"}
    assert free_settings(RunConfig(activation_budget_gib=-1), set()) == {"activation_policy"}


def test_chosen_settings_replace_those_that_were_typed():
    argv = ["--lr", "1", "--sharding_strategy", "auto", "--batch_size=auto", "--verbose"]
    assert with_changes(argv, dict(sharding_strategy="ddp", batch_size=4)) == [
        "--lr",
        "1",
        "--verbose",
        "--sharding_strategy",
        "ddp",
        "--batch_size",
        "4",
    ]


def test_flags_of_the_command_itself_do_not_reach_a_probe(monkeypatch):
    """--on_end is train.py's own: a probe, which measures, would refuse it."""
    asked = []
    monkeypatch.setattr(probe, "_confirmed_changes", lambda config, argv: asked.append(argv) or {})
    argv = ["--sharding_strategy", "auto", "--on_end", "notify-send done", "--batch_size", "2"]
    config, _ = parse(argv, TrainOptions)
    chosen = probe.planned_argv(config, argv, TrainOptions)
    assert "--on_end" in chosen and "--on_end" not in asked[0]
    assert parse(asked[0], prog="fsdp-qlora bench")[0].batch_size == 2
