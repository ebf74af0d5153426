"""Each model type once: loaded, trained and merged in one process as transformers, PEFT, bitsandbytes do.

The quick part of `tests/distributed/test_families.py`, which takes all of them through two ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_qlora.build import build_model
from fsdp_qlora.catalog.families import TESTED_TYPES
from fsdp_qlora.commands.generate import load_for_inference
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.export import save_trained
from fsdp_qlora.export.merge import merge_adapter
from fsdp_qlora.loading import meta_model
from fsdp_qlora.model.attention import choose_attention
from fsdp_qlora.model.packing_probe import keep_rows_apart

from .distributed.test_parity import assert_equal_run, relative, train_model
from .families import EVERY_FAMILY, attention_of, family_config, reference, save_family
from .parts import rest
from .tiny import RANK, SEED, padded_batch, reference_run, tiny_rows

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from families_page import with_tables  # noqa: E402

CPU = torch.device("cpu")
STEPS = tiny_rows(steps=2, rows_per_step=2)
SEEN = padded_batch(tiny_rows(1, 3, seed=11)[0])
INPUTS = {name: SEEN[name] for name in ("input_ids", "attention_mask")}
# Llama's code under other names, and other numbers in config.json: the slow matrix trains them too.
ALIKE = ("CodeLlama", "Yi", "Llama 3", "Llama 3.1", "SmolLM2", "Qwen2.5", "Phi-4", "Phi-4-mini")
# Of each way to build a block one.
DIFFERENT = (
    "Llama 3.2", "Gemma 2", "GPT-2", "Mixtral", "Qwen3.5-MoE", "Granite 4 H", "Gemma 4", "Nemotron 3",
    "Llama 4", "gpt-oss", "DeepSeek V3", "Phi-3",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with process_group(CPU, timeout_minutes=1):
        yield


def logits_of(model) -> torch.Tensor:
    """Of the rows' own tokens (N, V); what a model makes of padding means nothing."""
    with torch.no_grad():
        return model(**INPUTS, use_cache=False).logits[INPUTS["attention_mask"].bool()]


@pytest.mark.parametrize(
    "family", [f if f in DIFFERENT else rest(f) for f in EVERY_FAMILY if f not in ALIKE]
)
def test_it_trains_on_nf4_as_transformers_does_and_merges_into_a_model_with_its_logits(
    family, tmp_path
):
    folder = save_family(tmp_path / "base", family)
    config = RunConfig(
        model_name=folder, train_type="qlora", precision="fp32", lora_rank=RANK, lora_alpha=8,
        lora_dropout=0.0, seed=SEED,
    )  # fmt: skip
    ours, theirs = build_model(config, CPU), reference(folder, family, "qlora")
    assert relative(logits_of(ours), logits_of(theirs)) < 1e-5
    assert_equal_run(train_model(ours, STEPS), reference_run(theirs, STEPS), 2e-5, family)
    save_trained(ours, tmp_path / "adapter")
    merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged", base_quant="nf4", dtype="fp32")
    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, attn_implementation=attention_of(family)
    )
    assert relative(logits_of(merged.eval()), logits_of(ours.eval())) < 1e-4


@pytest.mark.parametrize("family", ["gpt-oss", "Nemotron 3", "Granite 4 H"])
def test_a_model_that_generates_is_rounded_as_it_was_trained(family, tmp_path):
    folder = save_family(tmp_path, family)
    config = RunConfig(model_name=folder, train_type="qlora", precision="fp32", lora_rank=RANK)
    trained = logits_of(build_model(config, CPU).eval())  # an adapter begins as nothing
    model = load_for_inference(folder, quant="nf4", dtype=torch.float32)
    assert relative(logits_of(model.eval()), trained) < 1e-4


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_packed_rows_of_every_family_are_kept_apart_on_its_own_code(family):
    config = family_config(family)
    used, _ = choose_attention("auto", True, config, CPU, torch.float32)
    keep_rows_apart(meta_model(config, torch.float32, used))


def test_the_page_has_the_table_of_these_tests():
    page = (ROOT / "docs/families.md").read_text()
    assert with_tables(page) == page, "run python scripts/families_page.py"


def test_the_types_that_are_not_tried_before_a_run_are_those_that_are_tested_here():
    assert TESTED_TYPES == {fields["model_type"] for fields in EVERY_FAMILY.values()}
    assert len(TESTED_TYPES) >= 45
