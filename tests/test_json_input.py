"""Files of others that are nested too deeply, or hold numbers that are none, are one line each."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from fsdp_qlora.catalog.hardware import load_gpu_spec
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.checkpoint.folder import fault_of
from fsdp_qlora.config.recipe import read_recipe
from fsdp_qlora.data.records import parse_json
from fsdp_qlora.export.adapter_folder import AdapterFolder, read_adapter_config
from fsdp_qlora.export.card import _read_metrics
from fsdp_qlora.export.merged_files import _write_config
from fsdp_qlora.export.quantized_base import trained_quant
from fsdp_qlora.json_input import from_json, read_object
from fsdp_qlora.loading.tokenizer import load_tokenizer
from fsdp_qlora.report.run_history import read_run_history

from .tiny import save_tiny
from .tokenizers import save_tokenizer

DEEP = ["[" * 100_000, '{"a":' * 100_000]
READERS = {  # a file by its name, and what reads it
    "config.json": lambda path: model_shape(str(path)),
    "adapter_config.json": lambda path: read_adapter_config(path.parent),
    "fsdp_qlora.json": lambda path: trained_quant(path.parent),
    "gpu.json": lambda path: load_gpu_spec(path),
    "recipe.yaml": lambda path: read_recipe(str(path)),
    "rows.jsonl": lambda path: parse_json(path.read_bytes(), path, 1),
    "metrics.jsonl": lambda path: read_run_history(path.parent),
    "any.json": read_object,
}


@pytest.mark.parametrize("text", DEEP)
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_nested_too_deeply_is_one_line_that_names_it(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        READERS[name](path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", DEEP)
def test_what_can_be_done_without_is_left_out(tmp_path, text):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{text}\n')
    assert _read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]
    (tmp_path / "manifest.json").write_text(text)
    assert fault_of(tmp_path)  # a checkpoint is passed over with its reason


@pytest.mark.parametrize("text", ["[]", "3", "NaN", "null", '"text"'])
def test_json_of_another_kind_than_an_object_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a JSON object"):
        read_object(path)
    with pytest.raises(ValueError, match="not a JSON object"):
        _write_config(tmp_path, tmp_path, {})


def test_json_is_what_python_reads():
    for text in ('{"a": [1, 2.5, null]}', "[]", "-0.5", '"\\u00e9"'):
        assert from_json(text) == json.loads(text)


@pytest.mark.parametrize(
    "name, text",
    [
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '{"version": 1e999}'),
        ("tokenizer_config.json", '{"a":' * 100_000),
        ("tokenizer_config.json", '{"tokenizer_class": [1]}'),
    ],
)
def test_a_broken_tokenizer_file_is_one_line(tmp_path, name, text):
    save_tiny(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match="no tokenizer there") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        '"r": NaN',
        '"r": 4.5',
        '"r": 0',
        '"r": 1e999',
        '"r": "4"',
        '"lora_alpha": 1e999',
        '"lora_alpha": NaN',
        '"lora_alpha": "8"',
        '"rank_pattern": [1]',
        '"rank_pattern": {"q_proj": NaN}',
        '"alpha_pattern": {"q_proj": 1e999}',
        '"target_modules": 5',
        '"modules_to_save": 7',
        '"base_model_name_or_path": [1]',
        '"revision": 5',
    ],
)
def test_a_value_of_another_kind_in_an_adapters_config_is_refused_by_its_name(tmp_path, values):
    """An alpha of infinity was merged into every weight."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    save_file(
        {name.format("A"): torch.ones(4, 8), name.format("B"): torch.ones(8, 4)},
        tmp_path / "adapter_model.safetensors",
    )
    plain = '{"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4'
    (tmp_path / "adapter_config.json").write_text(f"{plain}}}")
    AdapterFolder(tmp_path)
    (tmp_path / "adapter_config.json").write_text(f"{plain}, {values}}}")
    with pytest.raises(ValueError) as caught:
        AdapterFolder(tmp_path)
    assert values.split('"')[1] in str(caught.value) and "save the adapter again" in str(
        caught.value
    )
