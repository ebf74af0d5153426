"""GPT-2's transposed layers are ordinary ones here, and what is written is what transformers writes."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from fsdp_qlora import apply_adapters, lora_config, quantize_linears
from fsdp_qlora.commands.generate import load_for_inference
from fsdp_qlora.export.merge import merge_adapter
from fsdp_qlora.loading import meta_model
from fsdp_qlora.model.conv1d import apply_plain_linears, transposed_weights

from .families import family_config, save_family
from .ranks import run_ranks
from .test_merge import save_adapter

IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_family(tmp_path_factory.mktemp("gpt2"), "GPT-2")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_loaded_model_computes_the_same_with_plain_layers(folder):
    model = plain(folder)
    expected, trained = logits(model), model.transformer.h[0].mlp.c_fc.weight.requires_grad
    apply_plain_linears(model)
    assert not any(isinstance(m, Conv1D) for m in model.modules())
    torch.testing.assert_close(logits(model), expected)
    assert model.transformer.h[0].mlp.c_fc.weight.requires_grad == trained


@pytest.mark.parametrize("targets", ["all-linear", ["c_attn", "c_proj", "c_fc"]])
def test_a_model_that_transformers_loaded_is_adapted_as_plain_peft_adapts_it(
    folder, targets, tmp_path
):
    names = ["c_attn", "c_proj", "c_fc"]
    config = LoraConfig(r=2, target_modules=names, fan_in_fan_out=True, init_lora_weights=False)
    expected = get_peft_model(plain(folder), config)
    model = apply_adapters(plain(folder), lora_config(rank=2, alpha=8, target_modules=targets))
    assert get_peft_model_state_dict(model).keys() == get_peft_model_state_dict(expected).keys()
    set_peft_model_state_dict(model, get_peft_model_state_dict(expected))
    torch.testing.assert_close(logits(model), logits(expected))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    torch.testing.assert_close(logits(model.merge_and_unload()), logits(expected))


def test_a_loaded_model_with_transposed_layers_is_not_left_unquantized(folder):
    with pytest.raises(ValueError, match="make the model with meta_model"):
        quantize_linears(plain(folder))


def test_names_of_transposed_weights_are_kept_on_meta():
    found = transposed_weights(meta_model(family_config("GPT-2"), torch.float32))
    assert len(found) == 8 and "transformer.h.1.attn.c_proj.weight" in found
    assert not transposed_weights(meta_model(family_config("Llama 2"), torch.float32))


def build_and_save(folder: str, out: str) -> dict:
    """Logits of a model for full training and of one with adapters, and their folders."""
    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import local_rows
    from fsdp_qlora.export import save_trained

    found = {}
    for kind in ("full", "lora"):
        model = build_model(
            RunConfig(model_name=folder, train_type=kind, precision="fp32", lora_rank=2),
            torch.device("cpu"),
        ).eval()
        for p in trainable_parameters(model).values():
            local_rows(p)[0].mul_(1.1).add_(0.01)
        with torch.no_grad():
            found[kind] = model(input_ids=IDS).logits
        save_trained(model, f"{out}/{kind}")
    return found


def test_what_is_saved_loads_in_transformers_and_peft_without_a_word(folder, tmp_path):
    live = run_ranks(build_and_save, 2, folder, str(tmp_path))[0]
    names = load_file(f"{folder}/model.safetensors").keys()
    assert load_file(tmp_path / "full" / "model.safetensors").keys() == names
    torch.testing.assert_close(logits(plain(tmp_path / "full")), live["full"], rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reloaded = PeftModel.from_pretrained(plain(folder), tmp_path / "lora")
    torch.testing.assert_close(logits(reloaded), live["lora"], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_merge_rounds_the_base_as_training_did(folder, tmp_path):
    adapter = save_adapter(
        folder,
        tmp_path / "adapter",
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
    )
    trained = load_for_inference(folder, adapter, "nf4", "cpu", torch.float32)
    merged = merge_adapter(
        folder,
        adapter,
        tmp_path / "merged",
        merge_base="dequantized",
        base_quant="nf4",
        dtype="fp32",
    )
    torch.testing.assert_close(logits(plain(merged)), logits(trained), rtol=1e-4, atol=1e-4)
    assert (logits(plain(folder)) - logits(trained)).norm() > 0.05 * logits(trained).norm()


def test_a_base_written_in_4_bits_is_what_bitsandbytes_makes_of_it(folder, tmp_path):
    from transformers import BitsAndBytesConfig

    made = merge_adapter(folder, None, tmp_path / "bnb4", merge_format="bnb4", dtype="fp32")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    expected = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=quantization
    )
    torch.testing.assert_close(logits(plain(made)), logits(expected))
