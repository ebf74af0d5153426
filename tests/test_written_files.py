"""What is written can be read elsewhere: by other users, and by programs on transformers 4."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, OFTConfig, PeftConfig
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Tokenizer

from fsdp_qlora.checkpoint.tensors import TensorRows, write_rows
from fsdp_qlora.export.config_file import with_older_names, write_older_names
from fsdp_qlora.export.merged_files import write_other_files
from fsdp_qlora.export.save import save_peft_config, save_trained
from fsdp_qlora.export.tokenizer_files import save_tokenizer
from fsdp_qlora.integrations.states import load_trained
from fsdp_qlora.integrations.streamed import load_quantized, streamed_model
from fsdp_qlora.loading import meta_model, read_config
from fsdp_qlora.tensor_files import write_tensors
from tests.families import save_family
from tests.tokenizers import SPECIAL, save_chat_model
from tests.wrappers import save_wrapped

TEXT = "<|im_start|>user\nhi 12<|im_end|>\n"


@pytest.fixture
def umask():
    """A function that sets the process's umask until the test is over."""
    before = os.umask(0o22)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask, mode", [(0o22, 0o644), (0o27, 0o640), (0o2, 0o664)])
def test_files_are_open_to_whom_the_umask_opens_them(tmp_path, umask, mask, mode):
    umask(mask)
    folder = tmp_path / "new"
    folder.mkdir()
    write_tensors({"a": torch.ones(2)}, folder / "a.safetensors")
    write_rows(folder / "b.safetensors", {"a": TensorRows(torch.ones(2), 0, 2)})
    (folder / "text").write_text("")  # as the system does it
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}


def read_by_4(folder) -> dict:
    """tokenizer_config.json, if transformers 4 can read it: it knows no class of transformers 5, and takes
    `extra_special_tokens` for a dict."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] in ("PreTrainedTokenizerFast", "Qwen2Tokenizer")
    assert isinstance(config.get("extra_special_tokens", {}), dict)
    assert not {"is_local", "local_files_only"} & config.keys()
    return config


def test_a_saved_tokenizer_is_read_by_transformers_4_and_is_the_same_to_5(tmp_path):
    base = tmp_path / "base"
    save_chat_model(base)
    loaded = AutoTokenizer.from_pretrained(base)
    of_a_model = Qwen2Tokenizer(
        vocab=loaded.get_vocab(), merges=[], eos_token=SPECIAL[0], extra_special_tokens=SPECIAL[1:]
    )
    for name, tokenizer in [("none", loaded), ("qwen2", of_a_model)]:
        folder = tmp_path / name
        folder.mkdir()
        save_tokenizer(tokenizer, folder)
        assert read_by_4(folder)["additional_special_tokens"] == SPECIAL[1:]
        again = AutoTokenizer.from_pretrained(folder)
        assert type(again) is type(tokenizer)
        assert again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
        assert again.all_special_tokens == tokenizer.all_special_tokens
        assert again.chat_template == tokenizer.chat_template


def test_a_merged_folder_has_a_tokenizer_that_transformers_4_reads(tmp_path):
    """Also from an adapter that another program saved with transformers 5."""
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    save_chat_model(base)
    adapter.mkdir(), merged.mkdir()
    AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    write_other_files(merged, base, adapter, {})
    assert read_by_4(merged)["additional_special_tokens"] == SPECIAL[1:]


LLAMA_3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LONG = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8)
# What makers wrote with transformers 4, which takes the default of a name that is missing.
ROPES = {
    "llama": dict(rope_theta=5e5, rope_scaling=LLAMA_3),
    "qwen2": dict(rope_theta=1e6),
    "qwen3": dict(rope_theta=1e6, rope_scaling=dict(rope_type="yarn", factor=4.0)),
    "phi3": dict(rope_theta=2e4, rope_scaling=LONG, original_max_position_embeddings=64),
    "stablelm": dict(rope_theta=2e4, partial_rotary_factor=0.5),
    "gpt_neox": dict(rotary_emb_base=2e4, rotary_pct=0.5),
    "gemma3_text": dict(
        rope_theta=2e6, rope_local_base_freq=2e4, rope_scaling=dict(rope_type="linear", factor=8.0)
    ),
}


def same_numbers(told: dict, older: dict):
    """Whether a configuration says at least what another one does, also of its scaling."""
    for name, value in older.items():
        if isinstance(value, dict):
            same_numbers(told[name], value)
        else:
            assert told[name] == value, name


@pytest.mark.parametrize("kind", ROPES)
def test_a_saved_configuration_has_the_names_of_transformers_4_and_is_the_same_to_5(tmp_path, kind):
    sizes = dict(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, max_position_embeddings=256
    )
    made = AutoConfig.for_model(
        kind, **sizes, **deepcopy(ROPES[kind]), dtype="bfloat16", use_cache=False
    )
    made.save_pretrained(tmp_path)
    write_older_names(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    same_numbers(told, ROPES[kind])
    assert told["torch_dtype"] == "bfloat16" and "use_cache" not in told
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == made.rope_parameters
    assert (again.dtype, again.use_cache) == (torch.bfloat16, True)


def test_a_mixture_tells_its_experts_by_the_older_name_too(tmp_path):
    """Qwen3-MoE's, of which transformers 4 would take 128."""
    AutoConfig.for_model("qwen3_moe", num_experts=4).save_pretrained(tmp_path)
    write_older_names(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_experts"] == 4
    assert AutoConfig.from_pretrained(tmp_path).num_local_experts == 4


def test_a_configuration_inside_of_another_has_the_older_names_too():
    rope = dict(rope_type="default", rope_theta=1e6)
    told = with_older_names(
        dict(text_config=dict(rope_parameters=rope, dtype="bfloat16"), dtype="bfloat16")
    )
    assert told["text_config"]["rope_theta"] == 1e6
    assert told["torch_dtype"] == told["text_config"]["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", ["saved", "merged"])
def test_a_model_is_served_with_the_rotation_that_it_was_trained_with(tmp_path, kind):
    """Saved whole, and merged into a base whose file transformers 5 wrote."""
    base, folder = tmp_path / "base", tmp_path / kind
    save_chat_model(base, num_hidden_layers=1, rope_theta=5e5, rope_scaling=dict(LLAMA_3))
    if kind == "saved":
        model = AutoModelForCausalLM.from_pretrained(base)
        model.config.use_cache = False  # as training has it
        save_trained(model, folder)
    else:
        folder.mkdir()
        write_other_files(folder, base, None, dict(dtype="bfloat16"))
    told = json.loads((folder / "config.json").read_text())
    same_numbers(told, ROPES["llama"])
    assert told["torch_dtype"] == told["dtype"] == ("float32" if kind == "saved" else "bfloat16")
    assert told.get("use_cache", True)


# The whole of adapter_config.json by PEFT 0.9.0, which ends on any other name, as all before 0.14 do.
PEFT_09 = {
    *("r", "target_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora"),
    *("modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "megatron_config", "megatron_core", "loftq_config"),
    *("use_dora", "peft_type", "auto_mapping", "base_model_name_or_path", "revision"),
    *("task_type", "inference_mode"),
}
USED = [  # options of an adapter, and which of them PEFT 0.9 can't know
    (dict(), set()),
    (dict(use_dora=True, use_rslora=True, rank_pattern=dict(q_proj=3)), set()),
    (dict(modules_to_save=["lm_head"], layers_to_transform=[0, 2]), set()),
    (dict(target_parameters=["experts.up_proj"]), {"target_parameters"}),
    (
        dict(exclude_modules=["lm_head"], lora_bias=True, bias="none"),
        {"exclude_modules", "lora_bias"},
    ),
    (dict(trainable_token_indices=[5, 6]), {"trainable_token_indices"}),
    (dict(init_lora_weights="pissa"), set()),
]


@pytest.mark.parametrize("options, newer", USED)
def test_an_adapter_has_no_option_of_a_later_peft_that_it_does_not_use(tmp_path, options, newer):
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    save_peft_config(config, tmp_path)
    told = json.loads((tmp_path / "adapter_config.json").read_text())
    assert told.keys() - PEFT_09 == newer
    assert not config.inference_mode and told["inference_mode"]
    config.inference_mode = True
    assert PeftConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()


def test_other_methods_are_saved_as_peft_saves_them(tmp_path):
    """OFT asks for the version of PEFT that wrote the file."""
    save_peft_config(OFTConfig(r=4, oft_block_size=0, target_modules=["q_proj"]), tmp_path)
    assert "peft_version" in json.loads((tmp_path / "adapter_config.json").read_text())


def tensors_in(folder) -> dict[str, torch.Tensor]:
    """All tensors of a model's files."""
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


# Experts by themselves, under older names, and in one tensor; routers with a buffer; a head of another name.
STORED = [
    "Qwen3-MoE",
    "Mixtral",
    "Granite 3 MoE",
    "gpt-oss",
    "DeepSeek V3",
    "MiniMax M2",
    "GPT-NeoX",
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("family", STORED)
def test_a_whole_model_is_saved_under_the_names_of_its_files(tmp_path, family, streamed):
    """Those by which vLLM, llama.cpp and transformers 4 know it, and with the buffers of its routers."""
    base = Path(save_family(tmp_path / "base", family, dtype="float32"))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(base)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_()
        model.save_pretrained(base)  # which leaves the name of a dtype in its configuration
    if streamed:
        model = load_quantized(streamed_model(str(base), "none", torch.float32), base, quant="none")
    save_trained(model, tmp_path / "saved")
    wanted, found = tensors_in(base), tensors_in(tmp_path / "saved")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("family", ["Llama 3", *STORED])
def test_a_whole_model_is_loaded_again_from_what_was_saved(tmp_path, family):
    """As a trainer resumes, or takes its best model."""
    base = save_family(tmp_path / "base", family, dtype="float32")
    model = load_quantized(streamed_model(base, "none", torch.float32), base, quant="none")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    save_trained(model, tmp_path / "saved")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load_trained(tmp_path / "saved", model, torch.device("cpu"))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["gemma3", "llama4", "llava"])
def test_a_whole_model_with_towers_is_saved_under_the_names_of_its_files(tmp_path, kind):
    base = Path(save_wrapped(tmp_path / "base", kind))
    model = load_quantized(meta_model(read_config(str(base)), torch.float32), base, quant="none")
    save_trained(model, tmp_path / "saved")
    wanted, found = tensors_in(base), tensors_in(tmp_path / "saved")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
