"""Checkpoints that come quantized: bitsandbytes' load bit-equal, fp8 as its numbers, others refused."""
import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fsdp_qlora.build import build_model, planned_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.quantization.absmax import decode_absmax, encode_absmax
from fsdp_qlora.quantization.quantize import QuantLinear

from .tiny import save_tiny

torch.set_num_threads(1)
CPU = torch.device("cpu")
IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(0))


def settings(folder, **changes) -> RunConfig:
    return RunConfig(**dict(model_name=str(folder), precision="fp32", device="cpu", lora_rank=2,
                            compile=False) | changes)


def built(folder, **changes):
    with process_group(CPU): return build_model(settings(folder, **changes), CPU)


def save_quantized(folder, **choices) -> str:
    """A tiny model as transformers and bitsandbytes save it in 4 bits."""
    plain = save_tiny(folder / "plain", hidden_size=192, intermediate_size=320, head_dim=16)
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, **dict(bnb_4bit_quant_type="nf4") | choices))
    model.save_pretrained(folder / "quantized")
    return str(folder / "quantized")


FORMS = {
    "nf4": dict(), "fp4": dict(bnb_4bit_quant_type="fp4"),
    "nested": dict(bnb_4bit_use_double_quant=True),
    "bf16 storage": dict(bnb_4bit_quant_storage=torch.bfloat16),
    "nested, fp32 storage, fp4": dict(bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="fp4",
                                      bnb_4bit_quant_storage=torch.float32),
    "some skipped": dict(llm_int8_skip_modules=["down_proj", "q_proj", "lm_head"]),
    "the head too": dict(llm_int8_skip_modules=["down_proj"]),
}


def quantized_layers(model) -> dict:
    return {n.removeprefix("base_model.model.").removesuffix(".base_layer"): m
            for n, m in model.named_modules() if isinstance(m, QuantLinear)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks_of_rows", [2**22, 1000])  # whole weights, and a few rows at a time
def test_bytes_scales_and_values_are_those_of_bitsandbytes(tmp_path, monkeypatch, form, ranks_of_rows):
    folder = save_quantized(tmp_path, **FORMS[form])
    monkeypatch.setattr("fsdp_qlora.loading.stream.PIECE_VALUES", ranks_of_rows)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = built(folder, quant="fp4" if "fp4" in form else "nf4")
    found = quantized_layers(ours)
    expected = {n: m for n, m in theirs.named_modules() if isinstance(m, Linear4bit)}
    assert found.keys() == expected.keys() - {"lm_head"} and len(found) >= 10
    assert ("lm_head" in expected) == (form == "the head too")
    for name, layer in found.items():
        packed, state = expected[name].weight.data, expected[name].weight.quant_state
        assert torch.equal(layer.weight.view(torch.uint8).flatten(), packed.view(torch.uint8).flatten())
        assert torch.equal(layer.dequantize(torch.float32), dequantize_4bit(packed, state).float())
    with torch.no_grad():
        if "lm_head" in expected:
            head = expected["lm_head"].weight
            assert torch.equal(ours.get_base_model().lm_head.weight,
                               dequantize_4bit(head.data, head.quant_state).float())
        torch.testing.assert_close(ours(IDS).logits, theirs.train()(IDS).logits, rtol=1e-5, atol=1e-5)


def test_scales_become_8_bits_as_any(tmp_path):
    folder = save_quantized(tmp_path, bnb_4bit_use_double_quant=True)
    plain, small = (quantized_layers(built(folder, absmax_dtype=d)) for d in ("fp32", "int8"))
    for name, layer in small.items():
        assert torch.equal(layer.weight.view(torch.uint8), plain[name].weight.view(torch.uint8))
        assert torch.equal(layer.absmax.view(torch.uint8),
                           encode_absmax(plain[name].absmax.data).view(torch.uint8))
        assert decode_absmax(layer.absmax, layer.in_features // 64).isfinite().all()


def test_without_quantization_the_weights_are_the_numbers_that_the_4_bits_stand_for(tmp_path):
    folder = save_quantized(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = built(folder, train_type="full")
    for name, layer in theirs.named_modules():
        if isinstance(layer, Linear4bit):
            values = dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
            assert torch.equal(ours.get_submodule(name).weight, values)
    assert not hasattr(ours.config, "quantization_config")  # what is saved later is not in 4 bits


def test_another_format_than_the_checkpoints_is_refused_with_the_right_one(tmp_path):
    folder = save_quantized(tmp_path)
    with pytest.raises(ValueError, match="--quant fp4: .* stored as nf4; use --quant nf4"):
        planned_model(settings(folder, quant="fp4"), CPU)


def test_the_cache_is_said_to_have_no_effect(tmp_path, capfd):
    built(save_quantized(tmp_path), quantized_cache=str(tmp_path / "cache"))
    assert "--quantized_cache has no effect" in capfd.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_rows_that_are_not_whole_blocks_are_refused_by_name(tmp_path):
    plain = save_tiny(tmp_path / "plain", hidden_size=72, intermediate_size=128)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4"))
    model.save_pretrained(tmp_path / "quantized")
    with pytest.raises(ValueError, match="proj.weight has rows of 72 values") as caught:
        planned_model(settings(tmp_path / "quantized"), CPU)
    assert "--model_name" in str(caught.value) and "\n" not in str(caught.value)


# ---- other kinds -------------------------------------------------------------------------------

def declare(folder, **quantization):
    """Write a quantization_config into config.json."""
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(quantization_config=quantization)))


def in_fp8_blocks(weight: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight in fp8 with a float32 scale for each block of size x size."""
    rows, columns = (-(-n // size) for n in weight.shape)
    scale = torch.empty(rows, columns)
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for r in range(rows):
        for c in range(columns):
            block = (slice(r * size, (r + 1) * size), slice(c * size, (c + 1) * size))
            scale[r, c] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scale[r, c]).to(torch.float8_e4m3fn)
    return values, scale


@pytest.mark.parametrize("piece_values", [2**22, 1000])
def test_fp8_weights_with_scales_per_block_are_loaded_as_their_numbers(tmp_path, monkeypatch,
                                                                       piece_values):
    monkeypatch.setattr("fsdp_qlora.loading.stream.PIECE_VALUES", piece_values)
    folder, size = save_tiny(tmp_path), 48
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for name in [n for n in tensors if "_proj.weight" in n]:
        values, scale = in_fp8_blocks(tensors[name], size)
        tensors[name], tensors[f"{name}_scale_inv"] = values, scale
        wide = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
        expected[name] = values.float() * wide[:values.shape[0], :values.shape[1]]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    declare(folder, quant_method="fp8", weight_block_size=[size, size], activation_scheme="dynamic")
    model = built(folder, train_type="full")
    assert len(expected) == 14
    for name, weight in expected.items(): assert torch.equal(model.get_parameter(name), weight)
    for name, layer in quantized_layers(built(folder)).items():
        linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        linear.weight.data = expected[f"{name}.weight"]
        assert torch.equal(layer.weight.view(torch.uint8),
                           QuantLinear.from_linear(linear).weight.view(torch.uint8))


@pytest.mark.parametrize("quantization, kind", [
    (dict(quant_method="gptq", bits=4, group_size=128), "gptq"),
    (dict(quant_method="awq", bits=4, group_size=128), "awq"),
    (dict(quant_method="mxfp4"), "mxfp4"),
    (dict(quant_method="compressed-tensors", config_groups={}), "compressed-tensors"),
    (dict(quant_method="bitsandbytes", load_in_8bit=True), "bitsandbytes in 8 bits"),
    (dict(quant_method="fp8", activation_scheme="static"), "fp8 without blocks"),
    (dict(bits=4), "an unknown method")])
@pytest.mark.parametrize("train_type", ["qlora", "lora", "full"])
def test_weights_quantized_otherwise_are_refused_by_name(tmp_path, quantization, kind, train_type):
    folder = save_tiny(tmp_path)
    declare(folder, **quantization)
    with pytest.raises(ValueError) as caught:
        planned_model(settings(folder, train_type=train_type), CPU)
    message = str(caught.value)
    assert f"--model_name {folder}" in message and f"quantized with {kind}," in message
    assert "give the 16-bit model" in message and "\n" not in message
