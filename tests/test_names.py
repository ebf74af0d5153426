"""Checkpoints whose tensors have other names than the model's load as transformers loads them."""
from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fsdp_qlora.build import build_model, planned_model
from fsdp_qlora.config import RunConfig

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
        model = build_model(RunConfig(model_name=folder, train_type="lora", lora_rank=2,
                                      precision="fp32"), torch.device("cpu"))
        with torch.no_grad(): found.append(model.eval()(input_ids=IDS).logits)
    return found


def test_older_names_are_found_as_in_transformers(tmp_path):
    folders = [  # as on the hub: files of the base model alone
        renamed_files(save_family(tmp_path / "gpt2", "GPT-2"), "transformer.", ""),
        renamed_files(save_family(tmp_path / "tied", "Qwen2"), "model.", "")]
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                      bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(save_family(tmp_path / "16", "GPT-2"),
                                                 dtype=torch.float32, quantization_config=quantization)
    model.save_pretrained(tmp_path / "4")
    folders.append(renamed_files(str(tmp_path / "4"), "transformer.", ""))
    found = run_ranks(built_logits, 2, folders)[0]
    for folder, logits in zip(folders, found, strict=True):
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                           output_loading_info=True)
        assert not info["missing_keys"]
        with torch.no_grad(): expected = model.train()(IDS).logits  # 4 bits in eval compute in bf16
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_a_tensor_that_is_not_there_under_any_name_is_named(tmp_path):
    folder = renamed_files(save_family(tmp_path, "GPT-2"), "transformer.", "",
                           drop=("transformer.h.1.mlp.c_fc.weight",))
    with pytest.raises(ValueError, match=r"has no tensor transformer\.h\.1\.mlp\.c_fc\.weight"):
        planned_model(RunConfig(model_name=folder), torch.device("cpu"))
