"""Held-out loss on real ranks is that of plain transformers, and training does not notice it."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.parts import in_parts, slow
from tests.ranks import run_ranks
from tests.tiny import (
    CLIP,
    LR,
    RANK,
    SEED,
    padded_batch,
    reference_model,
    save_tiny,
    tiny_rows,
)
from tests.tokenizers import VOCAB_SIZE, save_tokenizer

(HELD_OUT,) = tiny_rows(steps=1, rows_per_step=7, seed=11)
STEPS = tiny_rows(steps=4, rows_per_step=4)


def dataset_of(rows):
    """Rows (input_ids, labels) as a TokenizedDataset."""
    import numpy as np

    from fsdp_qlora.data import DataReport, TokenizedDataset

    return TokenizedDataset(
        np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in rows]),
        np.concatenate([np.array(labels) != -100 for _, labels in rows]),
        np.cumsum([0] + [len(ids) for ids, _ in rows]),
        DataReport(context_length=64),
    )


def evaluate_cases(folder: str, cases: list[dict]) -> list[dict]:
    """For each case: losses of training steps, with the held-out loss before and between if asked."""
    import torch.distributed as dist

    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.observe.evaluate import held_out_loss
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    results, device = [], torch.device("cpu")
    for case in cases:
        case = dict(case)
        evaluates, rows, batch_size = (
            case.pop("evaluates", True),
            case.pop("rows", HELD_OUT),
            case.pop("batch_size", 2),
        )
        config = RunConfig(
            **dict(
                model_name=folder,
                precision="fp32",
                lora_rank=RANK,
                lora_alpha=8,
                lora_dropout=0.0,
                seed=SEED,
            )
            | case
        )
        model, held_out = build_model(config, device), []
        optimizer = build_optimizer(model, "adamw", LR)

        def evaluate(model=model, held_out=held_out, config=config, rows=rows, batch=batch_size):
            held_out.append(
                held_out_loss(
                    model, dataset_of(rows), device, batch_size=batch, packing=config.packing
                )
            )

        losses = []
        torch.manual_seed(dist.get_rank())
        for step in STEPS:
            if evaluates:
                evaluate()
            mine = step[dist.get_rank() :: dist.get_world_size()]
            losses.append(
                train_step(
                    model, optimizer, [padded_batch([row]) for row in mine], max_grad_norm=CLIP
                ).loss
            )
        if evaluates:
            evaluate()
        results.append(
            dict(
                losses=losses,
                held_out=held_out,
                training=model.training,
                grads=[n for n, p in model.named_parameters() if p.grad is not None],
            )
        )
    return results


def reference_loss(model, rows) -> float:
    """Loss per trained token, row by row, by transformers."""
    losses, tokens = 0.0, 0
    with torch.no_grad():
        for row in rows:
            batch = padded_batch([row])
            count = int((batch["labels"][:, 1:] != -100).sum())
            losses += model(**batch).loss.item() * count
            tokens += count
    return losses / tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


EVALUATED = [
    *(
        dict(sharding_strategy=strategy, train_type=kind)
        for strategy in ("ddp", "shard_grad_op", "full_shard")
        for kind in ("full", "qlora")
    ),
    dict(train_type="lora", batch_size=1),
    dict(train_type="lora", batch_size=5),
    dict(train_type="lora", packing=True),
    dict(train_type="lora", use_cpu_offload=True),
    dict(train_type="lora", lora_dropout=0.5),
]


@pytest.mark.parametrize("cases", in_parts(EVALUATED, 5, 8, then=(0, 7, 10)))
def test_the_held_out_loss_is_that_of_one_process_for_every_strategy_and_batch(folder, cases):
    by_rank = run_ranks(evaluate_cases, 2, folder, cases)
    trained = sum(label != -100 for _, labels in HELD_OUT for label in labels[1:])
    expected = {
        kind: reference_loss(reference_model(folder, kind), HELD_OUT)
        for kind in ("full", "lora", "qlora")
    }
    for case, *results in zip(cases, *by_rank, strict=True):
        assert results[0]["held_out"] == results[1]["held_out"], case
        loss, tokens = results[0]["held_out"][0]
        assert tokens == trained, case
        assert loss == pytest.approx(expected[case["train_type"]], rel=1e-5), case
        assert len({loss for loss, _ in results[0]["held_out"]}) == 5  # it follows the training
        assert results[0]["training"] and not results[0]["grads"], case


@pytest.mark.parametrize("strategy", [slow("shard_grad_op"), "full_shard"])
def test_evaluation_does_not_change_the_training(folder, strategy):
    settings = [
        dict(sharding_strategy=strategy, train_type=kind, lora_dropout=0.5)
        for kind in ("full", "lora")
    ]
    cases = [case | dict(evaluates=evaluates) for case in settings for evaluates in (True, False)]
    (results, _) = run_ranks(evaluate_cases, 2, folder, cases)
    for with_evaluation, without in zip(results[::2], results[1::2], strict=True):
        assert with_evaluation["losses"] == without["losses"]


def test_ranks_without_a_held_out_row_join_in(folder):
    cases = [dict(train_type="lora", rows=HELD_OUT[:1]), dict(train_type="lora", rows=HELD_OUT[:2])]
    by_rank = run_ranks(evaluate_cases, 4, folder, cases)
    for count, *results in zip((1, 2), *by_rank, strict=True):
        expected = reference_loss(reference_model(folder, "lora"), HELD_OUT[:count])
        for result in results:
            assert result["held_out"][0][0] == pytest.approx(expected, rel=1e-5)


# ---- a whole run -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_tiny(folder, vocab_size=VOCAB_SIZE)
    save_tokenizer(folder)
    for name, numbers in (("rows", range(23)), ("heldout", range(23, 28))):
        # What is held out has answers of other characters, so that training makes them less likely.
        (folder / f"{name}.jsonl").write_text(
            "".join(
                json.dumps(
                    dict(
                        prompt=f"{i} plus {i}?",
                        completion=str(2 * i) if name == "rows" else "never that",
                    )
                )
                + "\n"
                for i in numbers
            )
        )
    return folder


def command(argvs: list[list[str]]) -> list[int]:
    from fsdp_qlora.cli import main

    return [main(argv) for argv in argvs]


def records(folder, kind: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_a_run_keeps_the_adapter_with_the_lowest_held_out_loss(chat_folder, tmp_path):
    argv = [
        "train",
        "--model_name",
        str(chat_folder),
        "--dataset",
        str(chat_folder / "rows.jsonl"),
        "--eval_dataset",
        str(chat_folder / "heldout.jsonl"),
        "--eval_every",
        "2",
        "--train_type",
        "lora",
        "--precision",
        "fp32",
        "--lora_rank",
        "4",
        "--global_batch_size",
        "4",
        "--num_epochs",
        "2",
        "--lr",
        "0.01",
        "--defaults",
        "classic",
        "--device",
        "cpu",
        "--output_dir",
        str(tmp_path),
    ]
    early = ["--lr", "0", "--early_stopping_patience", "2", "--output_dir", str(tmp_path / "early")]
    assert run_ranks(command, 2, [argv, [*argv, *early]], grouped=False) == [[0, 0], [0, 0]]
    # A loss that never changes is lowest at the first evaluation.
    assert [e["step"] for e in records(tmp_path / "early", "eval")] == [2, 4, 6]
    assert [s["step"] for s in records(tmp_path / "early", "step")][-1] == 6
    assert (tmp_path / "early" / "adapter").is_dir() and records(tmp_path / "early", "end")
    evaluations = records(tmp_path, "eval")
    assert [e["step"] for e in evaluations] == [2, 4, 6, 8, 10, 12]
    lowest = min(evaluations, key=lambda e: e["eval_loss"])
    assert [e for e in evaluations if e["is_best"]][-1] == lowest
    assert lowest is not evaluations[-1]
    for name, recorded in (("adapter-best", lowest), ("adapter", evaluations[-1])):
        base = AutoModelForCausalLM.from_pretrained(chat_folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(tmp_path / name)).eval()
        rows = tokenized_by_hand(chat_folder)
        assert reference_loss(model, rows) == pytest.approx(recorded["eval_loss"], rel=1e-5), name
        assert accuracy(model, rows) == pytest.approx(recorded["token_accuracy"]), name
    assert not list(tmp_path.glob("*.partial"))


def accuracy(model, rows) -> float:
    """Share of the trained tokens of rows that plain logits predict."""
    right = []
    for ids, labels in rows:
        found = model(input_ids=torch.tensor([ids])).logits[0, :-1].argmax(-1)
        wanted = torch.tensor(labels[1:])
        right += (found == wanted)[wanted != -100].tolist()
    return sum(right) / len(right)


def tokenized_by_hand(folder) -> list[tuple[list, list]]:
    """The held-out rows through the tokenizer's own template; the answer and its end are trained."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for line in (folder / "heldout.jsonl").read_text().splitlines():
        record = json.loads(line)
        asked = [dict(role="user", content=record["prompt"])]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        answer = tokenizer(record["completion"] + "<|im_end|>")["input_ids"]
        prompt, end = tokenizer(prompt)["input_ids"], tokenizer("\n")["input_ids"]
        rows.append((prompt + answer + end, [-100] * len(prompt) + answer + [-100] * len(end)))
    return rows


@pytest.mark.slow
def test_a_streamed_run_trains_the_same_on_any_number_of_ranks_packed_or_not(chat_folder, tmp_path):
    base = [
        "train",
        "--model_name",
        str(chat_folder),
        "--dataset",
        str(chat_folder / "rows.jsonl"),
        "--precision",
        "fp32",
        "--lora_rank",
        "4",
        "--lora_dropout",
        "0",
        "--global_batch_size",
        "4",
        "--device",
        "cpu",
        "--stream",
        "--shuffle_buffer",
        "5",
    ]
    broken = chat_folder / "broken.jsonl"
    lines = (chat_folder / "rows.jsonl").read_text().splitlines()
    # Beyond the rows that are looked at before ranks meet.
    broken.write_text("\n".join(lines * 50 + ['{"prompt": "a"'] + lines))
    for world_size in (1, 3):
        argvs = [
            base + ["--output_dir", str(tmp_path / str(world_size))],
            base + ["--output_dir", str(tmp_path / f"{world_size} packed"), "--packing"],
            base
            + [
                "--output_dir",
                str(tmp_path / "broken"),
                "--dataset",
                str(broken),
                "--global_batch_size",
                "400",
                "--batch_size",
                "400",
            ],
        ]
        codes = run_ranks(command, world_size, argvs, grouped=False)
        assert codes == [[0, 0, 2]] * world_size
    alone, *others = (
        records(tmp_path / name, "step") for name in ("1", "3", "1 packed", "3 packed")
    )
    for run in others:
        assert len(alone) == len(run) == 6  # 23 rows in steps of 4
        for one, other in zip(alone, run, strict=True):
            assert one["trained_tokens"] == other["trained_tokens"]
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
