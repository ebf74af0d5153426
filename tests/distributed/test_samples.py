"""Answers of a sharded model in training are those of transformers' own generate."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.observe.samples import _prompt_of
from tests.distributed.test_command_line import call
from tests.ranks import run_ranks
from tests.tiny import RANK, SEED, save_tiny
from tests.tokenizers import save_chat_model

PROMPTS = [[5, 9, 12], [7], [30, 31, 32, 33, 34, 35, 36], [80, 2]]
NEW = 12


def answers_of(folder: str, cases: list[dict], stop: int) -> list[list[list[int]]]:
    """For each case, the answers before and after a training step in between."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.observe.samples import _greedy_answers

    device, found = torch.device("cpu"), []
    for case in cases:
        config = RunConfig(
            **dict(model_name=folder, precision="fp32", lora_rank=RANK, lora_dropout=0.5, seed=SEED)
            | case
        )
        model = build_model(config, device)
        found.append(
            _greedy_answers(
                model, PROMPTS, device, max_new_tokens=NEW, stops=[stop], packing=config.packing
            )
        )
        assert model.training
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def generated(folder) -> list[list[int]]:
    """What transformers generates, prompt by prompt, with its cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [
        model.generate(
            torch.tensor([ids]),
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(ids) :].tolist()
        for ids in PROMPTS
    ]


@pytest.mark.parametrize("world_size", [1, 3])
def test_they_are_those_of_generate_on_any_number_of_ranks(folder, generated, world_size):
    cases = [
        dict(train_type=kind, sharding_strategy=strategy)
        for kind, strategy in (
            ("lora", "full_shard"),
            ("full", "full_shard"),
            ("lora", "shard_grad_op"),
            ("lora", "ddp"),
        )
    ]
    cases += [dict(train_type="lora", packing=True), dict(train_type="lora", use_cpu_offload=True)]
    stop = generated[2][5]
    expected = [ids[: ids.index(stop)] if stop in ids else ids for ids in generated]
    assert len(expected[2]) <= 5 and max(map(len, expected)) == NEW
    for by_case in run_ranks(answers_of, world_size, folder, cases, stop):
        for case, answers in zip(cases, by_case, strict=True):
            assert answers == expected, case


def test_a_prompt_is_what_stands_before_the_first_answer():
    ids, ignored = torch.tensor([1, 2, 3, 4, 5, 6]), -100
    prompt = _prompt_of(ids, torch.tensor([ignored, ignored, 3, 4, ignored, 6]))
    assert (prompt.ids, prompt.reference) == ([1, 2], [3, 4])
    assert _prompt_of(ids, torch.tensor([ignored, 2, 3, 4, 5, 6])) is None  # all of it is trained
    assert _prompt_of(ids, torch.full((6,), ignored)) is None


def short_rows(folder: str) -> list[list[int]]:
    """Answers of a model of 8 positions, which has no embedding for a ninth."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.observe.samples import _greedy_answers

    device = torch.device("cpu")
    model = build_model(RunConfig(model_name=folder, precision="fp32", lora_rank=RANK), device)
    return _greedy_answers(model, PROMPTS, device, max_new_tokens=NEW, stops=[], positions=8)


def test_answers_end_at_the_models_positions(tmp_path):
    settings = GPT2Config(
        vocab_size=97, n_positions=8, n_embd=64, n_layer=1, n_head=2, eos_token_id=0
    )
    AutoModelForCausalLM.from_config(settings).save_pretrained(tmp_path)
    for answers in run_ranks(short_rows, 2, str(tmp_path)):
        assert [len(ids) for ids in answers] == [8 - len(ids) for ids in PROMPTS]


def test_a_prompt_beyond_the_models_positions_is_refused_before_anything_is_read(run, capsys):
    base, argv = run
    (base / "prompts.txt").write_text("short\n" + "x" * 120)
    flags = ["--sample_prompts", str(base / "prompts.txt"), "--output_dir", str(base / "none")]
    assert main([*argv, *flags]) == 2
    says = "a prompt of 139 tokens leaves no room for an answer in the model's 128 positions"
    assert says in capsys.readouterr().err
    assert not (base / "none").exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on two ranks that is to learn one answer, with samples of two held-out rows."""
    base = tmp_path_factory.mktemp("base")
    save_chat_model(base / "model")
    (base / "rows.jsonl").write_text(
        (json.dumps(dict(prompt="say it", completion="yes yes")) + "\n") * 40
    )
    (base / "held.jsonl").write_text(
        "".join(
            json.dumps(dict(prompt=text, completion="yes yes")) + "\n"
            for text in ("say it", "now?")
        )
    )
    return base, [
        "train",
        "--model_name",
        str(base / "model"),
        "--dataset",
        str(base / "rows.jsonl"),
        "--device",
        "cpu",
        "--precision",
        "fp32",
        "--compile",
        "false",
        "--log_to",
        "stdout",
        "--output_dir",
        str(base / "out"),
    ]


def samples_of(out) -> dict[int, list[dict]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: r["samples"] for r in lines if r["kind"] == "samples"}


def test_a_run_answers_before_it_trains_and_at_each_evaluation_and_learns_to(run):
    base, argv = run
    flags = dict(
        eval_dataset=base / "held.jsonl",
        eval_every=10,
        samples=2,
        lr=0.005,
        sample_tokens=8,
        num_epochs=2,
        global_batch_size=4,
    )
    asked = [*argv, *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]
    ((code, said, error),), _ = run_ranks(call, 2, [asked], grouped=False)
    assert code == 0, error
    found = samples_of(base / "out")
    assert list(found) == [0, 10, 20]
    assert [s["reference"] for s in found[20]] == ["yes yes"] * 2
    assert "say it" in found[0][0]["prompt"]
    assert "yes" not in found[0][0]["answer"] and "yes" in found[20][0]["answer"]
    assert "step 20  answers 'yes" in said


def test_prompts_of_a_file_need_no_held_out_rows(run, tmp_path, monkeypatch):
    base, argv = run
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "prompts.txt").write_text("say it\n\nand now?\n")
    assert (
        main(
            [
                *argv,
                "--world_size",
                "1",
                "--sample_prompts",
                str(tmp_path / "prompts.txt"),
                "--max_steps",
                "2",
                "--sample_tokens",
                "3",
                "--output_dir",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    found = samples_of(tmp_path / "out")
    assert list(found) == [0, 2] and [s["reference"] for s in found[2]] == ["", ""]
    assert "and now?" in found[0][1]["prompt"]


def test_missing_prompts_are_named_before_the_model_is_loaded(run, tmp_path, capsys, monkeypatch):
    base, argv = run
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "empty").write_text("\n \n")
    for flags, said in (
        (["--samples", "2"], "--eval_dataset"),
        (["--samples", "2", "--eval_share", "0.1", "--train_on", "all"], "--sample_prompts FILE"),
        (["--sample_prompts", "absent.txt"], "absent.txt: No such file"),
        (["--sample_prompts", str(tmp_path / "empty")], "it is empty"),
    ):
        assert (
            main([*argv, "--world_size", "1", "--output_dir", str(tmp_path / "out"), *flags]) == 2
        )
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert line.startswith("error: --sample") and said in line, line
    assert not (tmp_path / "out").exists()
