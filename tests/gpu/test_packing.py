"""Packed rows on a GPU: torch's variable-length kernels, masks, and rows alone agree; one GPU."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from tests.test_attention import built_model, inputs, loss_and_gradients
from tests.tiny import save_tiny, tiny_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SHAPE = dict(hidden_size=256, intermediate_size=512, max_position_embeddings=1024)
FAMILIES = {"llama": {}, "mistral": dict(sliding_window=100), "qwen3": dict(head_dim=128)}


def long_rows(count: int = 6, longest: int = 700):
    """Rows of up to `longest` tokens, so that a row is several blocks of a kernel."""
    generator = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(0, 97, (int(n),), generator=generator)
        for n in torch.linspace(longest, 40, count)
    ]
    return [(row, row.clone()) for row in ids]


def compare(folder: str) -> dict:
    """Loss and gradients of rows alone and packed, in fp32 and in bf16, eager and compiled."""
    from fsdp_qlora.data import collate, collate_packed

    rows, device = long_rows(), torch.device("cuda", 0)
    alone, packed = [collate([row], 0) for row in rows], [collate_packed([rows[:2], rows[2:]], 0)]

    def run(way, **settings):
        settings = dict(train_type="lora", compile=False) | settings
        return loss_and_gradients(
            built_model(folder, way, device, **settings), packed if way else alone
        )

    results = {("fp32", way): run(way) for way in (None, "sdpa")}
    for way in (None, "sdpa", "varlen"):
        results["bf16", way] = run(way, precision="bf16")
    for recompute in (False, True):
        results["bf16", "varlen", recompute] = run(
            "varlen", precision="bf16", compile=True, use_gradient_checkpointing=recompute
        )
    return results


def error(ours, reference) -> float:
    """Norm of the difference of all gradients over the norm of the reference."""
    ours, reference = (
        torch.cat([g[n].flatten() for n in reference[1]]) for g in (ours[1], reference[1])
    )
    return ((ours - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_agree_with_rows_alone(family, tmp_path):
    """fp32 to rounding; in bf16 packing may not be further from fp32 than rows alone are, nearly."""
    folder = save_tiny(tmp_path, family, **SHAPE, **FAMILIES[family])
    (results,) = run_ranks(compare, 1, folder, device="cuda")
    reference = results.pop(("fp32", None))
    torch.testing.assert_close(results["fp32", "sdpa"][0], reference[0], rtol=1e-5, atol=0)
    assert error(results.pop(("fp32", "sdpa")), reference) < 1e-4
    rounding = error(results["bf16", None], reference)
    assert rounding < 0.05
    for case, result in results.items():
        print(family, case, error(result, reference))
        torch.testing.assert_close(result[0], reference[0], rtol=2**-8, atol=0)
        assert error(result, reference) < 1.5 * rounding, case


def logits_of_changed_rows(folder: str) -> list[torch.Tensor]:
    """Logits of packed rows, before and after the second one changed, from varlen in bf16."""
    from fsdp_qlora.data import collate_packed, on_device

    rows, device = long_rows(), torch.device("cuda", 0)
    changed = [rows[0], ((rows[1][0] + 1) % 97, rows[1][1]), *rows[2:]]
    model = built_model(
        folder, "varlen", device, train_type="lora", precision="bf16", compile=False
    ).eval()
    with torch.no_grad():
        return [
            model(**on_device(inputs(collate_packed([bin], 0)), device)).logits[0].cpu()
            for bin in (rows, changed)
        ]


def test_no_token_sees_another_row(tmp_path):
    (pair,) = run_ranks(logits_of_changed_rows, 1, save_tiny(tmp_path, **SHAPE), device="cuda")
    before, after = pair
    lengths = [len(ids) for ids, _ in long_rows()]
    same = (before == after).all(-1).split(lengths)
    assert [bool(row.all()) for row in same] == [True, False, True, True, True, True]


def test_a_packed_run_trains_in_one_process(tmp_path):
    folder = save_tiny(tmp_path, **SHAPE)
    losses = run_ranks(train_packed, 1, folder, device="cuda")[0]
    assert losses[-1] < losses[0]


def train_packed(folder: str) -> list[float]:
    """Losses of QLoRA steps on packed rows whose number and lengths differ from step to step."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import collate_packed
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    config = RunConfig(model_name=folder, packing=True, lora_rank=8, lora_dropout=0.0)
    model = build_model(config, torch.device("cuda", 0))
    assert model.config._attn_implementation in ("varlen", "fa4_packed")
    optimizer = build_optimizer(model, "adamw", 5e-3)
    losses = []
    for step in tiny_rows(steps=1, rows_per_step=8) * 6:
        rows = [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in step]
        split = 3 + len(losses) % 3
        batch = collate_packed([rows[:split], rows[split:]], 0, pad_to=128)
        losses.append(train_step(model, optimizer, [batch]).loss)
    return losses
