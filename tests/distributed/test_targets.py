"""Adapters go where they are asked to go, and their names on disk are PEFT's whatever was wrapped.

Fused projections differ by family, so a list of targets made for one model finds less, or nothing,
in another; the head is a linear layer that nobody means by "all".
"""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdp_qlora.adapters import adapter_counts
from fsdp_qlora.build import planned_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.quantization.quantize import QuantLinear
from tests.ranks import run_ranks
from tests.tiny import padded_batch, save_tiny, tiny_rows

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PHI3 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
FOUND = {
    ("llama", "all-linear"): LLAMA,
    ("phi3", "all-linear"): PHI3,
    ("llama", "q_proj"): ["q_proj"],
    ("phi3", "qkv_proj"): ["qkv_proj"],
    ("llama", "lm_head"): ["lm_head"],
    ("phi3", "lm_head,qkv_proj"): ["lm_head", "qkv_proj"],
    ("llama", "default"): ["q_proj", "v_proj"],
}
NOT_FOUND = [
    ("llama", "qkv_proj", LLAMA),
    ("phi3", "q_proj", PHI3),
    ("phi3", "all", PHI3),
    ("llama", "q_porj", LLAMA),
    ("phi3", "qkv_proj,gate_proj", PHI3),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        family: save_tiny(
            tmp_path_factory.mktemp(family),
            family,
            **(dict(pad_token_id=0) if family == "phi3" else {}),
        )
        for family in ("llama", "phi3")
    }


def settings(folder: str, targets: str, **more) -> RunConfig:
    return RunConfig(
        **dict(
            model_name=folder,
            lora_target_modules=targets,
            precision="fp32",
            lora_rank=2,
            lora_dropout=0.0,
        )
        | more
    )


@pytest.mark.parametrize("family, targets", FOUND)
def test_each_name_is_adapted_in_every_block_and_the_head_only_on_request(folders, family, targets):
    model, _ = planned_model(settings(folders[family], targets), torch.device("cpu"))
    names = FOUND[family, targets]
    assert adapter_counts(model) == {n: 1 if n == "lm_head" else 2 for n in names}
    quantized = {
        n.split(".")[-1] if not n.endswith("base_layer") else n.split(".")[-2]
        for n, m in model.named_modules()
        if isinstance(m, QuantLinear)
    }
    assert quantized == set(LLAMA if family == "llama" else PHI3)  # never the head


@pytest.mark.parametrize("family, targets, candidates", NOT_FOUND)
def test_a_name_of_another_family_or_a_typo_lists_the_names_there_are(
    folders, family, targets, candidates
):
    with pytest.raises(ValueError) as caught:
        planned_model(settings(folders[family], targets), torch.device("cpu"))
    message = str(caught.value)
    assert "--lora_target_modules" in message and "\n" not in message
    assert all(name in message for name in (*candidates, "lm_head")), message


# ---- names on disk -----------------------------------------------------------------------------

CASES = [
    ("llama", "all-linear", dict(compile=True)),
    ("llama", "lm_head,q_proj", {}),
    ("phi3", "all-linear", dict(reentrant_checkpointing=True)),
    ("phi3", "qkv_proj", {}),
    ("llama", "all-linear", dict(sharding_strategy="ddp", compile=True)),
]


def save_untrained(cases, out: str) -> list[torch.Tensor]:
    """Build with checkpointing, sharding and compile, give B values, save; the live logits."""
    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.dist import local_rows
    from fsdp_qlora.export import save_trained

    logits = []
    for i, (folder, targets, more) in enumerate(cases):
        for compiled in (False, True) if more.get("compile") else (False,):
            config = settings(folder, targets, train_type="lora", **more | dict(compile=compiled))
            model = build_model(config, torch.device("cpu"))
            for name, p in trainable_parameters(model).items():
                if ".lora_B." in name:
                    local_rows(p)[0].fill_(0.1)
            save_trained(model, f"{out}/{i}{'c' if compiled else ''}")
            if compiled:
                continue  # its forward would be compiled first
            with torch.no_grad():
                batch = padded_batch(tiny_rows(1, 2)[0])
                logits.append(
                    model(
                        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
                    ).logits
                )
    return logits


def test_saved_names_are_pefts_after_checkpointing_sharding_and_compile(folders, tmp_path):
    cases = [(folders[family], targets, more) for family, targets, more in CASES]
    logits = run_ranks(save_untrained, 2, cases, str(tmp_path))[0]
    for i, (folder, targets, more) in enumerate(cases):
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = targets if targets == "all-linear" else targets.split(",")
        get_peft_model(
            plain, LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=16, target_modules=wanted)
        ).save_pretrained(tmp_path / "peft", save_embedding_layers=False)
        expected = load_file(tmp_path / "peft" / "adapter_model.safetensors")
        for folder_name in (f"{i}", *([f"{i}c"] if "compile" in more else [])):
            saved = load_file(tmp_path / folder_name / "adapter_model.safetensors")
            assert {n: t.shape for n, t in saved.items()} == {
                n: t.shape for n, t in expected.items()
            }
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reloaded = PeftModel.from_pretrained(base, tmp_path / f"{i}").eval()
        batch = padded_batch(tiny_rows(1, 2)[0])
        with torch.no_grad():
            found = reloaded(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
        torch.testing.assert_close(found, logits[i], rtol=1e-4, atol=1e-5)
