"""Checkpoints whose tensors have other names than the model's load as transformers loads them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fsdp_qlora.build import build_model, planned_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group

from .families import save_family
from .ranks import run_ranks

IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(1))


def renamed_files(folder: str, old: str, new: str, drop: tuple[str, ...] = ()) -> str:
    """The folder, with `old` for `new` in each tensor's name."""
    tensors = load_file(f"{folder}/model.safetensors")
    tensors = {name.replace(old, new, 1): t for name, t in tensors.items() if name not in drop}
    save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
    return folder


def built_logits(folders: list[str]) -> list[torch.Tensor]:
    found = []
    for folder in folders:
        model = build_model(
            RunConfig(model_name=folder, train_type="lora", lora_rank=2, precision="fp32"),
            torch.device("cpu"),
        )
        with torch.no_grad():
            found.append(model.eval()(input_ids=IDS).logits)
    return found


def test_older_names_are_found_as_in_transformers(tmp_path):
    folders = [  # as on the hub: files of the base model alone
        renamed_files(save_family(tmp_path / "gpt2", "GPT-2"), "transformer.", ""),
        renamed_files(save_family(tmp_path / "tied", "Qwen2"), "model.", ""),
        # experts one by one, which are stacked only after that
        renamed_files(save_family(tmp_path / "mixture", "Mixtral"), "model.", ""),
        # patterns that also match the name of another tensor, which has its own
        save_family(tmp_path / "final norm", "DeepSeek V4"),
        renamed_files(save_family(tmp_path / "hub", "DeepSeek V4"), "model.", ""),
    ]
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(
        save_family(tmp_path / "16", "GPT-2"), dtype=torch.float32, quantization_config=quantization
    )
    model.save_pretrained(tmp_path / "4")
    folders.append(renamed_files(str(tmp_path / "4"), "transformer.", ""))
    found = run_ranks(built_logits, 2, folders)[0]
    for folder, logits in zip(folders, found, strict=True):
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        assert not info["missing_keys"]
        with torch.no_grad():
            expected = model.train()(IDS).logits  # 4 bits in eval compute in bf16
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_tensor_that_is_not_there_under_any_name_is_named(tmp_path):
    folder = renamed_files(
        save_family(tmp_path, "GPT-2"),
        "transformer.",
        "",
        drop=("transformer.h.1.mlp.c_fc.weight",),
    )
    with pytest.raises(ValueError, match=r"has no tensor transformer\.h\.1\.mlp\.c_fc\.weight"):
        planned_model(RunConfig(model_name=folder), torch.device("cpu"))


def with_more(folder: str, *names: str) -> str:
    """The folder, with tensors that its config.json does not speak of."""
    tensors = load_file(f"{folder}/model.safetensors")
    tensors |= {name: torch.zeros(3) for name in names}
    save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
    return folder


def test_tensors_without_a_place_in_the_model_are_those_that_transformers_names(tmp_path):
    """Old files hold rotary tables, masks and a tied head besides; those are no news to anyone."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    small = AutoModelForCausalLM.from_pretrained(
        save_family(tmp_path / "16", "Qwen2"), quantization_config=quantization
    )
    small.save_pretrained(tmp_path / "4")
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folders = {
        with_more(
            save_family(tmp_path / "a", "Qwen2"),
            "model.layers.7.mlp.up_proj.weight",
            rotary,
            "mtp.norm.weight",
        ): ["model.layers.7.mlp.up_proj.weight", "mtp.norm.weight"],
        with_more(save_family(tmp_path / "b", "GPT-2"), "transformer.h.0.attn.bias", "x"): ["x"],
        with_more(str(tmp_path / "4"), "score.weight"): ["score.weight"],
        save_family(tmp_path / "c", "Mixtral"): [],
    }
    for folder, unused in folders.items():
        _, checkpoint = planned_model(
            RunConfig(model_name=folder, train_type="lora"), torch.device("cpu")
        )
        assert list(checkpoint.unused) == unused
        _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert sorted(info["unexpected_keys"]) == unused


def test_a_run_says_once_which_tensors_it_leaves(tmp_path, capsys):
    folder = with_more(save_family(tmp_path, "Qwen2"), *(f"more.{i}" for i in range(6)))
    with process_group(torch.device("cpu"), timeout_minutes=1):
        built_logits([folder])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert said == [
        f"warning: 6 tensors of {folder} not loaded, for the model has no place for them: "
        "more.0, more.1, more.2, more.3, ..."
    ]
