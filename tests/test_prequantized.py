"""Checkpoints that come quantized: bitsandbytes' load bit-equal, fp8 as its numbers, others refused."""

import json
import shutil
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
from fsdp_qlora.export.merge_base import open_base
from fsdp_qlora.loading import Checkpoint
from fsdp_qlora.loading.bnb_4bit import packed_weights
from fsdp_qlora.quantization.absmax import decode_absmax, encode_absmax
from fsdp_qlora.quantization.quantize import QuantLinear

from .tiny import save_tiny

torch.set_num_threads(1)
CPU = torch.device("cpu")
IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(0))


def settings(folder, **changes) -> RunConfig:
    return RunConfig(
        **dict(model_name=str(folder), precision="fp32", device="cpu", lora_rank=2, compile=False)
        | changes
    )


def built(folder, **changes):
    with process_group(CPU):
        return build_model(settings(folder, **changes), CPU)


def save_quantized(folder, **choices) -> str:
    """A tiny model as transformers and bitsandbytes save it in 4 bits."""
    plain = save_tiny(folder / "plain", hidden_size=192, intermediate_size=320, head_dim=16)
    model = AutoModelForCausalLM.from_pretrained(
        plain,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, **dict(bnb_4bit_quant_type="nf4") | choices
        ),
    )
    model.save_pretrained(folder / "quantized")
    return str(folder / "quantized")


FORMS = {
    "nf4": dict(),
    "fp4": dict(bnb_4bit_quant_type="fp4"),
    "nested": dict(bnb_4bit_use_double_quant=True),
    "bf16 storage": dict(bnb_4bit_quant_storage=torch.bfloat16),
    "nested, fp32 storage, fp4": dict(
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="fp4",
        bnb_4bit_quant_storage=torch.float32,
    ),
    "some skipped": dict(llm_int8_skip_modules=["down_proj", "q_proj", "lm_head"]),
    "the head too": dict(llm_int8_skip_modules=["down_proj"]),
}


def quantized_layers(model) -> dict:
    return {
        n.removeprefix("base_model.model.").removesuffix(".base_layer"): m
        for n, m in model.named_modules()
        if isinstance(m, QuantLinear)
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks_of_rows", [2**22, 1000])  # whole weights, and a few rows at a time
def test_bytes_scales_and_values_are_those_of_bitsandbytes(
    tmp_path, monkeypatch, form, ranks_of_rows
):
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
        assert torch.equal(
            layer.weight.view(torch.uint8).flatten(), packed.view(torch.uint8).flatten()
        )
        assert torch.equal(layer.dequantize(torch.float32), dequantize_4bit(packed, state).float())
    with torch.no_grad():
        if "lm_head" in expected:
            head = expected["lm_head"].weight
            assert torch.equal(
                ours.get_base_model().lm_head.weight,
                dequantize_4bit(head.data, head.quant_state).float(),
            )
        torch.testing.assert_close(
            ours(IDS).logits, theirs.train()(IDS).logits, rtol=1e-5, atol=1e-5
        )


def test_scales_become_8_bits_as_any(tmp_path):
    folder = save_quantized(tmp_path, bnb_4bit_use_double_quant=True)
    plain, small = (quantized_layers(built(folder, absmax_dtype=d)) for d in ("fp32", "int8"))
    for name, layer in small.items():
        assert torch.equal(layer.weight.view(torch.uint8), plain[name].weight.view(torch.uint8))
        assert torch.equal(
            layer.absmax.view(torch.uint8), encode_absmax(plain[name].absmax.data).view(torch.uint8)
        )
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
    model = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    model.save_pretrained(tmp_path / "quantized")
    with pytest.raises(ValueError, match="proj.weight has rows of 72 values") as caught:
        planned_model(settings(tmp_path / "quantized"), CPU)
    assert "--model_name" in str(caught.value) and "\n" not in str(caught.value)


LAYER = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{LAYER}.quant_state.bitsandbytes__nf4"


def as_state(**changes):
    """Change entries of the JSON state of a weight; None takes one out."""

    def change(tensors):
        state = json.loads(bytes(tensors[STATE].tolist())) | changes
        text = json.dumps({k: v for k, v in state.items() if v is not None})
        tensors[STATE] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change


def in_part(part, function):
    """Change a tensor of the weight's state; None takes it out."""

    def change(tensors):
        name = f"{LAYER}{part}"
        tensors[name] = function(tensors[name])
        if tensors[name] is None:
            del tensors[name]

    return change


def cut(tensor):
    return tensor[:-1].clone()


def gone(tensor):
    return None


DAMAGED = {  # what is changed, and what the message says
    "absmax one short": (in_part(".absmax", cut), ".absmax is "),
    "absmax missing": (in_part(".absmax", gone), ".absmax is missing"),
    "absmax of 32-bit integers": (in_part(".absmax", lambda t: t.int()), ".absmax is torch.int32"),
    "another quant_map": (
        in_part(".quant_map", lambda t: t.flip(0)),
        ".quant_map holds other values",
    ),
    "quant_map short": (in_part(".quant_map", cut), ".quant_map is "),
    "quant_map missing": (in_part(".quant_map", gone), ".quant_map is missing"),
    "bytes short": (in_part("", cut), "q_proj.weight is "),
    "nested_absmax missing": (in_part(".nested_absmax", gone), ".nested_absmax is missing"),
    "nested_absmax short": (in_part(".nested_absmax", cut), ".nested_absmax is "),
    "another nested map": (in_part(".nested_quant_map", lambda t: t * 2), "map holds other values"),
    "nested map missing": (in_part(".nested_quant_map", gone), ".nested_quant_map is missing"),
    "offset missing": (as_state(nested_offset=None), "KeyError 'nested_offset'"),
    "offset NaN": (as_state(nested_offset=float("nan")), "nested_offset is not a number"),
    "offset a text": (as_state(nested_offset="x"), "is damaged"),
    "no nested state": (
        as_state(nested_offset=None, nested_blocksize=None, nested_dtype=None),
        "is damaged",
    ),
    "shape missing": (as_state(shape=None), "KeyError 'shape'"),
    "shape of floats": (as_state(shape=[192.0, 192.0]), "whole numbers belong"),
    "shape of another": (as_state(shape=[384, 192]), "q_proj.weight is "),
    "blocksize a float": (as_state(blocksize=64.0), "whole numbers belong"),
    "no dtype": (as_state(dtype="nn"), "it has no dtype"),
    "another quant_type": (as_state(quant_type="fp4"), "quant_type is fp4"),
    "state no JSON": (in_part(STATE.removeprefix(LAYER), lambda t: t[:9].clone()), "is damaged"),
}


@pytest.fixture(scope="module")
def nested_checkpoint(tmp_path_factory):
    return save_quantized(tmp_path_factory.mktemp("nested"), bnb_4bit_use_double_quant=True)


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_4_bit_state_is_refused_with_its_layer_and_sizes(
    nested_checkpoint, tmp_path, fault
):
    """Some trained on other weights in silence, some ended in a traceback."""
    change, part = DAMAGED[fault]
    folder = shutil.copytree(nested_checkpoint, tmp_path / "damaged")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for read in (
        lambda: planned_model(settings(folder), CPU),
        lambda: packed_weights(Checkpoint(folder)),
    ):
        with pytest.raises(ValueError) as caught:
            read()
        message = str(caught.value)
        assert part in message and LAYER in message and "\n" not in message, message


@pytest.mark.parametrize(
    "kind, config",
    [
        ("bitsandbytes", dict(quant_method="bitsandbytes", load_in_4bit=True)),
        ("fp8", dict(quant_method="fp8", weight_block_size=[64, 64])),
        ("fp8", dict(quant_method="fp8", activation_scheme="static")),
        ("MXFP4", dict(quant_method="mxfp4")),
        ("GPTQ", dict(quant_method="gptq", bits=4)),
        ("AWQ", dict(quant_method="awq", bits=4)),
    ],
)
def test_a_quantization_whose_tensors_are_not_there_is_refused(tmp_path, kind, config):
    folder = save_tiny(tmp_path)
    declare(folder, **config)
    with pytest.raises(ValueError, match="config.json says .* in .* and the files hold") as caught:
        planned_model(settings(folder), CPU)
    assert "take quantization_config out" in str(caught.value) and kind in str(caught.value)


def without_quantization_config(folder):
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))


SCALED = {  # tensors in place of a weight W
    "fp8": lambda w: {"": w.to(torch.float8_e4m3fn)},
    "fp8 of the other kind": lambda w: {"": w.to(torch.float8_e5m2)},
    "int8": lambda w: {"": (w * 127).to(torch.int8)},
    "uint8": lambda w: {"": (w * 127).to(torch.uint8)},
    "int32": lambda w: {"": (w * 127).int()},
    "fp8, a scale for all": lambda w: {"": w.to(torch.float8_e4m3fn), "_scale": torch.ones(1)},
    "bf16 with scales beside": lambda w: {"": w.bfloat16(), "_scale_inv": torch.ones(1, 1)},
    "16 bits with LLM.int8()'s scales": lambda w: {"": w.half(), ".SCB": torch.ones(len(w))},
}


@pytest.mark.parametrize("train_type", ["qlora", "full"])
@pytest.mark.parametrize("form", SCALED)
def test_a_weight_whose_stored_values_are_not_its_numbers_is_refused(tmp_path, form, train_type):
    """Without their scales such weights trained, unscaled."""
    folder = save_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"{LAYER}{end}": t for end, t in SCALED[form](tensors[LAYER]).items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for read in (
        lambda: planned_model(settings(folder, train_type=train_type), CPU),
        lambda: open_base(folder),
    ):
        with pytest.raises(ValueError, match="q_proj.weight") as caught:
            read()
        assert "give the 16-bit model" in str(caught.value) and "shape (" in str(caught.value)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_4_bits_that_config_json_says_nothing_of_are_refused(tmp_path, storage):
    folder = save_quantized(tmp_path, bnb_4bit_quant_storage=storage)
    without_quantization_config(folder)
    with pytest.raises(ValueError, match="give the 16-bit model"):
        planned_model(settings(folder), CPU)


@pytest.mark.parametrize(
    "scale", [torch.ones(1, 1), torch.ones(2, 2), torch.ones(1), None, torch.ones(2, 1).int()]
)
def test_fp8_scales_of_other_sizes_are_refused_with_both(tmp_path, scale):
    folder, size = save_tiny(tmp_path), 48
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if "_proj.weight" in n]:
        tensors[name], tensors[f"{name}_scale_inv"] = in_fp8_blocks(tensors[name], size)
    name = "model.layers.0.self_attn.k_proj.weight"  # (32, 64): scales of (1, 2)
    del tensors[f"{name}_scale_inv"]
    if scale is not None:
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    declare(folder, quant_method="fp8", weight_block_size=[size, size])
    with pytest.raises(ValueError, match="k_proj.weight") as caught:
        planned_model(settings(folder), CPU)
    assert "(32, 64)" in str(caught.value) and (scale is None or "(1, 2)" in str(caught.value))


# ---- other kinds -------------------------------------------------------------------------------


def declare(folder, **quantization):
    """Write a quantization_config into config.json."""
    path = Path(folder) / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | dict(quantization_config=quantization))
    )


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
def test_fp8_weights_with_scales_per_block_are_loaded_as_their_numbers(
    tmp_path, monkeypatch, piece_values
):
    monkeypatch.setattr("fsdp_qlora.loading.stream.PIECE_VALUES", piece_values)
    folder, size = save_tiny(tmp_path), 48
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for name in [n for n in tensors if "_proj.weight" in n]:
        values, scale = in_fp8_blocks(tensors[name], size)
        tensors[name], tensors[f"{name}_scale_inv"] = values, scale
        wide = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
        expected[name] = values.float() * wide[: values.shape[0], : values.shape[1]]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    declare(folder, quant_method="fp8", weight_block_size=[size, size], activation_scheme="dynamic")
    model = built(folder, train_type="full")
    assert len(expected) == 14
    for name, weight in expected.items():
        assert torch.equal(model.get_parameter(name), weight)
    for name, layer in quantized_layers(built(folder)).items():
        linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        linear.weight.data = expected[f"{name}.weight"]
        assert torch.equal(
            layer.weight.view(torch.uint8), QuantLinear.from_linear(linear).weight.view(torch.uint8)
        )


@pytest.mark.parametrize(
    "quantization, kind",
    [
        (dict(quant_method="gptq", bits=3, group_size=128), "gptq in 3 bits"),
        (dict(quant_method="awq", bits=4, version="gemv"), "awq in 4 bits, version gemv"),
        (dict(quant_method="hqq"), "hqq"),
        (dict(quant_method="fbgemm_fp8"), "fbgemm_fp8"),
        (dict(quant_method="compressed-tensors", config_groups={}), "compressed-tensors"),
        (
            dict(
                quant_method="compressed-tensors",
                format="nvfp4-pack-quantized",
                config_groups=dict(group_0=dict(weights=dict(num_bits=4))),
            ),
            "compressed-tensors nvfp4-pack-quantized",
        ),
        (
            dict(
                quant_method="compressed-tensors",
                format="pack-quantized",
                config_groups=dict(a=dict(weights=dict(num_bits=3))),
            ),
            "compressed-tensors pack-quantized of 3 bits",
        ),
        (dict(quant_method="bitsandbytes", load_in_8bit=True), "bitsandbytes in 8 bits"),
        (dict(bits=4), "an unknown method"),
    ],
)
@pytest.mark.parametrize("train_type", ["qlora", "lora", "full"])
def test_weights_quantized_otherwise_are_refused_by_name(tmp_path, quantization, kind, train_type):
    folder = save_tiny(tmp_path)
    declare(folder, **quantization)
    with pytest.raises(ValueError) as caught:
        planned_model(settings(folder, train_type=train_type), CPU)
    message = str(caught.value)
    assert f"--model_name {folder}" in message and f"quantized with {kind}," in message
    assert "give the 16-bit model" in message and "\n" not in message
