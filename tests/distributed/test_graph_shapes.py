"""Batches of unlike ranks are filled up to one shape, and give the loss and gradient that they had."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny import save_tiny, tiny_rows


def filled_and_not(folder: str) -> dict:
    """Of an unequal batch on each rank: loss and gradient as it is, and filled up; and its shapes."""
    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import collate, collate_packed
    from fsdp_qlora.dist import full_tensor, ranks_from_env
    from fsdp_qlora.plan_draft import draft_plan
    from fsdp_qlora.training.cuda_graphs import (
        _as_large_as_any,
        _shape_of,
        check_graphs,
        uses_graphs,
    )
    from fsdp_qlora.training.step import run_micro_batch

    rank, found = ranks_from_env().rank, {}
    (rows,) = tiny_rows(steps=1, rows_per_step=4)
    rows = [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in rows]
    config = RunConfig(model_name=folder, lora_rank=2, lora_dropout=0.0, compile=False)
    model = build_model(config, torch.device("cpu"))
    batch = collate(rows[:1], 0, 64) if rank else collate(rows, 0)
    for name, given in dict(plain=batch, filled=_as_large_as_any(batch)).items():
        loss = run_micro_batch(model, given, 10.0)
        gradient = [full_tensor(p.grad) for p in trainable_parameters(model).values()]
        for p in trainable_parameters(model).values():
            p.grad = None
        found[name] = loss, gradient
    packed = collate_packed([rows[:2]] if rank else [rows[:3], rows[3:]], 0, pad_to=128)
    reasons = {}
    for flag in ("", "no_sync", "gather_once"):
        asked = replace(config, compile=None, cuda_graphs=True, **{flag: True} if flag else {})
        plan = draft_plan(asked, 2)
        try:
            check_graphs(asked, plan, model, torch.device("cuda"))
            reasons[flag] = uses_graphs(plan, model, torch.device("cuda"))
        except ValueError as error:
            reasons[flag] = str(error)
    by_default = draft_plan(replace(config, compile=None), 2)
    found["reasons"] = reasons, uses_graphs(by_default, model, torch.device("cuda"))
    return found | dict(
        shapes=[_shape_of(_as_large_as_any(b)) for b in (batch, packed)],
        packed=(packed, _as_large_as_any(packed)),
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(filled_and_not, 2, save_tiny(tmp_path_factory.mktemp("tiny")))


def test_filling_changes_neither_loss_nor_gradient(ranks):
    for found in ranks:
        (loss, gradient), (filled_loss, filled_gradient) = found["plain"], found["filled"]
        assert loss != 0
        torch.testing.assert_close(filled_loss, loss)
        torch.testing.assert_close(filled_gradient, gradient)


def test_what_differs_between_micro_batches_is_not_replayed(ranks):
    """A sharded model is, without being asked for."""
    asked, by_default = ranks[0]["reasons"]
    assert asked[""] is True and by_default is True
    assert "--cuda_graphs true: with --no_sync" in asked["no_sync"]
    assert "--cuda_graphs true: with --gather_once" in asked["gather_once"]


def test_all_ranks_have_one_shape(ranks):
    assert ranks[0]["shapes"] == ranks[1]["shapes"]


def test_a_packed_batch_keeps_its_rows_and_gets_empty_bins(ranks):
    for found in ranks:
        batch, filled = found["packed"]
        bins = len(batch["input_ids"])
        assert len(filled["input_ids"]) == 2
        assert torch.equal(filled["input_ids"][:bins], batch["input_ids"])
        assert (filled["labels"][bins:] == -100).all()
        borders, before = filled["cu_seq_lens_q"].tolist(), batch["cu_seq_lens_q"].tolist()
        assert (
            borders[: len(before)] == before and borders[-1] == 2 * 128 and len(borders) % 64 == 0
        )
        assert sorted(borders) == borders
        assert filled["max_length_q"] == 128
