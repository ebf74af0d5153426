"""Rows in full bins, in bins of a fixed number of rows, and padded, train as one process does.

The reference is plain transformers and PEFT in fp32 on the union of the ranks' rows, each row padded.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.distributed.test_parity import relative
from tests.families import save_family
from tests.parts import rest, slow
from tests.ranks import run_ranks
from tests.tiny import CLIP, LR, RANK, SEED, reference_model, reference_run
from tests.tokenizers import VOCAB_SIZE, save_chat_model, save_tokenizer

BINS, ROWS, CONTEXT = 4, 9, 64  # of a step; tokens of a bin
CASES = dict(
    full=dict(packing=True),
    rows=dict(packing=True, global_batch_size=ROWS),
    padded=dict(global_batch_size=ROWS),
    streamed=dict(packing=True, stream=True, shuffle_buffer=16),
    uneven=dict(packing=True, bins_per_step=BINS - 1),  # than 2 ranks, or 4, can share
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Chats of 20 to 64 tokens, and one that is longer than a bin."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("data") / "rows.jsonl"
    texts = ["".join(draw.choices("abcdefgh ", k=draw.randint(2, 35))) for _ in range(60)]
    texts.append("long" * 40)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


class Killed(Exception):
    """Stands for whatever ends a run between two steps."""


def settings(folder: str, data: str, out: Path, world_size: int, case: dict):
    from fsdp_qlora.config import RunConfig

    return RunConfig(
        **dict(
            model_name=folder,
            dataset=data,
            train_on="all",
            context_length=CONTEXT,
            train_type="lora",
            precision="fp32",
            lora_rank=RANK,
            lora_alpha=8,
            lora_dropout=0.0,
            seed=SEED,
            lr=LR,
            wd=0.1,
            lr_scheduler="constant",
            apply_gradient_clipping=True,
            grad_norm=CLIP,
            num_epochs=2,
            batch_size=BINS // world_size,
            gradient_accumulation_steps=1,
            sharding_strategy="full_shard",
            checkpoint_every=2,
            output_dir=str(out),
            log_to="jsonl",
            device="cpu",
            save_model=False,
        )
        | case
    )


def train_each(
    folder: str, data: str, out: str, cases: dict[str, dict], stop_at: int | None = None
) -> dict[str, dict]:
    """For each case: losses, norms, and rows (as lines of the file) of each step."""
    import threading

    import torch
    import torch.distributed as dist

    from fsdp_qlora.data import open_source, tokenize_rows
    from fsdp_qlora.preflight.run_data import run_tokenizer
    from fsdp_qlora.training import trainer
    from tests.watched_steps import watch_steps

    trainer.plot_loss = lambda *_: False
    seen, results = [], {}

    def note(step):
        if len(seen) == stop_at:
            raise Killed
        lines = (
            row if isinstance(row, int) else int(row.rpartition(":")[2]) - 1 for row in step.row_ids
        )
        seen.append(list(lines))

    watch_steps(note)
    for name, case in cases.items():
        seen.clear()
        config = settings(folder, data, Path(out, name), dist.get_world_size(), case)
        tokenizer, source, steps = run_tokenizer(config), open_source(data), []
        first = tokenize_rows(source.rows(), tokenizer, context_length=CONTEXT, train_on="all")
        rows = source if config.stream else first
        try:
            steps = trainer.train(config, rows, torch.device("cpu"), tokenizer, first_rows=first)
        except Killed:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
        results[name] = dict(
            losses=[step.loss for step in steps],
            norms=[s.grad_norm for s in steps],
            rows=list(seen),
        )
        dist.barrier()
    return results


def reference(folder: str, data: str, steps: list[list[int]], train_type: str = "lora", **more):
    """Losses, norms and trained weights of one process on these rows of the file in these steps.

    train_type and more: as `reference_model` takes them.
    """
    return reference_run(
        reference_model(folder, train_type, **more), batches_of(folder, data, steps)
    )


def batches_of(folder: str, data: str, steps: list[list[int]]) -> list[list[tuple[list, list]]]:
    """The tokens and labels of these rows of the file in each step."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in Path(data).read_text().splitlines()]
    ids = [(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])[:CONTEXT] for text in texts]
    return [[(ids[row], ids[row]) for row in rows] for rows in steps]


@pytest.mark.parametrize("worlds", [(1, 2), slow((1, 4))])
def test_packed_and_padded_runs_have_the_loss_of_one_process_on_1_2_and_4_ranks(
    folder, data, tmp_path, worlds
):
    runs = {
        world: run_ranks(train_each, world, folder, data, str(tmp_path / str(world)), CASES)
        for world in worlds
    }
    for name in CASES:
        alone = runs[1][0][name]
        losses, norms, _ = reference(folder, data, alone["rows"])
        epochs = [row for rows in alone["rows"] for row in rows]
        assert len(epochs) == 2 * 61 and set(epochs[:61]) == set(epochs[61:]) == set(range(61)), (
            name
        )
        for world, ranks in runs.items():
            for rank in ranks:
                found = rank[name]
                assert found["rows"] == alone["rows"], (name, world)
                assert relative(found["losses"], losses) < 1e-5, (name, world)
                assert relative(found["norms"], norms) < 1e-4, (name, world)
    assert len(runs[1][0]["full"]["rows"]) < 2 * 61 / BINS  # several rows to a bin
    assert runs[1][0]["rows"]["rows"] == runs[1][0]["padded"]["rows"]


@pytest.mark.parametrize("world", [1, rest(2)])
def test_lengths_decide_the_bins_of_a_step_once_and_a_resume_keeps_them(
    folder, data, tmp_path, world
):
    """Also where the step that was saved is another, and for a stream, whose first rows decide."""
    left = dict(packing=True, context_length=128, gradient_accumulation_steps=-1, batch_size=1)
    asked = {name: left | dict(stream=name == "streamed") for name in ("full", "streamed")}
    given = {name: case | dict(gradient_accumulation_steps=1) for name, case in asked.items()}
    ids = [len(json.loads(line)["text"]) + 1 for line in Path(data).read_text().splitlines()]
    bins = round(32 * sum(min(n, CONTEXT) for n in ids) / len(ids) / 128)
    bins = -(-bins // world) * world
    assert bins > world
    (found, *_) = run_ranks(train_each, world, folder, data, str(tmp_path / "a"), asked)
    run_ranks(train_each, world, folder, data, str(tmp_path / "b"), given, 2)
    run_ranks(train_each, world, folder, data, str(tmp_path / "b"), asked)
    for name in asked:
        for out, expected in (("a", bins), ("b", world)):
            lines = (tmp_path / out / name / "metrics.jsonl").read_text().splitlines()
            starts = [r for r in map(json.loads, lines) if r["kind"] == "start"]
            assert {r["bins_per_step"] for r in starts} == {expected}, (name, out)


@pytest.mark.slow
def test_bins_go_on_where_a_run_was_stopped_also_on_ranks_that_share_them_unevenly(
    folder, data, tmp_path
):
    """By the same command, which on two, three and one rank alone would mean 4, 6 and 2 bins a step."""
    cases = {name: CASES[name] for name in ("full", "streamed")}
    (whole,) = run_ranks(train_each, 1, folder, data, str(tmp_path / "whole"), cases)
    each = dict(batch_size=1, gradient_accumulation_steps=BINS // 2)
    moved = {name: case | each for name, case in cases.items()}
    first = run_ranks(train_each, 2, folder, data, str(tmp_path / "moved"), moved, 5)
    second = run_ranks(train_each, 3, folder, data, str(tmp_path / "moved"), moved, 3)
    third = run_ranks(train_each, 1, folder, data, str(tmp_path / "moved"), moved)
    for name in cases:
        expected = whole[name]["rows"]
        for leg, part in ((first, expected[:5]), (second, expected[4:7]), (third, expected[6:])):
            for rank in leg:
                assert rank[name]["rows"] == part, name
        lines = (tmp_path / "moved" / name / "metrics.jsonl").read_text().splitlines()
        losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "step"]
        assert losses == pytest.approx(whole[name]["losses"], rel=1e-5)


def test_routers_are_balanced_over_the_rows_of_a_step_whatever_ranks_have_none(data, tmp_path):
    """Four rows on three ranks: two wait in a second micro-batch, which balances no router."""
    folder = save_family(tmp_path / "mixture", "Qwen3-MoE", vocab_size=VOCAB_SIZE)
    save_tokenizer(folder)
    common = dict(router_aux_loss_coef=0.5, batch_size=1, max_steps=3)
    cases = dict(
        padded=common | dict(global_batch_size=4),
        packed=common | dict(packing=True, bins_per_step=4),
        streamed=common | dict(global_batch_size=4, stream=True, shuffle_buffer=1),
    )
    (alone,) = run_ranks(train_each, 1, folder, data, str(tmp_path / "1"), cases)
    shared = run_ranks(train_each, 3, folder, data, str(tmp_path / "3"), cases)[0]
    for name in cases:
        assert shared[name]["losses"] == pytest.approx(alone[name]["losses"], rel=1e-5), name
        assert shared[name]["norms"] == pytest.approx(alone[name]["norms"], rel=1e-4), name

    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = reference_model(folder, "lora", targets=attention)

    def balance(batch):
        each = [
            model(input_ids=ids[mask > 0][None], output_router_logits=True).aux_loss
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        return 0.5 * sum(each) / len(each)

    losses, norms, _ = reference_run(
        model, batches_of(folder, data, shared["padded"]["rows"]), balance
    )
    assert relative(shared["padded"]["losses"], losses) < 1e-5
    assert relative(shared["padded"]["norms"], norms) < 1e-4
