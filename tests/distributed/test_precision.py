"""Autocast and loss scaling train as torch.amp does in one process of transformers and PEFT."""

from __future__ import annotations

import json

import pytest
import torch

from tests.distributed.test_bad_steps import config_of, poisoned_run
from tests.distributed.test_parity import flat, relative
from tests.distributed.test_resume import metrics
from tests.parts import in_parts
from tests.ranks import run_ranks
from tests.tiny import LR, RANK, SEED, padded_batch, reference_model, save_tiny, tiny_rows
from tests.tokenizers import save_chat_model

STEPS, CLIP, SCALE = tiny_rows(steps=4, rows_per_step=4), 0.05, 2.0**12
DTYPES = {
    "fp16_autocast": torch.float16,
    "bf16_autocast": torch.bfloat16,
    "bf16_buffers_autocast": torch.bfloat16,
}
SPOILT = 2  # the step whose gradients overflow on rank 1


def amp_reference(folder: str, precision: str, train_type: str, left_out: int | None = None):
    """Losses, norms, trained weights and the last scale of torch.amp on whole steps."""
    stored = torch.bfloat16 if precision == "bf16_buffers_autocast" else torch.float32
    model = reference_model(folder, train_type, stored)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), LR, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", SCALE, enabled=precision == "fp16_autocast")
    losses, norms = [], []
    for number, rows in enumerate(STEPS):
        batch = padded_batch(rows)
        with torch.autocast("cpu", DTYPES[precision]):
            logits = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits.float()
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
            )
            loss = loss / (batch["labels"][:, 1:] != -100).sum()
        scaler.scale(loss).backward()
        if number == left_out:
            next(iter(trained.values())).grad.fill_(torch.inf)
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {n: p.detach().clone() for n, p in trained.items()}, scaler.get_scale()


def train_cases(folder: str, cases: list[dict]) -> list[dict]:
    """Train on this rank's rows; `spoilt` is a step in which rank 1's gradients become infinite."""
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.loss_scaler import LossScaler
    from fsdp_qlora.training.step import train_step

    results, rank, world = [], dist.get_rank(), dist.get_world_size()
    for case in cases:
        case, spoilt = dict(case), case.get("spoilt")
        case.pop("spoilt", None)
        config = RunConfig(
            **dict(model_name=folder, lora_rank=RANK, lora_alpha=8, lora_dropout=0.0, seed=SEED)
            | case
        )
        model, cpu = build_model(config, torch.device("cpu")), torch.device("cpu")
        optimizer = build_optimizer(model, "adamw", LR, 0.1)
        scaler = LossScaler(cpu, SCALE) if config.scales_loss else None
        products, poison = set(), {"now": False}
        first = next(m for n, m in model.named_modules() if n.endswith("down_proj"))
        first.register_forward_hook(lambda m, args, y, seen=products: seen.add(y.dtype))
        if spoilt is not None:
            first.register_full_backward_hook(
                lambda m, grads, _, poison=poison: (
                    None
                    if not poison["now"] or rank != 1
                    else tuple(g if g is None else g * torch.inf for g in grads)
                )
            )
        losses, norms, stayed = [], [], []
        for number, rows in enumerate(STEPS):
            poison["now"] = number == spoilt
            before = [p.detach().clone() for p in trainable_parameters(model).values()]
            result = train_step(
                model,
                optimizer,
                [padded_batch([row]) for row in rows[rank::world]],
                max_grad_norm=CLIP,
                no_sync=config.no_sync,
                scaler=scaler,
            )
            losses.append(result.loss)
            norms.append(result.grad_norm)
            stayed.append(
                all(
                    torch.equal(
                        b.full_tensor() if hasattr(b, "full_tensor") else b, full_tensor(p.detach())
                    )
                    for b, p in zip(before, trainable_parameters(model).values(), strict=True)
                )
            )
        weights = {
            n: full_tensor(p.detach()).clone() for n, p in trainable_parameters(model).items()
        }
        results.append(
            dict(
                losses=losses,
                norms=norms,
                weights=weights,
                products=products,
                stayed=stayed,
                scale=scaler and scaler.scale.item(),
            )
        )
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


AUTOCAST = [  # precision, strategy, train_type, other settings
    ("fp16_autocast", "full_shard", "lora", {}),
    ("fp16_autocast", "ddp", "qlora", dict(no_sync=True)),
    ("fp16_autocast", "full_shard", "full", dict(use_gradient_checkpointing=False)),
    ("fp16_autocast", "shard_grad_op", "bnb_dora", {}),
    ("fp16_autocast", "full_shard", "qlora", dict(use_cpu_offload=True, no_sync=True)),
    ("bf16_autocast", "full_shard", "qlora", {}),
    ("bf16_autocast", "ddp", "full", {}),
    ("bf16_buffers_autocast", "full_shard", "qlora", {}),
]


@pytest.mark.parametrize("asked", in_parts(AUTOCAST, 1, 2, 5, 7, then=(0, 3, 4, 6)))
def test_autocast_equals_torch_amp_within_its_rounding(folder, asked):
    cases = [
        dict(sharding_strategy=strategy, train_type=kind, precision=precision, **more)
        for precision, strategy, kind, more in asked
    ]
    results = run_ranks(train_cases, 2, folder, cases)[0]
    for case, ours in zip(cases, results, strict=True):
        losses, norms, weights, scale = amp_reference(folder, case["precision"], case["train_type"])
        # A loss averages many values, each rounded by up to 2^-11 in fp16 and 2^-8 in bf16.
        unit = 2**-11 if case["precision"] == "fp16_autocast" else 2**-8
        assert ours["products"] == {DTYPES[case["precision"]]}, case
        assert relative(ours["losses"], losses) < unit, case
        assert relative(ours["norms"], norms) < 8 * unit, case
        assert set(ours["weights"]) == set(weights), case
        assert all(w.dtype == torch.float32 for w in ours["weights"].values()), case
        if case["precision"] == "fp16_autocast":
            assert ours["scale"] == scale, case
        if case["train_type"] == "full":
            assert relative(flat(ours["weights"], weights), flat(weights, weights)) < 2**-8, case


def test_an_overflow_on_one_rank_is_skipped_on_all_and_halves_the_scale_as_torchs_scaler(folder):
    cases = [
        dict(sharding_strategy=s, train_type="lora", precision="fp16_autocast", spoilt=SPOILT)
        for s in ("full_shard", "ddp")
    ]
    losses, _, _, scale = amp_reference(folder, "fp16_autocast", "lora", SPOILT)
    for results in run_ranks(train_cases, 2, folder, cases):
        for ours in results:
            assert [i for i, stayed in enumerate(ours["stayed"]) if stayed] == [SPOILT]
            assert ours["scale"] == scale == SCALE / 2
            assert relative(ours["losses"], losses) < 2**-11


def test_the_scale_grows_and_falls_as_torchs():
    from fsdp_qlora.training.loss_scaler import LEAST_SCALE, LossScaler

    ours = LossScaler(torch.device("cpu"), 8.0, growth_steps=3)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], 0.1)
    torchs = torch.amp.GradScaler("cpu", 8.0, growth_interval=3)
    for finite in (True, True, False, True, True, True, False, True, True, True, True, True):
        p.grad = torch.full((1,), 1.0 if finite else torch.inf)
        torchs.scale(torch.ones(()))
        torchs.step(optimizer)
        torchs.update()
        ours.update(torch.tensor(finite))
        assert ours.scale.item() == torchs.get_scale()
    for _ in range(20):
        ours.update(torch.tensor(False))
    assert ours.scale.item() == LEAST_SCALE
    again = LossScaler(torch.device("cpu"))
    again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
    assert again.state_dict() == ours.state_dict()


def test_overflows_are_skipped_and_logged_but_do_not_end_a_run(tmp_path):
    folder = save_chat_model(tmp_path / "model", num_hidden_layers=1)
    config = config_of(folder, tmp_path / "out", precision="fp16_autocast")
    for said in run_ranks(poisoned_run, 2, config, {n: 1 for n in (3, 4, 5, 6, 12)}):
        assert said == ""
    lines = metrics(tmp_path / "out", "skipped")
    assert [line["step"] for line in lines] == [3, 4, 5, 6, 12]
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()
    scales = [m["loss_scale"] for m in metrics(tmp_path / "out")]
    assert scales[2:8] == [2.0**k for k in (16, 15, 14, 13, 12, 12)]


def test_gradients_that_are_bad_at_any_scale_end_the_run():
    from fsdp_qlora.lifecycle.bad_steps import BadSteps
    from fsdp_qlora.observe.metrics import StepMetrics

    def step(number, loss_scale, loss=1.0):
        return StepMetrics(number, loss, 0.1, torch.inf, 1, 1, 1.0, 1.0, 0.0, loss_scale=loss_scale)

    bad = BadSteps("stop", 2)
    for number, scale in enumerate((4.0, 2.0)):
        assert step(number, scale).overflowed and not step(number, scale, torch.nan).overflowed
    bad.see(step(3, 1.0))
    bad.decide()
    bad.see(step(4, 1.0))
    with pytest.raises(ValueError, match="steps 3 to 4 is not finite"):
        bad.decide()
