"""Adapters in some blocks alone, and full fine-tuning of some modules alone: as in one process."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from fsdp_qlora.config import RunConfig
from fsdp_qlora.lora_init import initial_a
from tests.distributed.test_load_and_save import train_and_save
from tests.distributed.test_lora_init import logits_of
from tests.distributed.test_parity import STEPS, assert_equal_run, train_cases
from tests.parts import rest
from tests.ranks import run_ranks
from tests.tiny import RANK, SEED, TARGETS, reference_model, reference_run, save_tiny

PLACES = [
    dict(sharding_strategy="full_shard"),
    dict(sharding_strategy="ddp"),
    dict(sharding_strategy="full_shard", use_cpu_offload=True),
    dict(sharding_strategy="shard_grad_op", use_gradient_checkpointing=False),
    dict(reentrant_checkpointing=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


def adapted(folder: str, train_type: str, blocks: list[int]):
    """PEFT's model with adapters in some blocks, and our first values."""
    base = reference_model(folder, train_type).unload()
    model = get_peft_model(
        base,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=RANK,
            lora_alpha=8,
            target_modules=TARGETS,
            layers_to_transform=blocks,
        ),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_A." in name:
                p.copy_(initial_a(name, SEED, p.shape))
    return model.train()


BLOCKS = {("lora", "1-2"): [1, 2], ("qlora", "0"): [0], ("qlora", "2"): [2]}
MODULES = {
    "layers.2,norm,lm_head": ("layers.2.", "model.norm.", "lm_head"),
    "embed_tokens,mlp": ("embed_tokens", ".mlp."),
    "layers.0": ("layers.0.",),
}


def once_or_everywhere(chosen) -> list:
    """Each choice in a place of its own; for `make test-rest` in all places."""
    every = [(choice, place) for choice in chosen for place in PLACES]
    return [every[:: len(PLACES) + 1], rest(every)]


@pytest.mark.parametrize("asked", once_or_everywhere(BLOCKS))
def test_adapters_in_some_blocks_train_as_pefts(folder, asked):
    cases = [dict(train_type=t, layers_to_transform=text) | place for (t, text), place in asked]
    results = run_ranks(train_cases, 2, folder, STEPS, cases)[0]
    references = {
        (t, text): reference_run(adapted(folder, t, blocks), STEPS)
        for (t, text), blocks in BLOCKS.items()
    }
    for (choice, _), case, result in zip(asked, cases, results, strict=True):
        assert_equal_run(result, references[choice], 1e-5, case)


@pytest.mark.parametrize("asked", once_or_everywhere(MODULES))
def test_chosen_modules_of_a_full_fine_tuning_train_as_in_one_process(folder, asked):
    cases = [dict(train_type="full", trained_modules=names) | place for names, place in asked]
    results = run_ranks(train_cases, 2, folder, STEPS, cases)[0]
    for case, result in zip(cases, results, strict=True):
        model = reference_model(folder, "full").requires_grad_(False)
        for name, p in model.named_parameters():
            if any(part in name for part in MODULES[case["trained_modules"]]):
                p.requires_grad_()
        assert_equal_run(result, reference_run(model, STEPS), 2e-5, case)


def test_what_is_saved_reloads_with_the_live_logits(folder, tmp_path):
    cases = [
        dict(train_type="lora", layers_to_transform="1"),
        dict(train_type="full", trained_modules="layers.1,lm_head"),
    ]
    live = run_ranks(train_and_save, 2, folder, str(tmp_path), cases, STEPS[:2])[0]
    assert json.loads((tmp_path / "0/adapter_config.json").read_text())["layers_to_transform"] == [
        1
    ]
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "1", dtype=torch.float32)
    changed = {name for name, p in whole.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {n for n in before if "layers.1." in n or "lm_head" in n}
    for model, logits in (
        (PeftModel.from_pretrained(base, tmp_path / "0"), live[0]),
        (whole, live[1]),
    ):
        torch.testing.assert_close(logits_of(model, STEPS), logits, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "settings, part",
    [
        (dict(layers_to_transform="0,3"), "no such block; choose from 0 to 2"),
        (dict(layers_to_transform="2-1"), "'2-1' is neither a number nor a range"),
        (dict(trained_modules="lm_head"), "use --modules_to_save"),
        (
            dict(train_type="full", trained_modules="layers.3"),
            "--trained_modules layers.3: no module's",
        ),
    ],
)
def test_a_wrong_choice_is_refused_by_name(folder, settings, part):
    from fsdp_qlora.build import planned_model

    with pytest.raises(ValueError) as error:
        planned_model(RunConfig(model_name=folder, **settings), torch.device("cpu"))
    assert part in str(error.value) and "\n" not in str(error.value)
