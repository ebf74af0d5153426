"""--router_aux_loss_coef: transformers' load-balancing loss, in the loss and in every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_qlora.build import build_model
from fsdp_qlora.catalog.families import BALANCED_EXPERTS
from fsdp_qlora.config import RunConfig
from fsdp_qlora.data.loader import Collation
from fsdp_qlora.dist import process_group
from fsdp_qlora.experts import apply_router_balance
from fsdp_qlora.experts.balance import check_router_balance
from fsdp_qlora.loading import meta_model

from .families import FAMILIES, MOE_FAMILIES, NEWER_FAMILIES, family_config, save_family
from .parts import slow
from .tiny import save_tiny

CPU = torch.device("cpu")
IDS = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(5))
MASK = torch.ones_like(IDS)
MASK[1, 12:] = 0
PADDED = dict(
    input_ids=IDS, attention_mask=MASK, labels=IDS.masked_fill(MASK == 0, -100)
)  # whose padding no expert is to be balanced for
WHOLE = dict(input_ids=IDS, labels=IDS)
COEFFICIENT = 0.3


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, router_aux_loss_coef=COEFFICIENT
    ).train()


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize("batch", [WHOLE, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE", "OLMoE", "gpt-oss", "Phi-3.5-MoE"])
def test_loss_and_gradients_are_those_of_transformers(family, batch, tmp_path):
    folder = save_family(tmp_path, family)
    reference, ours = without_dropout(plain(folder)), without_dropout(plain(folder))
    expected = reference(**batch, output_router_logits=True)
    assert expected.aux_loss > 1  # balanced experts have top-k: there is something to push
    expected.loss.backward()
    apply_router_balance(ours, COEFFICIENT)
    found = ours(**batch)
    found.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss)
    for (name, p), q in zip(reference.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(activation_policy="keep_linears"),
        dict(use_gradient_checkpointing=False),
        dict(reentrant_checkpointing=True),
        slow(dict(compile=True)),
        slow(dict(compile=True, use_gradient_checkpointing=False)),
    ],
    ids=str,
)
def test_a_run_has_it_under_every_way_to_keep_activations(settings, tmp_path):
    folder = save_family(tmp_path, "Qwen3-MoE")
    reference = plain(folder)
    expected = reference(**PADDED, output_router_logits=True)
    expected.loss.backward()
    config = RunConfig(
        model_name=folder, train_type="full", precision="fp32", sharding_strategy="ddp",
        router_aux_loss_coef=COEFFICIENT, **settings,
    )  # fmt: skip
    with process_group(CPU, timeout_minutes=1):
        model = build_model(config, CPU).train()
        for _ in range(2):  # what one micro-batch counted is not the next one's
            model.zero_grad()
            found = model(**PADDED)
            found.loss.backward()
        unbalanced = model.eval()(**PADDED).loss
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(unbalanced, expected.loss - COEFFICIENT * expected.aux_loss)
    routers = {n: p.grad for n, p in reference.named_parameters() if n.endswith("mlp.gate.weight")}
    ours = dict(model.named_parameters())
    assert len(routers) == 2
    for name, gradient in routers.items():
        torch.testing.assert_close(ours[name].grad, gradient, rtol=1e-4, atol=1e-6)


def test_what_config_json_asks_for_is_left_to_the_flag(tmp_path):
    folder = save_family(tmp_path, "Qwen3-MoE", output_router_logits=True)
    reference = plain(folder)
    assert reference.config.output_router_logits
    config = RunConfig(
        model_name=folder, train_type="full", precision="fp32", sharding_strategy="ddp"
    )
    with process_group(CPU, timeout_minutes=1):
        found = build_model(config, CPU).train()(**PADDED).loss
    torch.testing.assert_close(found, reference(**PADDED, output_router_logits=False).loss)


def test_packed_rows_are_balanced_as_the_same_rows_in_a_batch(tmp_path):
    folder = save_family(tmp_path, "Qwen3-MoE")
    reference = plain(folder)
    expected = reference(input_ids=IDS, output_router_logits=True)
    places = torch.arange(20).repeat(3)[None]
    first = IDS.masked_fill(torch.arange(20) == 0, -100)
    packed = dict(input_ids=IDS.view(1, -1), position_ids=places, labels=first.view(1, -1))
    config = RunConfig(
        model_name=folder, train_type="full", precision="fp32", sharding_strategy="ddp",
        compile=False, packing=True, context_length=60, router_aux_loss_coef=COEFFICIENT,
    )  # fmt: skip
    with process_group(CPU, timeout_minutes=1):
        model = build_model(config, CPU).train()
        balanced, alone = model(**packed).loss, model.eval()(**packed).loss
    torch.testing.assert_close(
        balanced - alone, COEFFICIENT * expected.aux_loss, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("family", ["Qwen3-MoE", slow("gpt-oss")])
def test_a_runs_own_padding_and_fillers_count_for_nothing(family, tmp_path):
    """Its batches have no attention_mask, padded or packed."""
    folder = save_family(tmp_path, family)
    rows = [IDS[0], IDS[1, :12], IDS[2, :7]]
    mask = torch.tensor([[1] * len(row) + [0] * (20 - len(row)) for row in rows])
    expected = plain(folder)(
        input_ids=IDS * mask, attention_mask=mask, output_router_logits=True
    ).aux_loss
    config = RunConfig(
        model_name=folder, train_type="full", precision="fp32", sharding_strategy="ddp",
        compile=False, router_aux_loss_coef=COEFFICIENT, context_length=40,
    )  # fmt: skip
    with process_group(CPU, timeout_minutes=1):
        models = [build_model(replace(config, packing=packing), CPU) for packing in (False, True)]

    def added(share, packing: bool) -> torch.Tensor:
        collation = Collation(3, pad_token_id=5, packing=packing, pad_to=40, mark_tokens=True)
        batch, model = collation.batch(share, lambda i: (rows[i], rows[i])), models[packing]
        with torch.no_grad():
            return model.train()(**batch).loss - model.eval()(**batch).loss

    for share, packing in ([0, 1, 2], False), ([[0, 1], [2]], True):
        torch.testing.assert_close(
            added(share, packing), COEFFICIENT * expected, rtol=1e-4, atol=1e-5
        )
    assert added([], False) == 0 and added([], True) == 0


@pytest.mark.parametrize("family", [None, "Granite 3 MoE"])
def test_models_without_such_a_loss_are_refused(family, tmp_path):
    folder = save_family(tmp_path, family) if family else save_tiny(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError) as refused:
        apply_router_balance(model, 0.01)
    assert str(refused.value) == (
        "--router_aux_loss_coef 0.01: transformers has no balance loss for "
        f"{type(model).__name__}; leave it out"
    )


def test_estimates_know_whose_routers_transformers_balances():
    found = set()
    for family in {**FAMILIES, **MOE_FAMILIES, **NEWER_FAMILIES}:
        config = family_config(family)
        try:
            check_router_balance(meta_model(config, torch.bfloat16), 0.1)
        except ValueError as refused:
            assert "--router_aux_loss_coef 0.1" in str(refused)
        else:
            found.add(config.model_type)
    assert found == BALANCED_EXPERTS


def test_ranks_that_share_rows_are_refused():
    with pytest.raises(ValueError, match="--router_aux_loss_coef balances the experts over whole"):
        RunConfig(router_aux_loss_coef=0.1, sequence_parallel=2, context_length=64)
