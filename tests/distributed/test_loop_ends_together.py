"""Every rank takes the same steps, whatever the number of rows, and no step depends on the split.

The usual faults: ranks with unequal batch counts, one of which waits for ever at the end of an
epoch; a last batch that is dropped, so that few rows mean no step at all; and a mean of means, which
weighs a token by the batch it happens to be in.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch

from fsdp_qlora.data import Row
from fsdp_qlora.data.collate import IGNORE
from tests.distributed.test_parity import relative
from tests.parts import in_parts, slow
from tests.patience import patience
from tests.ranks import run_ranks
from tests.tiny import LR, RANK, SEED, padded_batch, save_tiny, tiny_rows
from tests.tokenizers import save_chat_model, save_tokenizer

EPOCHS, BATCH_SIZE = 2, 2
SECONDS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def name_of_row(number: int) -> str:
    """An answer of one character, so that a label tells which row it came from."""
    return chr(ord("A") + number)


def train_each(folder: str, out: str, cases: list[tuple[int, int]]) -> list[dict]:
    """For each (rows, accumulation): seconds, steps logged, and the rows of each step here."""
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import tokenize_rows
    from fsdp_qlora.loading.tokenizer import load_tokenizer
    from fsdp_qlora.training import loop, trainer

    tokenizer, results = load_tokenizer(folder), []
    trainer.plot_loss = lambda *_: False  # nobody looks at 34 pictures
    train_step = loop.train_step
    for num_rows, accumulation in cases:
        seen: list[list[int]] = []

        def watched(model, optimizer, micro_batches, seen=seen, **kwargs):
            seen.append(
                [
                    t
                    for batch in micro_batches
                    for t in batch["labels"].flatten().tolist()
                    if t > 2 and t != IGNORE
                ]
            )  # 0 to 2 end a turn or a text
            return train_step(model, optimizer, micro_batches, **kwargs)

        loop.train_step = watched
        rows = [
            Row(
                str(i),
                messages=[
                    dict(role="user", content="?" * i),
                    dict(role="assistant", content=name_of_row(i)),
                ],
            )
            for i in range(num_rows)
        ]
        config = RunConfig(
            model_name=folder,
            precision="fp32",
            lora_rank=2,
            num_epochs=EPOCHS,
            batch_size=BATCH_SIZE,
            gradient_accumulation_steps=accumulation,
            output_dir=out,
            save_model=False,
            log_to="jsonl",
        )
        started = time.monotonic()
        dataset = tokenize_rows(rows, tokenizer, context_length=64)
        steps = trainer.train(config, dataset, torch.device("cpu"), tokenizer)
        results.append(dict(seconds=time.monotonic() - started, steps=len(steps), seen=seen))
    loop.train_step = train_step
    return results


@pytest.mark.parametrize(
    "world_size, numbers", [(2, (1, 4, 5)), slow(2, range(1, 10)), slow(4, range(1, 18))]
)
def test_any_number_of_rows_is_used_once_per_epoch_in_equally_many_steps(
    folder, tmp_path, world_size, numbers
):
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    cases = [(n, ga) for n in numbers for ga in (1, 3)]
    by_rank = run_ranks(train_each, world_size, folder, str(tmp_path / "out"), cases)
    for (num_rows, accumulation), *ranks in zip(cases, *by_rank, strict=True):
        label = (num_rows, accumulation)
        per_epoch = -(-num_rows // (world_size * BATCH_SIZE * accumulation))
        assert {r["steps"] for r in ranks} == {EPOCHS * per_epoch}, label
        assert max(r["seconds"] for r in ranks) < patience(SECONDS), label
        once = Counter(tokenizer.convert_tokens_to_ids(name_of_row(i)) for i in range(num_rows))
        for epoch in range(EPOCHS):
            part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
            used = Counter(t for r in ranks for step in r["seen"][part] for t in step)
            assert used == once, label


def prepare_and_train(argv: list[str]) -> tuple[int, str]:
    """Exit code and error line of a run on this rank."""
    import io
    from contextlib import redirect_stderr

    from fsdp_qlora.cli import main

    error = io.StringIO()
    with redirect_stderr(error):
        code = main(argv)
    return code, error.getvalue()


@pytest.mark.parametrize("content", ["", "\n\n", "[]"])
def test_no_row_at_all_is_an_error_on_every_rank_and_no_run_of_zero_steps(
    folder, tmp_path, content
):
    data = tmp_path / ("rows.json" if content == "[]" else "rows.jsonl")
    data.write_text(content)
    argv = [
        "train",
        "--model_name",
        folder,
        "--dataset",
        str(data),
        "--device",
        "cpu",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    for code, error in run_ranks(prepare_and_train, 2, argv, grouped=False):
        assert code == 2 and "no row" in error and str(data) in error, error
    assert not (tmp_path / "out").exists()


# ---- one step, cut up in every way -------------------------------------------------------------


def labelled(num_tokens: int, start: int) -> tuple[list[int], list[int]]:
    """A row of 12 tokens whose last `num_tokens` are trained."""
    ids = [(start + 7 * i) % 97 for i in range(12)]
    return ids, [IGNORE] * (12 - num_tokens) + ids[12 - num_tokens :]


SHORT, LONG, NOTHING = labelled(3, 1), labelled(9, 5), labelled(0, 2)
ROWS = tiny_rows(1, 8)[0]
SPLITS = {  # micro-batches of each rank
    "two rows, 3 and 9 tokens": [
        [[[SHORT, LONG]], [[NOTHING]]],  # one micro-batch of 2, a rank without tokens
        [[[SHORT], [LONG]], [[NOTHING], [NOTHING]]],  # accumulation 2 on one rank
        [[[SHORT]], [[LONG]]],  # a row on each rank
        [[[SHORT], [NOTHING]], [[NOTHING], [LONG]]],
    ],
    "eight rows": [
        [[ROWS[:4]], [ROWS[4:]]],
        [[[r] for r in ROWS[0::2]], [[r] for r in ROWS[1::2]]],
        [[ROWS[:1], ROWS[1:2]], [ROWS[2:5], ROWS[5:]]],
    ],
}


def step_of_each_split(folder: str, splits, settings: dict) -> list[dict]:
    """Loss, norm and gradients (as an SGD step of rate 1) of the same rows split in several ways."""
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.training.step import train_step

    results = []
    for split in splits:
        config = RunConfig(
            model_name=folder,
            precision="fp32",
            lora_rank=RANK,
            lora_dropout=0.0,
            seed=SEED,
            **settings,
        )
        model = build_model(config, torch.device("cpu"))
        trained = trainable_parameters(model)
        with torch.no_grad():
            for name, p in trained.items():
                if ".lora_B." in name:
                    p.fill_(0.02)  # so that A has a gradient too
        before = {n: full_tensor(p.detach()).clone() for n, p in trained.items()}
        batches = [padded_batch(rows) for rows in split[dist.get_rank()]]
        result = train_step(
            model, torch.optim.SGD(trained.values(), lr=1.0), batches, no_sync=config.no_sync
        )
        gradient = torch.cat(
            [(before[n] - full_tensor(p.detach())).flatten() for n, p in trained.items()]
        )
        results.append(
            dict(loss=result.loss, norm=result.grad_norm, gradient=gradient, stepped=result.stepped)
        )
    return results


SETTINGS = [
    dict(sharding_strategy="full_shard", train_type="qlora"),
    dict(sharding_strategy="shard_grad_op", train_type="full", no_sync=True),
    dict(sharding_strategy="ddp", train_type="lora"),
]


@pytest.mark.parametrize("cases", in_parts(SETTINGS, 0, then=(2,)))
def test_loss_and_gradients_are_the_same_for_every_split_of_the_same_rows(tmp_path, cases):
    folder = save_tiny(tmp_path)
    for settings in cases:
        splits = [split for kind in SPLITS.values() for split in kind]
        results = run_ranks(step_of_each_split, 2, folder, splits, settings)[0]
        for kind, ways in SPLITS.items():
            first, *others = [results.pop(0) for _ in ways]
            assert first["gradient"].norm() > 0.1
            for other in others:
                assert relative(other["loss"], first["loss"]) < 1e-5, (settings, kind)
                assert relative(other["norm"], first["norm"]) < 1e-5, (settings, kind)
                assert relative(other["gradient"], first["gradient"]) < 1e-5, (settings, kind)


def test_a_step_without_a_trained_token_changes_no_weight_and_has_a_finite_loss(tmp_path):
    folder = save_tiny(tmp_path)
    mixed = [[[NOTHING]], [[NOTHING, SHORT]]]
    alone = [[[NOTHING]], [[NOTHING]]]
    for settings in SETTINGS:
        for results in run_ranks(step_of_each_split, 2, folder, [alone, mixed], settings):
            assert results[0]["loss"] == 0 and not results[0]["stepped"]
            assert not results[0]["gradient"].any()
            assert 0 < results[1]["loss"] < 20 and results[1]["gradient"].isfinite().all()


def train_with_decay(folder: str) -> tuple[bool, bool]:
    """Whether AdamW with decay and momentum changed a weight in a step without tokens, and in one."""
    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    model = build_model(
        RunConfig(model_name=folder, precision="fp32", lora_rank=RANK), torch.device("cpu")
    )
    optimizer = build_optimizer(model, "adamw", LR, 0.1)

    def weights():
        return torch.cat(
            [full_tensor(p.detach()).flatten() for p in trainable_parameters(model).values()]
        )

    changed = []
    for rows in ([SHORT], [NOTHING]):
        before = weights()
        train_step(model, optimizer, [padded_batch(rows)])
        changed.append(not torch.equal(before, weights()))
    return tuple(changed)


def test_weight_decay_and_momentum_do_not_move_weights_without_a_trained_token(tmp_path):
    assert run_ranks(train_with_decay, 2, save_tiny(tmp_path)) == [(True, False)] * 2
