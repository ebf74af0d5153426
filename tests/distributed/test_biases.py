"""Biases trained beside adapters: as PEFT trains them, saved as PEFT saves and loads them."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdp_qlora.build import planned_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.export.merge import merge_adapter
from tests.distributed.test_lora_init import logits_of
from tests.distributed.test_parity import STEPS, assert_equal_run, build_and_train
from tests.families import save_family
from tests.ranks import run_ranks
from tests.tiny import padded_batch, reference_model, reference_run, save_tiny, with_lora

# Qwen2 has biases of q, k and v; of GPT-2's norms all have one, and its linear layers too.
CASES = [
    dict(model="qwen2", bias="all", train_type="lora", lora_target_modules="q_proj,down_proj"),
    dict(
        model="qwen2",
        bias="all",
        train_type="qlora",
        lora_target_modules="q_proj,down_proj",
        sharding_strategy="ddp",
    ),
    dict(
        model="qwen2",
        bias="lora_only",
        train_type="qlora",
        lora_target_modules="q_proj,v_proj",
        use_cpu_offload=True,
    ),
    dict(model="gpt2", bias="all", train_type="lora", lora_target_modules="c_attn"),
]
IN_BF16 = [
    dict(model="gpt2", bias="all", train_type=t, lora_target_modules="c_attn", precision="bf16")
    for t in ("lora", "qlora")
]


def train_and_save(cases: list[dict], out: str) -> list[dict]:
    from fsdp_qlora.export import save_trained

    results = []
    for i, case in enumerate(cases):
        _, model, trained = build_and_train(case)
        results.append(trained)
        batch = padded_batch(STEPS[0])
        with torch.no_grad():
            results[-1]["logits"] = model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
            ).logits
        save_trained(model, f"{out}/{i}")
    return results


def without_noise(weights: dict) -> dict:
    """Weights but the bias of GPT-2's keys: no score depends on it, and AdamW moves it by rounding."""
    for name, tensor in weights.items():
        if name.endswith("c_attn.base_layer.bias"):
            tensor[64:128] = 0
    return weights


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_biases_equal_pefts_in_one_process_and_load_there(tmp_path):
    folders = dict(
        qwen2=save_tiny(tmp_path / "qwen2", "qwen2"), gpt2=save_family(tmp_path / "gpt2", "GPT-2")
    )
    cases = [
        {k: v for k, v in c.items() if k != "model"} | dict(model_name=folders[c["model"]])
        for c in CASES + IN_BF16
    ]
    results = run_ranks(train_and_save, 2, cases, str(tmp_path))[0]
    for i, (case, result) in enumerate(zip(cases, results, strict=True)):
        saved = load_file(tmp_path / str(i) / "adapter_model.safetensors")
        if case.get("precision") == "bf16":  # which computes with biases as they were computed with
            assert {w.dtype for w in result["weights"].values()} == {torch.float32}
            assert abs(result["losses"][-1] - results[3]["losses"][-1]) < 0.05
            continue
        plain = AutoModelForCausalLM.from_pretrained(case["model_name"], dtype=torch.float32)
        start = (
            plain
            if case["train_type"] == "lora"
            else reference_model(case["model_name"], "qlora", targets=["q_proj"]).unload()
        )
        reference = with_lora(start, case["lora_target_modules"].split(","), bias=case["bias"])
        losses, norms, weights = reference_run(reference, STEPS)
        result["weights"], weights = without_noise(result["weights"]), without_noise(weights)
        assert_equal_run(result, (losses, norms, weights), 2e-5, case)
        reference.save_pretrained(tmp_path / "reference")
        assert saved.keys() == load_file(tmp_path / "reference/adapter_model.safetensors").keys()
        fresh = AutoModelForCausalLM.from_pretrained(case["model_name"], dtype=torch.float32)
        if case["train_type"] == "qlora":
            continue
        loaded = PeftModel.from_pretrained(fresh, tmp_path / str(i))
        torch.testing.assert_close(logits_of(loaded, STEPS), result["logits"], rtol=1e-5, atol=2e-5)
        merge_adapter(case["model_name"], tmp_path / str(i), tmp_path / f"merged-{i}", dtype="fp32")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"merged-{i}", dtype=torch.float32)
        torch.testing.assert_close(logits_of(merged, STEPS), result["logits"], rtol=1e-4, atol=2e-5)


def test_a_model_without_biases_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--bias all: the model has no such"):
        planned_model(RunConfig(model_name=save_tiny(tmp_path), bias="all"), torch.device("cpu"))
