"""What is written can be read elsewhere: by other users, and by programs on transformers 4."""

from __future__ import annotations

import json
import os

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Tokenizer

from fsdp_qlora.checkpoint.tensors import TensorRows, write_rows
from fsdp_qlora.export.merged_files import write_other_files
from fsdp_qlora.export.tokenizer_files import save_tokenizer
from fsdp_qlora.tensor_files import write_tensors
from tests.tokenizers import SPECIAL, save_chat_model

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
