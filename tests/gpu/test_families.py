"""Families on one GPU: capped scores in flex_attention, experts plain and in 4 bits, as on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.families import save_family
from tests.ranks import run_ranks
from tests.tiny import padded_batch, tiny_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SEEN = padded_batch(tiny_rows(1, 3, seed=11)[0])
CASES = [
    ("Gemma 2", "lora"),
    ("Mixtral", "lora"),
    ("Mixtral", "qlora"),
    ("Qwen3-MoE", "qlora"),
    ("GPT-2", "qlora"),
]


def losses(folders: list[str], device: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of one batch, per case."""
    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig

    found = []
    for folder, (_, kind) in zip(folders, CASES, strict=True):
        config = RunConfig(
            model_name=folder,
            train_type=kind,
            precision="fp32",
            lora_rank=4,
            lora_dropout=0.0,
            compile=False,
        )
        model = build_model(config, torch.device(device))
        loss = model(**{k: v.to(device) for k, v in SEEN.items()}).loss
        loss.backward()
        grads = [p.grad.norm() for p in trainable_parameters(model).values()]
        found.append((loss.item(), torch.stack(grads).norm().item()))
    return found


def test_losses_and_gradients_are_those_of_the_cpu(tmp_path):
    """Routing may differ where two experts are equally good, which no random weights here are."""
    folders = [save_family(tmp_path / f"{i}", family) for i, (family, _) in enumerate(CASES)]
    cpu, gpu = (
        run_ranks(losses, 1, folders, device, device=device)[0] for device in ("cpu", "cuda")
    )
    for case, ours, expected in zip(CASES, gpu, cpu, strict=True):
        assert ours == pytest.approx(expected, rel=2e-3), case
