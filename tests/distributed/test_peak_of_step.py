"""The peak of a step as the estimate has it, beside the bytes that are alive on real ranks, op by op."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_qlora.bench.batches import random_batches
from fsdp_qlora.build import build_model
from fsdp_qlora.catalog.machine import cpu_machine
from fsdp_qlora.catalog.shapes import shape_from_config
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import GIB, memory, resolve
from fsdp_qlora.memory import chunked_cross_entropy
from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.run_plan import plan_run
from fsdp_qlora.training.step import train_step
from tests.live_storages import LiveStorages
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import save_tiny

LARGE, SMALL = 16384, 256  # vocabularies: a table has 19 or 0.3 times as many weights as a block
MODELS = dict(
    large=dict(vocab_size=LARGE),
    tied=dict(vocab_size=LARGE, tie_word_embeddings=True),
    small=dict(vocab_size=SMALL),
)
WIDTHS = dict(
    hidden_size=128, intermediate_size=448, num_hidden_layers=4, max_position_embeddings=512
)
COMMON = dict(precision="bf16", context_length=64, batch_size=1)
FULL = COMMON | dict(train_type="full", activation_policy="keep_linears")
QLORA = COMMON | dict(train_type="qlora", lora_rank=8, lora_dropout=0.0)
LORA = QLORA | dict(train_type="lora")
ENDS = dict(modules_to_save="embed_tokens,lm_head")
TWICE = dict(gradient_accumulation_steps=2)
GRAD_OP, DDP = dict(sharding_strategy="shard_grad_op"), dict(sharding_strategy="ddp")
ROOT, LOSS = "root's gradients reduced", "loss backward"

QUICK = [
    ("large", FULL, ROOT),
    ("tied", FULL, LOSS),
    ("large", QLORA | ENDS, ROOT),
    ("large", QLORA | dict(modules_to_save="embed_tokens"), "embedding's gradients reduced"),
    ("small", FULL, "last block but one"),
]
MORE = [
    ("large", FULL | dict(activation_policy="recompute_all"), ROOT),
    ("large", FULL | dict(activation_policy="keep_all"), LOSS),
    ("large", FULL | GRAD_OP, LOSS),
    ("large", FULL | TWICE, ROOT),
    ("large", FULL | TWICE | dict(no_sync=True), LOSS),
    ("large", FULL | TWICE | dict(gather_once=True), LOSS),
    ("large", FULL | dict(wrap_policy="attention_mlp"), ROOT),
    ("large", FULL | dict(precision="fp32"), ROOT),
    ("large", FULL | dict(trained_modules="embed_tokens"), "embedding's gradients reduced"),
    ("large", FULL | dict(trained_modules="lm_head"), LOSS),
    ("large", FULL | DDP, LOSS),
    ("tied", FULL | TWICE | dict(no_sync=True), LOSS),
    ("tied", FULL | dict(precision="fp32", activation_policy="recompute_all"), "loss"),
    ("tied", QLORA | dict(modules_to_save="embed_tokens"), "loss"),
    ("small", FULL | TWICE | dict(no_sync=True), "last block but one"),
    ("small", FULL | dict(context_length=512), "last block"),
    ("small", FULL | dict(gradient_accumulation_steps=3, no_sync=True), "last block but one"),
    ("large", QLORA | dict(modules_to_save="lm_head"), "loss"),
    ("large", QLORA | ENDS | dict(adapter_dtype="bf16"), ROOT),
    ("large", QLORA | ENDS | TWICE, ROOT),
    ("large", QLORA | dict(modules_to_save="norm"), "loss"),
    ("large", QLORA | ENDS | DDP, "loss"),
    ("small", QLORA, "last block but one"),
    ("small", QLORA | dict(context_length=512), "last block"),
    ("large", LORA, "loss"),
    ("small", LORA | GRAD_OP, "last block gathered"),
    ("small", LORA | dict(wrap_policy="attention_mlp"), "last block but one"),
    ("large", LORA | ENDS | GRAD_OP, "loss"),
]
GROUPS = dict(sharding_strategy="hybrid_full_shard", shard_group_size=2)
HYBRID = [
    ("small", FULL | GROUPS, "second block"),
    ("large", FULL | GROUPS, ROOT),
    ("large", QLORA | ENDS | GROUPS, ROOT),
]
ONE = [
    ("large", FULL, LOSS),
    ("tied", FULL, LOSS),
    ("small", FULL | dict(context_length=512), "last block"),
    ("large", FULL | TWICE, LOSS),
    ("large", QLORA | ENDS, "loss"),
    ("tied", QLORA | dict(modules_to_save="embed_tokens"), "loss"),
    ("large", QLORA, "loss"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, settings in MODELS.items():
        save_tiny(folder / name, **WIDTHS, **settings)
    return folder


def settings(folder: Path, model: str, changes: dict) -> RunConfig:
    return RunConfig(model_name=str(folder / model), random_weights=True, device="cpu", **changes)


def fused_loss(logits: Tensor, labels: Tensor, *more, loss=chunked_cross_entropy._loss_of_logits):
    """`_loss_of_logits` as a GPU's fused kernel has it: the gradient, and as much inside (the estimate's)."""
    with _disable_current_modes():
        total, right, grad = loss(logits, labels, *more)
    inside = torch.empty_like(logits)
    grad = torch.empty_like(inside).copy_(grad)
    return total.clone(), right.clone(), grad


def place_of(callers: list[str]) -> str:
    """Where in a step an op is."""
    if any(name.endswith("._root_post_backward_final_callback") for name in callers):
        return "end of backward"
    for part in ("forward", "backward"):
        if f"{chunked_cross_entropy.__name__}.{part}" in callers:
            return f"loss {part}"
    return "backward" if any("._engine_run_backward" in name for name in callers) else "forward"


PLACES = {
    "loss": "loss forward",
    LOSS: "loss backward",
    ROOT: "end of backward",
    "embedding's gradients reduced": "end of backward",
    "last block gathered": "forward",
}  # and of all others, the backward


def count_peaks(folder: Path, cases: list[tuple]) -> list[tuple[int, str]]:
    """Of a step after the first, in each case: the most bytes that are alive, and where that is."""
    torch.manual_seed(0)
    chunked_cross_entropy._loss_of_logits = fused_loss
    return [_peak_of(settings(folder, model, changes)) for model, changes, _ in cases]


def _peak_of(config: RunConfig) -> tuple[int, str]:
    cpu = torch.device("cpu")
    plan = plan_run(config, cpu)
    gc.collect()
    with LiveStorages() as live:
        model = build_model(config, cpu, plan=plan)
        optimizer = build_optimizer(model)
        batches = random_batches(config, model.config.vocab_size, plan.batch.accumulation)
        for _ in range(2):
            live.forget_peak()
            train_step(model, optimizer, batches, max_grad_norm=1.0, no_sync=config.no_sync)
    return live.peak, place_of(live.callers)


def estimated(folder: Path, model: str, changes: dict, ranks: int) -> tuple[float, str]:
    """The same by the estimate, without cuBLAS, and the moment."""
    shape = shape_from_config(json.loads((folder / model / "config.json").read_text()), model)
    machine = cpu_machine(gpus=ranks, nodes=1)
    found = memory(
        shape, resolve(settings(folder, model, changes), shape, machine, attention="sdpa")
    )
    return (found.peak_allocated - found.parts["workspace"]) * GIB, found.moment


@pytest.mark.parametrize(
    "ranks, cases",
    [
        pytest.param(2, QUICK, id="quick"),
        rest(2, MORE, id="more"),
        rest(4, HYBRID, id="hybrid"),
        rest(1, ONE, id="one"),
    ],
)
def test_the_estimates_peak_is_what_is_alive(folder, ranks, cases):
    counted, *_ = run_ranks(count_peaks, ranks, folder, cases, timeout=900)
    for (model, changes, moment), (peak, place) in zip(cases, counted, strict=True):
        by_estimate, at = estimated(folder, model, changes, ranks)
        assert at == moment, changes
        assert PLACES.get(moment, "backward") == place, changes
        assert by_estimate == pytest.approx(peak, rel=0.025), changes
