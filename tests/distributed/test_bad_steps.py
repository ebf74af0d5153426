"""A step whose loss or gradient is not a number is taken by no rank, and is not taken for progress."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from fsdp_qlora.checkpoint.folder import all_checkpoints
from tests.distributed.test_resume import metrics, rows_of, settings
from tests.ranks import run_ranks
from tests.tiny import padded_batch, tiny_rows
from tests.tokenizers import save_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


# ---- one step ------------------------------------------------------------------------------------


def poisoned_steps(folder: str, cases: list[dict]) -> list[list[bool]]:
    """For each case, whether the weights stayed in a step that is bad on rank 1, and in a good one."""
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.training.step import train_step

    results = []
    for case in cases:
        case, fused, value = dict(case), case.get("fused"), case.get("value", float("nan"))
        layout = {k: v for k, v in case.items() if k not in ("fused", "value")}
        model = build_model(settings(folder, "unused", **layout), torch.device("cpu"))
        trained = trainable_parameters(model)
        optimizer = torch.optim.AdamW(trained.values(), 1e-2, fused=fused)
        batch = padded_batch(tiny_rows(1, 2)[0])
        poison = {"now": False}

        def spoil(grad, poison=poison, value=value):
            return torch.full_like(grad, value) if poison["now"] and dist.get_rank() == 1 else grad

        next(
            m for n, m in model.named_modules() if n.endswith("down_proj")
        ).register_full_backward_hook(
            lambda m, grads, _, spoil=spoil: tuple(g if g is None else spoil(g) for g in grads)
        )
        stayed = []
        for bad in (False, True, False):
            poison["now"] = bad
            before = [full_tensor(p.detach()).clone() for p in trained.values()]
            result = train_step(model, optimizer, [batch], max_grad_norm=1.0)
            assert torch.isfinite(result.loss_and_norm).all() != bad
            stayed.append(
                all(
                    torch.equal(b, full_tensor(p.detach()))
                    for b, p in zip(before, trained.values(), strict=True)
                )
            )
        results.append((stayed, [int(s["step"]) for s in optimizer.state.values()][0]))
    return results


def test_a_gradient_that_is_bad_on_one_rank_moves_no_weight_on_any(folder):
    cases = [
        dict(sharding_strategy=strategy, train_type="lora", fused=fused, value=value)
        for strategy in ("full_shard", "ddp")
        for fused, value in ((False, float("nan")), (True, float("inf")))
    ]
    for results in run_ranks(poisoned_steps, 2, folder, cases):
        for case, (stayed, steps) in zip(cases, results, strict=True):
            assert stayed == [False, True, False] and steps == 2, case


# ---- a run ---------------------------------------------------------------------------------------


def poisoned_run(config, bad_steps: dict[int, int], num_rows: int = 24, stop_after: int = 0) -> str:
    """Train while rank 1 gets a bad gradient in these steps, as often as said; the error, if any.

    A stop is asked for after the step `stop_after`; then losses are read a step late, as on a GPU.
    """
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.data import tokenize_rows
    from fsdp_qlora.dist import rank_device
    from fsdp_qlora.lifecycle.signals import StopRequested, StopSignals
    from fsdp_qlora.loading.tokenizer import load_tokenizer
    from fsdp_qlora.training import loop, trainer
    from fsdp_qlora.training.step import train_step

    tokenizer, left = load_tokenizer(config.model_name), dict(bad_steps)
    at, signals = {}, StopSignals()

    def poisoned(model, optimizer, micro_batches, **kwargs):
        number, handle = at["step"].index + 1, None
        if left.get(number, 0):
            left[number] -= 1
            if dist.get_rank() == 1:
                p = next(iter(trainable_parameters(model).values()))
                handle = p.register_hook(lambda grad: grad * float("nan"))
        result = train_step(model, optimizer, micro_batches, **kwargs)
        if handle:
            handle.remove()
        return result

    original, loop.train_step = loop.Training.step, poisoned

    def watched(self, step):
        at["step"] = step
        if stop_after:
            self.lagged.device = torch.device("meta")
        original(self, step)
        if step.index + 1 == stop_after:
            signals.asked_by = "SIGTERM"

    loop.Training.step = watched
    try:
        trainer.train(
            config,
            tokenize_rows(rows_of(num_rows), tokenizer, context_length=64),
            rank_device(config.device),
            tokenizer,
            signals=signals,
        )
        return ""
    except (ValueError, StopRequested) as error:
        return str(error)
    finally:
        loop.Training.step, loop.train_step = original, train_step
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()


def config_of(folder, out, **others):
    return settings(
        folder,
        out,
        num_epochs=1,
        checkpoint_every=2,
        global_batch_size=2,
        lora_dropout=0.0,
        sharding_strategy="ddp",
        train_type="lora",
        **others,
    )  # 12 steps


def test_bad_steps_are_skipped_logged_with_their_rows_and_end_the_run_after_three(folder, tmp_path):
    for said in run_ranks(poisoned_run, 2, config_of(folder, tmp_path / "few"), {4: 1, 5: 1, 8: 1}):
        assert said == ""
    skipped = [
        json.loads(line) for line in (tmp_path / "few/metrics.jsonl").read_text().splitlines()
    ]
    skipped = {r["step"]: r["rows"] for r in skipped if r["kind"] == "skipped"}
    assert sorted(skipped) == [4, 5, 8] and all(len(rows) == 2 for rows in skipped.values())
    assert len(metrics(tmp_path / "few")) == 12
    for said in run_ranks(
        poisoned_run, 2, config_of(folder, tmp_path / "many"), {5: 1, 6: 1, 7: 1}
    ):
        assert "steps 5 to 7 is not finite" in said and "--lr" in said
    assert not (tmp_path / "many" / "adapter").exists()
    assert all_checkpoints(tmp_path / "many/checkpoints")[0].name == "step-000004"


def test_skip_goes_on_for_ever(folder, tmp_path):
    config = config_of(folder, tmp_path, on_bad_steps="skip", max_bad_steps=2)
    assert run_ranks(poisoned_run, 2, config, {n: 1 for n in range(3, 9)}) == ["", ""]
    assert len(metrics(tmp_path)) == 12


def test_rollback_goes_on_from_the_checkpoint_without_the_bad_rows(folder, tmp_path):
    config = config_of(folder, tmp_path / "rolled", on_bad_steps="rollback", max_bad_steps=2)
    assert run_ranks(poisoned_run, 2, config, {6: 9, 7: 9}) == ["", ""]
    steps = [m["step"] for m in metrics(tmp_path / "rolled")]
    assert steps == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]  # 5 was taken again after going back to 4
    stopped = config_of(folder, tmp_path / "stopped", on_bad_steps="rollback", max_bad_steps=1)
    for said in run_ranks(poisoned_run, 2, stopped, {5: 1}, 24, 5):
        assert (
            "stopped after step 5; this was not saved (the loss or gradient of steps 5 to 5" in said
        )
        assert f"resumes from {tmp_path}/stopped/checkpoints/step-000004" in said
    skipped = config_of(folder, tmp_path / "skipped", on_bad_steps="skip")
    assert run_ranks(poisoned_run, 2, skipped, {6: 1, 7: 1}) == ["", ""]
    finite = [m for m in metrics(tmp_path / "skipped") if m["step"] not in (6, 7)]
    assert finite == metrics(tmp_path / "rolled")


def test_a_second_streak_after_the_same_checkpoint_ends_the_run(folder, tmp_path):
    config = config_of(folder, tmp_path, on_bad_steps="rollback", max_bad_steps=2)
    for said in run_ranks(poisoned_run, 2, config, {n: 9 for n in range(6, 12)}):
        assert "even after rolling back" in said
    without = config_of(folder, tmp_path / "new", on_bad_steps="rollback", max_bad_steps=1)
    for said in run_ranks(poisoned_run, 2, without, {1: 9}):
        assert "no checkpoint to roll back to" in said
