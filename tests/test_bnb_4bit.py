"""Checkpoints in bitsandbytes' 4-bit format: transformers loads them, and merging reads them."""

from __future__ import annotations

import json

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fsdp_qlora.export.merge import merge_adapter

from .test_merge import IDS, live_logits, logits, save_adapter
from .tiny import save_tiny

NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def bnb_weights(model) -> dict[str, torch.Tensor]:
    """The packed bytes and scales of every 4-bit layer."""
    layers = {name: m.weight for name, m in model.named_modules() if isinstance(m, Linear4bit)}
    return {
        f"{name}.{part}": tensor
        for name, w in layers.items()
        for part, tensor in (("weight", w.data), ("absmax", w.quant_state.absmax))
    }


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_base_in_4_bits_is_what_transformers_and_bitsandbytes_make_of_it(tmp_path, family, tied):
    base = save_tiny(tmp_path / "base", family, tie_word_embeddings=tied)
    folder = merge_adapter(base, None, tmp_path / "nf4", merge_format="bnb4")
    assert "quantization_config" in json.loads((folder / "config.json").read_text())
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    made = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(**NF4)
    )
    mine, theirs = bnb_weights(loaded), bnb_weights(made)
    assert mine.keys() == theirs.keys() and len(mine) == 2 * 14
    for name in mine:
        assert torch.equal(mine[name].flatten(), theirs[name].flatten()), name
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, made(IDS).logits)


def test_a_merged_model_in_4_bits_is_the_merged_model_quantized_by_transformers(tmp_path):
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    packed = AutoModelForCausalLM.from_pretrained(
        merge_adapter(base, adapter, tmp_path / "nf4", merge_format="bnb4")
    )
    made = AutoModelForCausalLM.from_pretrained(
        merge_adapter(base, adapter, tmp_path / "whole"),
        quantization_config=BitsAndBytesConfig(**NF4),
    )
    for name, tensor in bnb_weights(made).items():
        assert torch.equal(bnb_weights(packed)[name].flatten(), tensor.flatten()), name


@pytest.mark.parametrize("double", [False, True])
def test_an_adapter_is_merged_into_a_base_that_is_stored_in_4_bits(tmp_path, capsys, double):
    """The checkpoint is one that bitsandbytes saved itself, with and without quantized scales."""
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(**NF4, bnb_4bit_use_double_quant=double),
    )
    model.save_pretrained(tmp_path / "nf4")
    written = {
        name: dequantize_4bit(m.weight.data, m.weight.quant_state)
        for name, m in model.named_modules()
        if isinstance(m, Linear4bit)
    }
    folder = merge_adapter(str(tmp_path / "nf4"), adapter, tmp_path / "merged", dtype="fp32")
    assert "stored in 4 bits" in capsys.readouterr().out
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    merged = load_file(folder / "model.safetensors")
    lora = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name, weight in written.items():
        a, b = (lora[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(merged[f"{name}.weight"], weight + 2.5 * b @ a)
    assert merged.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    assert (logits(folder) - live_logits(base, adapter)).norm() > 0
    with pytest.raises(ValueError, match="--merge_base original.*4-bit weights only"):
        merge_adapter(str(tmp_path / "nf4"), adapter, tmp_path / "other", merge_base="original")
