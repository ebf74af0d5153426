"""Every family of `tests.families` on two ranks equals one process of transformers, PEFT, bitsandbytes.

Of each: logits after the streamed load, then losses, gradient norms and adapters of three steps, on
plain weights and on NF4. All families share one spawn.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.distributed.test_parity import assert_equal_run, relative, train_model
from tests.families import FAMILIES, MOE_FAMILIES, save_family
from tests.parts import slow
from tests.ranks import run_ranks
from tests.tiny import RANK, SEED, padded_batch, reference_run, tiny_rows, with_lora

STEPS = tiny_rows(steps=3, rows_per_step=4)
SEEN = padded_batch(tiny_rows(1, 3, seed=11)[0])
ATTENTION = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
]  # experts are no linear layers, and stay frozen
CASES = [(family, kind) for family in (*FAMILIES, *MOE_FAMILIES) for kind in ("lora", "qlora")]
# Those of which another has all that sets them apart.
REPEATED = (
    "Llama 2",
    "CodeLlama",
    "Yi",
    "Llama 3",
    "Llama 3.1",
    "SmolLM2",
    "Qwen2.5",
    "Gemma",
    "Phi-4",
)
QUICK = [(family, kind) for family, kind in CASES if kind == "qlora" and family not in REPEATED]


def inputs() -> dict:
    return dict(input_ids=SEEN["input_ids"], attention_mask=SEEN["attention_mask"])


def train_families(folders: dict[str, str], cases: list[tuple]) -> dict:
    """(family, kind) -> logits at load and what training gave, or the refusal."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig

    results = {}
    for family, kind in cases:
        config = RunConfig(
            model_name=folders[family],
            train_type=kind,
            precision="fp32",
            lora_rank=RANK,
            lora_alpha=8,
            lora_dropout=0.0,
            seed=SEED,
        )
        model = build_model(config, torch.device("cpu"))
        with torch.no_grad():
            logits = model(**inputs()).logits
        results[family, kind] = dict(logits=logits) | train_model(model, STEPS)
    return results


def reference(folder: str, family: str, kind: str):
    """The same in one process, without a line of this project but the adapters' first values."""
    quantization = (
        None
        if kind == "lora"
        else BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    )
    attention = "eager" if family == "Gemma 2" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=quantization, attn_implementation=attention
    )
    if kind == "qlora":
        round_experts(model)
    return with_lora(model, ATTENTION if family in MOE_FAMILIES else "all-linear")


@torch.no_grad()
def round_experts(model):
    """Give each expert's weights what bitsandbytes' 4 bits stand for, which leaves experts alone."""
    for p in model.parameters():
        if p.dim() != 3:
            continue
        for weight in p:
            weight.copy_(dequantize_4bit(*quantize_4bit(weight.data, quant_type="nf4")))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        family: save_family(tmp_path_factory.mktemp("family"), family)
        for family in (*FAMILIES, *MOE_FAMILIES)
    }


@pytest.fixture(scope="module")
def by_rank(folders):
    """What each rank gave for the quick cases and for the others, when they are asked for."""

    @cache
    def trained(is_quick: bool) -> list[dict]:
        cases = [case for case in CASES if (case in QUICK) == is_quick]
        return run_ranks(train_families, 2, folders, cases)

    return trained


@pytest.mark.parametrize(
    "family, kind",
    [case if case in QUICK else slow(*case) for case in CASES],
    ids=lambda v: v.replace(" ", ""),
)
def test_two_ranks_equal_transformers_in_one_process(folders, by_rank, family, kind):
    model = reference(folders[family], family, kind)
    with torch.no_grad():
        logits = model(**inputs()).logits
    ours, other = (results[family, kind] for results in by_rank((family, kind) in QUICK))
    assert relative(ours["logits"], logits) < 1e-5
    assert_equal_run(ours, reference_run(model, STEPS), 2e-5, family)
    assert ours["checksums"] == other["checksums"]
