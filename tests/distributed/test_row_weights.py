"""Rows with weights train as the weighted mean of plain transformers' losses, row by row.

The reference is one process of transformers and PEFT in fp32: each row by itself, its summed loss times
its weight, over the sum of the weights of all trained tokens of the step.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.distributed.test_full_bins import settings
from tests.distributed.test_parity import relative
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import CLIP, LR, reference_model
from tests.tokenizers import save_chat_model

WEIGHTS = (1, 0.25, 3, 0, 1.5)
PACKED = dict(packing=True, gradient_accumulation_steps=2, num_epochs=1)
PADDED = dict(global_batch_size=9, batch_size=2, eval_share=0.2, num_epochs=1)
CASES = {
    "full bins": PACKED,
    "padded, cached": dict(PADDED, data_cache="cache"),
    "streamed": dict(PACKED, stream=True, shuffle_buffer=16),
    "streamed, padded": dict(PADDED, stream=True, shuffle_buffer=16, eval_share=0.0),
}
SHARED = {
    "packed, shared by ranks": dict(PACKED, sequence_parallel=2, batch_size=4),
    "padded, shared by ranks": dict(PADDED, sequence_parallel=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def texts() -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefgh ", k=draw.randint(2, 35))) for _ in range(41)]


def write(path: Path, weights) -> str:
    """Rows of unequal length; every fifth has the same weight."""
    rows = [
        dict(text=text, quality=weights[number % len(weights)])
        for number, text in enumerate(texts())
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train_each(folder: str, data: str, out: str, cases: dict[str, dict]) -> dict[str, dict]:
    """For each case: losses, norms and tokens of its steps, and its held-out loss."""
    import torch.distributed as dist

    from fsdp_qlora.preflight.run_data import load_data, run_tokenizer
    from fsdp_qlora.training import trainer
    from tests.watched_steps import watch_steps

    trainer.plot_loss = lambda *_: False
    seen, results = [], {}

    watch_steps(lambda step: seen.append((step.row_ids, len(step.micro_batches))))
    for name, case in cases.items():
        seen.clear()
        config = settings(folder, data, Path(out, name), dist.get_world_size(), case)
        if config.data_cache:
            config = replace(config, data_cache=str(Path(out, "cache")))
        tokenizer = run_tokenizer(config)
        rows = load_data(config, tokenizer)
        held_out = [] if rows.held_out is None else [row.tolist() for row, _ in rows.held_out]
        weights = None if rows.held_out is None else rows.held_out.weights
        of_rows = []
        if not config.stream:
            of_rows = [rows.rows[row][0].tolist() for row in range(len(rows.rows))]
        steps = trainer.train(config, rows.train, torch.device("cpu"), tokenizer, rows.held_out)
        lines = Path(out, name, "metrics.jsonl").read_text().splitlines()
        results[name] = dict(
            losses=[step.loss for step in steps],
            norms=[step.grad_norm for step in steps],
            trained=[step.trained_tokens for step in steps],
            steps=seen[: len(steps)],
            rows=of_rows,
            held_out=held_out,
            weights=weights,
            eval_loss=[r["eval_loss"] for r in map(json.loads, lines) if r["kind"] == "eval"],
        )
        dist.barrier()
    return results


def tokens_of(folder: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts()]


def row_loss(model, ids: list[int]) -> torch.Tensor:
    """The summed loss of a row."""
    row = torch.tensor([ids])
    logits = model(input_ids=row).logits[0, :-1].float()
    return cross_entropy(logits, row[0, 1:], reduction="sum")


def weighted_loss(model, rows: list[list[int]], weights: list[float]) -> torch.Tensor:
    """Sum of weighted losses over the sum of the weights of all trained tokens."""
    total = sum(w * (len(ids) - 1) for ids, w in zip(rows, weights, strict=True))
    losses = (w * row_loss(model, ids) for ids, w in zip(rows, weights, strict=True))
    return sum(losses) / total


def reference(folder: str, steps: list[list[list[int]]], weight_of) -> dict:
    model = reference_model(folder, "lora")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, LR, weight_decay=0.1)
    losses, norms = [], []
    for rows in steps:
        loss = weighted_loss(model, rows, [weight_of[tuple(ids)] for ids in rows])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return dict(losses=losses, norms=norms, model=model)


def check(folder: str, found: dict[str, dict]):
    """Losses, norms and held-out losses of each case against one process of plain transformers."""
    tokens = tokens_of(folder)
    weight_of = {tuple(ids): WEIGHTS[number % len(WEIGHTS)] for number, ids in enumerate(tokens)}
    micro_batches = [number for case in found.values() for _, number in case["steps"]]
    assert max(micro_batches) > 1  # in four ranks not in each case
    for name, case in found.items():
        rows = [
            [
                case["rows"][row] if case["rows"] else tokens[int(row.rpartition(":")[2]) - 1]
                for row in ids
            ]
            for ids, _ in case["steps"]
        ]
        used = [tuple(ids) for step in rows for ids in step] + [tuple(r) for r in case["held_out"]]
        assert sorted(used) == sorted(ids for ids, weight in weight_of.items() if weight), name
        expected = reference(folder, rows, weight_of)
        assert relative(case["losses"], expected["losses"]) < 1e-5, name
        assert relative(case["norms"], expected["norms"]) < 1e-4, name
        assert case["trained"] == [sum(len(ids) - 1 for ids in step) for step in rows], name
        if case["held_out"]:
            weights = [weight_of[tuple(ids)] for ids in case["held_out"]]
            with torch.no_grad():
                loss = weighted_loss(expected["model"], case["held_out"], weights)
            assert case["eval_loss"][-1] == pytest.approx(loss.item(), rel=1e-5), name
            assert case["weights"].tolist() == weights and len(set(weights)) > 1, name


@pytest.mark.parametrize("world", [1, 2, rest(4)])
def test_a_row_counts_by_its_weight_as_in_one_process_row_by_row(folder, tmp_path, world):
    """Packed, padded and streamed, over micro-batches and ranks; a row of weight 0 is in no step."""
    data = write(tmp_path / "rows.jsonl", WEIGHTS)
    cases = {name: dict(case, weight_column="quality") for name, case in CASES.items()}
    if world > 1:
        cases |= {name: dict(case, weight_column="quality") for name, case in SHARED.items()}
    found = run_ranks(train_each, world, folder, data, str(tmp_path), cases)
    for rank in found:
        for name in cases:
            assert rank[name]["losses"] == found[0][name]["losses"], name
    check(folder, found[0])


def test_equal_weights_of_any_size_change_no_bit(folder, tmp_path):
    """Of a stream too, which can't know that they are equal."""
    runs = {
        name: run_ranks(
            train_each,
            2,
            folder,
            write(tmp_path / f"{name}.jsonl", weights),
            str(tmp_path / name),
            {case: CASES[case] | given for case in ("full bins", "streamed")},
        )[0]
        for name, weights, given in (
            ("without", (1, 3), {}),
            ("ones", (1,), dict(weight_column="quality")),
            ("threes", (3,), dict(weight_column="quality")),
            ("tenths", ("0.1",), dict(weight_column="quality")),
        )
    }
    for case in ("full bins", "streamed"):
        expected = runs["without"][case]
        for name, run in runs.items():
            assert run[case]["losses"] == expected["losses"], (name, case)
            assert run[case]["norms"] == expected["norms"], (name, case)
