"""Whatever a wrap policy picks, a unit can be gathered alone, and tied weights stay one.

FSDP gathers a unit only inside the unit's own forward. A tied embedding and head wrapped apart were
untied or crashed, and so did a head, or a part of an adapted layer, that was a unit of its own.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.distributed.test_parity import assert_equal_run, train_case
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import padded_batch, reference_model, reference_run, save_tiny, tiny_rows

TRAIN_TYPES = ("full", "lora", "qlora")
STEPS = tiny_rows(steps=2, rows_per_step=4)


def linear_or_embedding(module: nn.Module) -> bool:
    """A user's policy: every module that holds a matrix."""
    return type(module).__name__ in ("Linear", "Embedding", "QuantLinear", "LoraLinear")


# 5,000 is below the embedding, the head and the linear layers of the tiny model, so each is picked.
POLICIES = [dict(wrap_policy="min_params", min_wrap_params=5000), linear_or_embedding]


def train_wrapped(folder: str, steps, cases) -> list[dict]:
    """The run of each (train type, policy)."""
    import fsdp_qlora.build as build

    results = []
    for train_type, policy in cases:
        settings = dict(train_type=train_type, sharding_strategy="full_shard")
        apply_sharding = build.apply_sharding
        if callable(policy):  # not a setting of the command line
            build.apply_sharding = lambda *args, policy=policy, apply=apply_sharding, **kwargs: (
                apply(*args, **kwargs | dict(wrap_policy=policy))
            )
        else:
            settings |= policy
        results.append(train_case(folder, steps, settings))
        build.apply_sharding = apply_sharding
    return results


@pytest.mark.parametrize("tied", [True, rest(False)])
def test_units_of_any_choice_train_as_one_process_tied_or_not(tmp_path, tied):
    cases = [(t, p) for t in TRAIN_TYPES for p in POLICIES]
    folder = save_tiny(tmp_path, tie_word_embeddings=tied)
    expected = {t: reference_run(reference_model(folder, t), STEPS) for t in TRAIN_TYPES}
    results = run_ranks(train_wrapped, 2, folder, STEPS, cases)[0]
    for (train_type, policy), result in zip(cases, results, strict=True):
        assert_equal_run(result, expected[train_type], 1e-5, (train_type, policy))


def step_and_save_tied(folder: str, out: str, rows) -> list[str]:
    """One full step of a tied model whose policy would split it, saved; the units made."""
    import torch.distributed as dist

    import fsdp_qlora as fq

    device = torch.device("cpu")
    model = fq.meta_model(fq.read_config(folder), torch.float32)
    units = fq.apply_sharding(
        model, "full_shard", fq.make_mesh("full_shard", device), wrap_policy=linear_or_embedding
    )
    fq.materialize(model, device, device)
    fq.load_weights(model, fq.Checkpoint(folder), device)
    optimizer = fq.build_optimizer(model, "sgd", 0.1)
    fq.train_step(model, optimizer, [padded_batch(rows[dist.get_rank() :: 2])])
    fq.save_trained(model, out)
    return units


def test_a_tied_model_saves_one_tensor_that_both_ends_share_on_reload(tmp_path):
    folder = save_tiny(tmp_path / "model", tie_word_embeddings=True)
    units = run_ranks(step_and_save_tied, 2, folder, str(tmp_path / "out"), STEPS[0])[0]
    assert len(units) == 14 and not any("embed" in u or "head" in u for u in units)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight" in saved and "lm_head.weight" not in saved

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    batch = padded_batch(STEPS[0])
    count = (batch["labels"][:, 1:] != -100).sum()
    expected(**batch, num_items_in_batch=count).loss.backward()
    with torch.no_grad():
        for p in expected.parameters():
            p -= 0.1 * p.grad
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    torch.testing.assert_close(
        dict(reloaded.named_parameters()), dict(expected.named_parameters()), rtol=1e-5, atol=1e-6
    )
