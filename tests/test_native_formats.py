"""Natively quantized bases load as the numbers that their formats' own code makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from fsdp_qlora.build import build_model, planned_model
from fsdp_qlora.commands.generate import load_for_inference
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.export import save_trained
from fsdp_qlora.export.merge import merge_adapter
from fsdp_qlora.loading import stream
from fsdp_qlora.quantization.quantize import QuantLinear

from .distributed.test_parity import assert_equal_run, relative, train_model
from .families import reference
from .native import MADE, declare, in_format
from .parts import rest, slow
from .ranks import run_ranks
from .tiny import RANK, SEED, reference_run, save_tiny, tiny_rows
from .wrappers import save_wrapped, whole_model

CPU = torch.device("cpu")
IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(0))
STEPS = tiny_rows(steps=3, rows_per_step=4)
SHAPE = dict(hidden_size=64, intermediate_size=96, head_dim=16)


def settings(folder, **changes) -> RunConfig:
    return RunConfig(
        **dict(model_name=str(folder), precision="fp32", device="cpu", lora_rank=2, compile=False)
        | changes
    )


def built(folder, **changes):
    return build_model(settings(folder, **changes), CPU)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def assert_near(ours: torch.Tensor, theirs: torch.Tensor):
    assert (ours - theirs).norm() < 1e-3 * theirs.norm()


def with_numbers(plain: str, numbers: dict[str, torch.Tensor]):
    """The plain model in transformers, with these weights."""
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in numbers.items():
            model.get_parameter(name).copy_(weight)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Kind -> (checkpoint in the format, what its weights stand for); "" is the plain one."""
    found = {"": (save_tiny(tmp_path_factory.mktemp("plain"), **SHAPE), {})}
    for kind in MADE:
        folder = save_tiny(tmp_path_factory.mktemp("native"), **SHAPE)
        found[kind] = folder, in_format(folder, kind)
    return found


def load_on_ranks(folders: dict) -> dict:
    """Kind -> logits of a LoRA and of an NF4 run, each rank with its rows."""
    found = {}
    for kind, (folder, _) in folders.items():
        for train_type in ("lora", "qlora"):
            model = built(folder, train_type=train_type, sharding_strategy="full_shard")
            found[kind, train_type] = logits_of(model)
    return found


@pytest.fixture(scope="module")
def on_ranks(folders):
    return run_ranks(load_on_ranks, 2, {k: v for k, v in folders.items() if k})


@pytest.mark.parametrize("kind", MADE)
def test_two_ranks_have_the_logits_of_the_formats_own_numbers_and_of_nf4_of_them(
    folders, on_ranks, kind, tmp_path
):
    model = with_numbers(folders[""][0], folders[kind][1])
    assert_near(on_ranks[0][kind, "lora"], logits_of(model))
    assert torch.equal(on_ranks[0][kind, "lora"], on_ranks[1][kind, "lora"])
    model.save_pretrained(tmp_path)  # the same in 16 bits or more, which NF4 is made of
    with process_group(CPU):
        nf4 = built(tmp_path, train_type="qlora")
    assert any(isinstance(m, QuantLinear) for m in nf4.modules())
    assert_near(on_ranks[0][kind, "qlora"], logits_of(nf4))


@pytest.mark.parametrize("kind", MADE)
def test_weights_that_stream_by_few_rows_are_those_of_whole_ones(folders, kind, monkeypatch):
    monkeypatch.setattr("fsdp_qlora.loading.stream.PIECE_VALUES", 5 * 64)
    folder, numbers = folders[kind]
    with process_group(CPU):
        model = built(folder, train_type="full")
    assert len(numbers) == 14
    for name, weight in numbers.items():
        torch.testing.assert_close(model.get_parameter(name).data, weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind.startswith("fp8")])
def test_fp8_has_the_logits_of_transformers_own_dequantization(folders, kind):
    folder, _ = folders[kind]
    block = MADE[kind][1].get("weight_block_size")
    theirs = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=block),
    )
    with process_group(CPU):
        assert_near(logits_of(built(folder, train_type="lora")), logits_of(theirs))


def save_mxfp4(folder: Path) -> str:
    """A tiny gpt-oss whose experts are random MXFP4; any bytes are."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, wide, out = tensors.pop(name).shape
        shape = (experts, out, wide // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(119, 124, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    declare(folder, dict(quant_method="mxfp4"))
    return str(folder)


def test_mxfp4_has_the_logits_of_transformers_own_dequantization(tmp_path):
    folder = save_mxfp4(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    ).float()  # its experts are bf16, which holds MXFP4 exactly
    with process_group(CPU):
        assert_near(logits_of(built(folder, train_type="lora")), logits_of(theirs))


def train_on_mxfp4(folder: str) -> dict:
    """Logits at load and a run over rows that stream a few at a time, in NF4, adapted experts beside."""
    stream.PIECE_VALUES = 5 * 64
    found = {}
    for experts in (None, "experts"):
        model = built(
            folder,
            train_type="qlora",
            sharding_strategy="full_shard",
            lora_rank=RANK,
            lora_alpha=8,
            lora_dropout=0.0,
            seed=SEED,
            lora_target_parameters=experts,
        )
        found[experts] = dict(logits=logits_of(model)) | train_model(model.train(), STEPS)
    return found


def test_mxfp4_trains_in_nf4_on_two_ranks_as_transformers_and_bitsandbytes_do(tmp_path):
    folder = save_mxfp4(tmp_path / "mxfp4")
    numbers = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True)
    )
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(numbers.float().state_dict())
    plain.save_pretrained(tmp_path / "plain")
    theirs = reference(str(tmp_path / "plain"), "gpt-oss", "qlora")
    expected = logits_of(theirs)
    ours, other = run_ranks(train_on_mxfp4, 2, folder)
    assert_equal_run(ours[None], reference_run(theirs.train(), STEPS), 2e-5, "gpt-oss")
    for experts, found in ours.items():  # adapters begin as nothing
        assert relative(found["logits"], expected) < 1e-5
        assert found["checksums"] == other[experts]["checksums"]
    adapted = [n for n in ours["experts"]["weights"] if "experts" in n]
    assert adapted and all(ours["experts"]["weights"][n].any() for n in adapted)


def test_experts_in_fp8_and_packed_integers_are_stacked_as_their_numbers(tmp_path):
    """DeepSeek and Kimi K2 publish every expert by itself."""
    experts = dict(
        model_type="qwen3_moe",
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    for i, kind in enumerate(("fp8, blocks", "compressed integers, 4 bits")):
        torch.manual_seed(0)
        folder = tmp_path / str(i)
        plain = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**experts), dtype=torch.float32
        )
        plain.save_pretrained(folder)
        numbers = in_format(folder, kind)
        assert len(numbers) == 2 * (4 + 3 * 4)
        state = load_file(folder / "model.safetensors")
        state = {n: t for n, t in state.items() if t.dtype == torch.float32 and "scale" not in n}
        reference = tmp_path / f"{i} in numbers"
        plain.config.save_pretrained(reference)
        save_file(state | numbers, reference / "model.safetensors", {"format": "pt"})
        theirs = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
        with process_group(CPU):
            for train_type in ("lora", "qlora"):
                ours, same = (built(f, train_type=train_type) for f in (folder, reference))
                torch.testing.assert_close(logits_of(ours), logits_of(same))
            assert_near(logits_of(built(folder, train_type="lora")), logits_of(theirs))


@pytest.mark.parametrize("kind", ["fp8, blocks", "compressed integers, zeros", "gptq", "awq"])
def test_an_adapter_merges_into_the_numbers_of_a_native_base(folders, kind, tmp_path):
    folder, numbers = folders[kind]
    with process_group(CPU):
        model = built(folder, train_type="lora")
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".lora_B." in name:
                    p.add_(0.1)
        save_trained(model, tmp_path / "adapter", settings=dict(quant="none"))
    plain = with_numbers(folders[""][0], numbers)
    assert_near(logits_of(model), logits_of(PeftModel.from_pretrained(plain, tmp_path / "adapter")))
    merged = merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged", dtype="fp32")
    theirs, info = AutoModelForCausalLM.from_pretrained(
        merged, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()) and not hasattr(theirs.config, "quantization_config")
    assert_near(logits_of(model), logits_of(theirs))


@pytest.mark.parametrize(
    "kind",
    [
        "compressed integers, zeros",
        "gptq",
        "awq",
        rest("fp8, blocks"),
        slow("compressed integers, 4 bits"),
    ],
)
def test_generate_answers_from_the_numbers_that_an_adapter_was_trained_beside(
    folders, kind, tmp_path
):
    """transformers asks for a library of each format's, or leaves weights random that it can't read."""
    folder, _ = folders[kind]
    with process_group(CPU):
        model = built(folder, train_type="qlora")
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".lora_B." in name:
                    p.add_(0.1)
        save_trained(model, tmp_path, settings=dict(quant="nf4"))
    asked = load_for_inference(folder, tmp_path, dtype=torch.float32)
    assert_near(logits_of(model), logits_of(asked))
    held = load_for_inference(folder, None, "nf4", dtype=torch.float32, load_in="4bit")
    written = load_for_inference(folder, None, "nf4", dtype=torch.float32)
    q_proj, same = (m.model.layers[0].self_attn.q_proj.weight for m in (held, written))
    torch.testing.assert_close(dequantize_4bit(q_proj.data, q_proj.quant_state), same)


def test_a_language_model_in_fp8_inside_of_another_model_trains(tmp_path):
    folder = save_wrapped(tmp_path, "mistral3")
    plain = whole_model(folder, "mistral3")
    numbers = in_format(folder, "fp8, a scale for all")  # its tower too, which stays unread
    with torch.no_grad():
        for name, weight in numbers.items():
            name = name.replace("language_model.model.", "model.language_model.")
            if name.startswith("model."):
                plain.get_parameter(name).copy_(weight)
    with process_group(CPU):
        assert_near(logits_of(built(folder, train_type="lora")), logits_of(plain))


DAMAGED = {
    "fp8, blocks": ("weight_scale_inv", lambda t: t[:1]),
    "fp8, a scale for all": ("weight_scale_inv", lambda t: torch.ones(3)),
    "compressed fp8, by channel": ("weight_scale", lambda t: t[:3]),
    "compressed integers, 4 bits": ("weight_scale", lambda t: t[:3]),
    "compressed integers, zeros": ("weight_packed", lambda t: t[:, :1].contiguous()),
    "gptq": ("qzeros", lambda t: t[:, :1].contiguous()),
    "awq": ("scales", lambda t: None),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_part_of_a_weight_that_is_missing_or_of_another_size_is_refused(tmp_path, kind):
    folder = save_tiny(tmp_path, **SHAPE)
    in_format(folder, kind)
    tensors, (end, change) = load_file(tmp_path / "model.safetensors"), DAMAGED[kind]
    layer = "model.layers.1.self_attn.k_proj"
    if (changed := change(tensors.pop(f"{layer}.{end}"))) is not None:
        tensors[f"{layer}.{end}"] = changed
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{layer}.weight") as caught:
        planned_model(settings(folder), CPU)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
