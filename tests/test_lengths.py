"""Estimates that know the lengths of rows agree with the loader that a run uses."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fsdp_qlora.build import planned_model
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.machine import MachineOptions, cpu_machine, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape, shape_from_params
from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig, plan_batches
from fsdp_qlora.config.run import with_bins_of
from fsdp_qlora.data import DataReport, StepLoader, TokenizedDataset, row_lengths, step_sampler
from fsdp_qlora.data.collate import few_widths
from fsdp_qlora.data.lengths import SAMPLE
from fsdp_qlora.estimate import batches_of, estimate, packing_line, report
from fsdp_qlora.observe import throughput
from fsdp_qlora.plan_draft import draft_plan
from fsdp_qlora.planner import free_settings, propose
from fsdp_qlora.planner.report import report as plan_report
from fsdp_qlora.preflight.run_data import read_data, run_tokenizer
from fsdp_qlora.preflight.sampled_lengths import can_pack, lengths_of, sampled_lengths
from fsdp_qlora.training.trainer import longest_row

from .families import family_config
from .tokenizers import save_chat_model

CONTEXT = 512
RNG = np.random.default_rng(0)
DISTRIBUTIONS = dict(
    short=RNG.integers(20, 60, 97),
    full=np.full(64, CONTEXT),
    log_normal=np.clip(RNG.lognormal(4.5, 1, 150), 2, CONTEXT).astype(int),
    two_kinds=np.array([30] * 80 + [500] * 9),
)


def tokens_of(lengths) -> TokenizedDataset:
    total = int(np.sum(lengths))
    trained = np.ones(total, dtype=bool)
    return TokenizedDataset(
        np.ones(total, dtype=np.int32),
        trained,
        np.concatenate([[0], np.cumsum(lengths)]),
        DataReport(CONTEXT),
    )


def machine(**options):
    return machine_from_options(MachineOptions(gpu="h100", **options))


def sampled(lengths, total=None):
    return row_lengths(
        np.asarray(lengths), CONTEXT, len(lengths) if total is None else total, seed=42
    )


@pytest.mark.parametrize(
    "settings",
    [
        dict(batch_size=3),
        dict(batch_size=4, global_batch_size=10),
        dict(batch_size=2, packing=True),
        dict(batch_size=2, packing=True, global_batch_size=16),
        dict(batch_size=3, compile=False),
    ],
)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_padding_and_tokens_are_those_of_the_batches_that_a_run_gets(name, settings, ranks):
    config = RunConfig(context_length=CONTEXT, sharding_strategy="ddp", **settings)
    dataset = tokens_of(DISTRIBUTIONS[name])
    plan = plan_batches(with_bins_of(config, dataset.mean_length, ranks), ranks)
    sampler = step_sampler(dataset, plan.per_step, plan.unit, seed=config.seed)
    pad_to = few_widths(CONTEXT) if config.compile is not False else None
    if config.has_full_bins:
        pad_to = CONTEXT
    loaders = [
        StepLoader(
            dataset,
            sampler,
            rank,
            ranks,
            plan.micro_batch_size,
            pad_token_id=0,
            packing=config.packing,
            pad_to=pad_to,
        )
        for rank in range(ranks)
    ]
    steps = [[loader.step(i) for loader in loaders] for i in range(sampler.total_steps)]
    batches = [batch for step in steps for part in step for batch in part.micro_batches]

    found = batches_of(sampled(DISTRIBUTIONS[name]), config, ranks)
    places = sum(batch["input_ids"].numel() for batch in batches)
    assert found.steps == len(steps)
    assert found.tokens == pytest.approx(sum(step[0].num_tokens for step in steps) / len(steps))
    assert found.share == pytest.approx(len(dataset.input_ids) / places)
    assert found.accumulation * len(steps) * ranks == pytest.approx(len(batches))
    if ranks > 1:
        return
    assert found.places == pytest.approx(places / len(batches))
    squares = [
        batch["cu_seq_lens_q"].diff().double().square().sum()
        if config.packing
        else torch.tensor(batch["input_ids"].shape[1] ** 2.0 * len(batch["input_ids"]))
        for batch in batches
    ]
    assert found.row == pytest.approx(float(sum(squares)) / places)


def test_a_sample_predicts_what_the_whole_does():
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(4.5, 0.8, 20_000), 2, CONTEXT).astype(int)
    config = RunConfig(context_length=CONTEXT, batch_size=4, packing=True)
    sample = sampled(lengths)
    assert len(sample.lengths) == SAMPLE and not sample.is_whole
    dataset, plan = tokens_of(lengths), plan_batches(config, 1)
    whole = step_sampler(dataset, plan.per_step, plan.unit, seed=42)
    found = batches_of(sample, config, 1)
    assert found.steps == pytest.approx(whole.total_steps, rel=0.03)
    assert found.tokens == pytest.approx(lengths.sum() / whole.total_steps, rel=0.03)


def test_a_sample_smaller_than_a_step_still_fills_it():
    config = RunConfig(context_length=CONTEXT, batch_size=8, global_batch_size=4096)
    found = batches_of(sampled(DISTRIBUTIONS["short"], total=100_000), config, 1)
    assert found.steps == -(-100_000 // 4096)
    assert found.tokens == pytest.approx(4096 * DISTRIBUTIONS["short"].mean(), rel=0.05)


def test_full_rows_are_estimated_as_they_were_without_the_data():
    config = RunConfig(context_length=CONTEXT, batch_size=4, sharding_strategy="ddp")
    shape = shape_from_params("7B")
    known = estimate(shape, machine(), config, sampled(DISTRIBUTIONS["full"]))
    assert known.step.total == pytest.approx(estimate(shape, machine(), config).step.total)
    assert known.step.tokens_per_gpu == 8 * CONTEXT


def test_memory_is_that_of_the_longest_rows_of_the_run_and_not_of_the_mean_nor_of_longer_ones():
    config, shape = RunConfig(context_length=4 * CONTEXT, batch_size=4), shape_from_params("7B")
    rows = row_lengths(DISTRIBUTIONS["two_kinds"], 4 * CONTEXT, 89, seed=42)
    known = estimate(shape, machine(), config, rows)
    assert known.memory == estimate(shape, machine(), replace(config, context_length=512)).memory
    assert known.memory.total < estimate(shape, machine(), config).memory.total
    packed = replace(config, packing=True)
    full = estimate(shape, machine(), packed)
    assert estimate(shape, machine(), packed, rows).memory == full.memory
    stream = row_lengths(DISTRIBUTIONS["two_kinds"], 4 * CONTEXT, None, seed=42)
    assert stream.longest == 4 * CONTEXT


@pytest.mark.parametrize("held_out", [None, "full"])
def test_the_longest_row_of_an_estimate_is_the_one_that_a_run_plans_for(held_out):
    config, short = RunConfig(context_length=CONTEXT), tokens_of(DISTRIBUTIONS["short"])
    evaluated = held_out and tokens_of(DISTRIBUTIONS[held_out])
    known = row_lengths(
        short.lengths, CONTEXT, len(short), 42, others=[evaluated.lengths] if held_out else []
    )
    assert known.longest == longest_row(config, short, evaluated) == (512 if held_out else 64)


def test_packing_is_proposed_where_padding_wastes_more_than_a_third():
    config = RunConfig(context_length=CONTEXT, batch_size=8)
    line = packing_line(sampled(DISTRIBUTIONS["log_normal"]), config, 1, on_gpu=True)
    share = batches_of(sampled(DISTRIBUTIONS["log_normal"]), config, 1).share
    assert line.startswith(
        f"{1 - share:.0%} of the places are padding; --packing true would be about"
    )
    assert not packing_line(sampled(DISTRIBUTIONS["full"]), config, 1, on_gpu=True)
    assert not packing_line(
        sampled(DISTRIBUTIONS["log_normal"]), RunConfig(packing=True), 1, on_gpu=True
    )
    assert not packing_line(sampled(DISTRIBUTIONS["log_normal"]), config, 1, on_gpu=False)


def test_packing_is_proposed_where_micro_batches_leave_a_gpu_idle():
    config = RunConfig(context_length=CONTEXT, batch_size=1, global_batch_size=32)
    rows, held = sampled(np.full(64, 120)), "a micro-batch holds about 120 tokens"
    line = packing_line(rows, config, 1, on_gpu=True)
    assert line == f"{held}; --packing true would fill it with 480, which is faster"
    assert packing_line(rows, config, 1, on_gpu=False) == ""
    # no row to add; enough tokens
    assert packing_line(rows, replace(config, global_batch_size=1), 1, on_gpu=True) == ""
    assert packing_line(rows, replace(config, batch_size=16), 1, on_gpu=True) == ""
    assert packing_line(sampled(DISTRIBUTIONS["full"]), config, 1, on_gpu=True) == ""


def test_an_estimate_proposes_packing_for_a_gpu_and_not_for_a_cpu():
    """As the run does that a dry run stands for: there masks that keep rows apart cost what padding does."""
    rows, shape = sampled(DISTRIBUTIONS["log_normal"]), shape_from_params("7B")
    config = RunConfig(context_length=CONTEXT, batch_size=8)
    said = {
        here.is_cpu: report(estimate(shape, here, config, rows), rows=rows)
        for here in (machine(), cpu_machine(1))
    }
    assert "--packing true would be about" in said[False]
    assert "--packing true" not in said[True]


def test_a_plan_packs_short_rows_and_not_full_ones_nor_against_the_user():
    config = RunConfig(context_length=CONTEXT, batch_size=-1, global_batch_size=32)
    shape = shape_from_params("7B")

    def chosen(name: str, given=frozenset()) -> RunConfig:
        rows = sampled(DISTRIBUTIONS[name])
        free = free_settings(config, set(given), everything=True, rows=rows)
        return propose(shape, machine(), config, free, rows).choice.config

    packed = chosen("log_normal")
    assert packed.packing and packed.global_batch_size == 32
    assert not chosen("full").packing
    assert not chosen("log_normal", {"packing"}).packing
    assert "packing" not in free_settings(config, set(), everything=True)


def test_auto_packs_only_where_a_step_keeps_its_rows_or_has_any():
    rows, auto = sampled(DISTRIBUTIONS["log_normal"]), dict(sharding_strategy="auto")
    for settings in (auto, auto | dict(batch_size=4), dict(batch_size=-1, global_batch_size=32)):
        assert "packing" not in free_settings(RunConfig(**settings), set(), rows=rows)
    for settings in (dict(global_batch_size=32), {}):
        config = RunConfig(**auto, batch_size=-1, context_length=CONTEXT, **settings)
        assert "packing" not in free_settings(config, {"packing"}, rows=rows)
        assert "packing" not in free_settings(config, set(), rows=replace(rows, can_pack=False))
        free = free_settings(config, set(), rows=rows)
        found = propose(shape_from_params("7B"), machine(), config, free, rows).choice
        assert "packing" in free and found.config.packing
        assert found.config.global_batch_size == config.global_batch_size
        assert found.config.has_full_bins is not bool(settings)
        shown = plan_report(propose(shape_from_params("7B"), machine(), config, free, rows))
        tried = shown.split("that fit\n")[1].split("\n\n")[0]
        assert "packed" in tried.splitlines()[0]


@pytest.mark.parametrize("model", [["--model_name", "llama-2-7b"], ["--params", "7B"]])
def test_estimate_without_a_tokenizer_says_that_rows_are_taken_as_full(capsys, tmp_path, model):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a b"}))
    ask = ["estimate", *model, "--gpu", "h100", "--json"]
    assert main(ask) == 0
    before = json.loads(capsys.readouterr().out)
    assert main([*ask, "--dataset", str(tmp_path / "rows.jsonl")]) == 0
    out, err = capsys.readouterr()
    after = json.loads(out)
    assert "assuming full rows: " in err and err.count("\n") == 1
    assert "data" not in after and after["step_seconds"] == before["step_seconds"]


@pytest.mark.parametrize("held_out", [False, True])
def test_a_sample_of_a_large_data_set_knows_its_longest_row(tmp_path, held_out):
    texts = ["word " * 5] * (2 * SAMPLE)
    texts[-1] = "word " * 60
    files = {"rows": texts, "others": ["word " * 5] * 10 + ["word " * 100]}
    for name, rows in files.items():
        lines = (json.dumps({"text": text.strip()}) for text in rows)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    settings = dict(eval_dataset=str(tmp_path / "others.jsonl")) if held_out else {}
    config = RunConfig(
        model_name=save_chat_model(tmp_path / "model"),
        dataset=str(tmp_path / "rows.jsonl"),
        context_length=CONTEXT,
        train_on="all",
        seed=2,
        **settings,
    )
    found, why = sampled_lengths(config)
    data = read_data(config, run_tokenizer(config))
    assert not why and max(found.lengths) < 64, "the sample itself lacks the long row"
    assert found.longest == longest_row(config, data.rows, data.held_out)
    assert found.longest == lengths_of(config, data).longest == (512 if held_out else 320)


def test_hours_of_a_number_of_examples_are_those_of_rows_like_the_datas():
    rows = sampled(DISTRIBUTIONS["log_normal"])
    found = estimate(shape_from_params("7B"), machine(), RunConfig(context_length=CONTEXT), rows)
    whole = found.run_of_data(rows)
    assert found.run(rows.num_rows, rows).hours == pytest.approx(whole.hours)
    cost = found.run(10 * rows.num_rows, rows)
    assert cost.hours == pytest.approx(10 * whole.hours)
    text = report(found, cost, 10 * rows.num_rows, rows)
    assert f"1,500 rows x {rows.mean_length:,.0f} tokens = " in text


def test_the_record_of_a_runs_start_expects_the_rows_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "gpu_of", lambda device: find_gpu("h100"))
    config = RunConfig(
        model_name=save_chat_model(tmp_path, max_position_embeddings=CONTEXT),
        context_length=CONTEXT,
        sharding_strategy="ddp",
    )
    model, _ = planned_model(config, torch.device("cpu"))
    rows, shape = sampled(DISTRIBUTIONS["log_normal"]), model_shape(config.model_name)
    known = throughput.predicted(config, draft_plan(config, 1), model, torch.device("cpu"), rows)
    wanted = estimate(shape, machine(), config, rows).step
    assert known["seconds_per_step"] == pytest.approx(wanted.total)
    assert known["tokens_per_second"] == pytest.approx(wanted.tokens_per_second_per_gpu)
    full = throughput.predicted(config, draft_plan(config, 1), model, torch.device("cpu"))
    assert full["tokens_per_second"] > known["tokens_per_second"]


def test_an_estimate_counts_the_bins_of_a_step_as_the_run_does():
    """In the answer, in its time, in the plan and whatever micro-batch is tried."""
    shape, config = model_shape("llama-3.1-8b"), RunConfig(packing=True, context_length=CONTEXT)
    rows = sampled(DISTRIBUTIONS["short"])  # 40 tokens: 32 rows are 2.5 bins
    found = estimate(shape, machine(), config, rows)
    assert found.plan.batch.accumulation == round(32 * rows.mean_length / CONTEXT) < 8
    assert found.batches.accumulation == pytest.approx(found.plan.batch.accumulation)
    assert found.config.gradient_accumulation_steps == found.plan.batch.accumulation
    assert estimate(shape, machine(), config).plan.batch.accumulation == 8
    free = free_settings(config, {"packing"}, everything=True, rows=rows)
    plan = propose(shape, machine(), config, free, rows)
    for choice in plan.fitting:
        bins = choice.plan.batch.per_step
        assert bins - choice.config.batch_size < round(32 * rows.mean_length / CONTEXT) <= bins
    assert "gradient_accumulation_steps" not in plan.changes


def test_packing_is_proposed_whatever_mixers_run_on(tmp_path, install):
    for family in ("Granite 4 H", "Qwen3.5", "Qwen3"):
        family_config(family).save_pretrained(tmp_path / family)
        for installed in (set(), {"mamba_ssm", "causal_conv1d"}):
            install(installed)
            assert can_pack(RunConfig(model_name=str(tmp_path / family)))
