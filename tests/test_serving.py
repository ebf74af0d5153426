"""What vLLM's loader takes and refuses, on folders that PEFT and this package write."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_qlora.cli import main
from fsdp_qlora.export.serving import check_adapter_folder, serve_command

from .families import save_family
from .test_merge import save_adapter
from .tiny import save_tiny
from .tokenizers import save_tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base"), "qwen2")


def test_a_plain_adapter_is_taken_and_the_command_that_serves_it_is_printed(base, tmp_path, capsys):
    adapter = save_adapter(base, tmp_path / "adapter", r=24, use_rslora=True)
    assert check_adapter_folder(adapter) == []
    for words in (["--adapter_folder"], []):
        assert main(["check", *words, adapter]) == 0
    text = capsys.readouterr().out
    assert (
        f"vllm serve {base} --enable-lora --max-lora-rank 32 --lora-modules tuned={adapter}" in text
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings, part",
    [
        (dict(use_dora=True), "DoRA"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save"),
        (dict(bias="all"), "bias all"),
        (dict(lora_bias=True, target_modules=["q_proj"]), "lora_bias"),
        (dict(alpha_pattern={"q_proj": 3}), "alpha_pattern"),
        (dict(r=600), "rank 600"),
    ],
)
def test_what_vllm_refuses_is_named(base, tmp_path, capsys, settings, part):
    adapter = save_adapter(base, tmp_path / "adapter", **settings)
    assert any(part in problem for problem in check_adapter_folder(adapter))
    assert main(["check", "--adapter_folder", adapter]) == 2
    line = capsys.readouterr().err
    assert "--adapter_folder" in line and part in line and "fsdp-qlora merge" in line


def test_ranks_are_held_against_the_servers_limit(base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter", r=24)
    assert check_adapter_folder(adapter, 16) == ["rank 24, above --max-lora-rank 16"]


def test_files_and_tensors_that_the_loader_can_not_parse_are_named(base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    save_file({k.replace("lora_A", "lora_A.default"): v for k, v in weights.items()}, path)
    assert "lora_A.default" in check_adapter_folder(adapter)[0]
    save_file(weights | {"model.norm.weight": torch.ones(2)}, path)
    assert "model.norm.weight" in check_adapter_folder(adapter)[0]
    path.write_bytes(b"version https://git-lfs")
    assert "can't be read" in check_adapter_folder(adapter)[0]
    path.unlink()
    assert check_adapter_folder(adapter) == ["no adapter_model.safetensors"]
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(ValueError, match="IA3"):
        check_adapter_folder(adapter)


# ---- export --to -------------------------------------------------------------------------------


def exported(capsys, *argv) -> str:
    assert main(["export", *map(str, argv)]) == 0
    return capsys.readouterr().out


def test_each_program_gets_the_adapter_and_its_base(base, tmp_path, capsys):
    adapter, out = save_adapter(base, tmp_path / "adapter", r=24), tmp_path / "pia"
    save_tokenizer(adapter)
    served = exported(capsys, adapter, "--to", "vllm")
    assert (
        served
        == f"vllm serve {base} --enable-lora --max-lora-rank 32 --lora-modules tuned={adapter}\n"
    )
    assert "vllm serve elsewhere --enable-lora" in exported(
        capsys, adapter, "--model_name", "elsewhere"
    )
    said = exported(capsys, adapter, "--to", "ollama", "--output_dir", out)
    assert said == f"ollama create pia -f {out}/Modelfile\nollama run pia\n"
    lines = (out / "Modelfile").read_text().splitlines()
    assert lines[:2] == [f"FROM {base}", f"ADAPTER {adapter}"]
    assert 'PARAMETER stop "<|im_end|>"' in lines[2:]
    said = exported(capsys, adapter, "--to", "gguf", "--output_dir", out)
    steps = said.splitlines()
    assert steps[0] == f"mkdir -p {out}" and f"{base} --outfile {out}/base.gguf" in steps[1]
    assert f"convert_lora_to_gguf.py {adapter} --base {base} --outfile {out}/adapter.gguf" in said
    assert steps[-1].endswith(f"-m {out}/base.gguf --lora {out}/adapter.gguf")
    hub = exported(capsys, adapter, "--to", "gguf", "--model_name", "me/base")
    assert "hf download me/base --local-dir exported/base" in hub and "--base exported/base " in hub
    assert "# FROM names me/base on the hub" in exported(
        capsys, adapter, "--to", "ollama", "--model_name", "me/base", "--output_dir", out
    )


def test_a_base_that_is_elsewhere_now_is_asked_for(base, tmp_path, capsys):
    adapter = save_adapter(base, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    moved = str(tmp_path / "moved")
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(base_model_name_or_path=moved)))
    for command in ("export", "merge", "generate"):
        more = ["--prompt", "x"] * (command == "generate")
        assert main([command, str(adapter), *more]) == 2
        said = capsys.readouterr().err
        assert f"--model_name is missing, and {moved}, the base that {adapter} names" in said
    assert main(["check", str(adapter)]) == 0
    assert "vllm serve BASE --enable-lora" in capsys.readouterr().out
    assert f"vllm serve {base} " in exported(capsys, adapter, "--model_name", base)


def test_a_whole_model_is_taken_as_it_is(base, tmp_path, capsys):
    assert exported(capsys, base) == f"vllm serve {base}\n"
    assert f"convert_hf_to_gguf.py {base} --outfile" in exported(capsys, base, "--to", "gguf")
    exported(capsys, base, "--to", "ollama", "--output_dir", tmp_path)
    assert (tmp_path / "Modelfile").read_text() == f"FROM {base}\n"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "program, settings, part",
    [
        ("vllm", dict(use_dora=True), "DoRA"),
        ("ollama", dict(use_dora=True), "DoRA"),
        ("gguf", dict(use_rslora=True), "use_rslora"),
        ("ollama", dict(alpha_pattern={"q_proj": 3}), "alpha_pattern"),
    ],
)
def test_what_a_program_would_not_apply_is_refused_with_the_merge_that_helps(
    base, tmp_path, capsys, program, settings, part
):
    adapter = save_adapter(base, tmp_path / "adapter", **settings)
    assert main(["export", str(adapter), "--to", program]) == 2
    line = capsys.readouterr().err
    assert f"{program} does not support" in line and part in line
    assert f"fsdp-qlora merge {adapter} --output_dir merged" in line


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family, targets, problem",
    [
        ("Qwen3-MoE", ["gate_up_proj", "down_proj"], None),
        ("gpt-oss", ["gate_up_proj", "down_proj"], None),
        ("Qwen3-MoE", ["down_proj"], "only one of the experts' two weights"),
        ("Qwen3-MoE", ["gate_up_proj"], "only one of the experts' two weights"),
        ("Nemotron 3", ["up_proj", "down_proj"], "experts without a gate"),
    ],
)
def test_adapters_of_experts_are_taken_where_vllm_can_cut_them_out(
    family, targets, problem, tmp_path
):
    base = save_family(tmp_path / "base", family)
    adapter = save_adapter(
        base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=targets
    )
    problems = check_adapter_folder(adapter)
    assert [problem in found for found in problems] == ([True] if problem else [])
    if not problem:
        command = serve_command(adapter)
        assert "--enable-mixed-moe-lora-format" in command
        assert json.loads(shlex.split(command)[-2])["is_3d_lora_weight"] is True
        assert main(["export", str(adapter), "--to", "gguf"]) == 2


@pytest.mark.parametrize("program", ["vllm", "ollama", "gguf"])
def test_commands_for_folders_with_spaces_can_be_pasted(base, tmp_path, capsys, program):
    """Each path is one word to a shell; the name of an Ollama model has none."""
    adapter, out = tmp_path / "my adapter", tmp_path / "my out"
    save_adapter(base, adapter)
    assert main(["export", str(adapter), "--to", program, "--output_dir", str(out)]) == 0
    words = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line[:1] != "#"]
    if program == "ollama":
        assert words[0] == ["ollama", "create", "my-out", "-f", str(out / "Modelfile")]
        assert words[1] == ["ollama", "run", "my-out"]
    else:
        assert f"tuned={adapter}" in words[0] or str(adapter) in words[2]
        assert base in words[0] or base in words[1]


def test_a_folder_without_a_model_says_what_it_is_and_what_to_give(base, tmp_path, capsys):
    """To train, to estimate, and to generate with it."""
    adapter = save_adapter(base, tmp_path / "my run" / "adapter")
    nested, gguf, empty = (tmp_path / name for name in ("nested", "gguf", "empty"))
    save_tiny(nested / "inside")
    for folder in (gguf, empty):
        folder.mkdir()
    (gguf / "model.gguf").write_bytes(b"GGUF")
    merge = (
        "it is an adapter; give its base as --model_name, or merge it first: fsdp-qlora merge "
        f"'{adapter}'"
    )
    for folder, says in (
        (adapter, merge),
        (tmp_path / "my run", merge),
        (nested, f"the folder has no config.json; give {nested / 'inside'}"),
        (gguf, "its GGUF files can't be trained"),
        (empty, "the folder has no config.json; give a folder in transformers' format"),
    ):
        for command in (
            ["train", "--dataset", "dummy", "--device", "cpu"],
            ["estimate", "--gpu", "4090"],
        ):
            assert main([*command, "--model_name", str(folder)]) == 2, command
            line = capsys.readouterr().err
            assert f"--model_name {folder}: {says}" in line, command


def test_a_model_with_an_adapter_in_its_folder_is_refused(base, tmp_path, capsys):
    """transformers would load both, and a run would have left the adapter out."""
    both = Path(shutil.copytree(base, tmp_path / "both"))
    save_tokenizer(both)
    adapter = save_adapter(base, tmp_path / "adapter")
    shutil.copytree(adapter, both, dirs_exist_ok=True)
    named = ["--model_name", str(both), "--device", "cpu"]
    data = ["--dataset", "dummy", "--context_length", "32"]
    for command in (["train", *data], ["train", *data, "--dry_run"], ["generate", "--prompt", "x"]):
        assert main([*command, *named]) == 2, command
        assert f"--model_name {both}: it contains an adapter_config.json" in capsys.readouterr().err


def test_a_folder_without_an_adapter_says_what_it_is_and_what_to_give(base, tmp_path, capsys):
    """To generate, merge, check and export."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    save_adapter(base, run / "adapter")
    save_adapter(base, run / "adapter-best")
    save_tiny(whole / "model")
    for folder, says in (
        (base, "it is a whole model; give it as --model_name"),
        (run, f"no adapter_config.json there; give {run / 'adapter'}"),
        (whole, f"there; give the whole model as --model_name {whole / 'model'}"),
        (tmp_path, "there; give the folder that training saved, such as output/adapter"),
    ):
        for command in (
            ["generate", "--prompt", "x", "--model_name", base],
            ["generate", "--prompt", "x"],
            ["merge", "--output_dir", tmp_path / "merged"],
            ["check"],
        ):
            assert main([*map(str, command), "--adapter_folder", str(folder)]) == 2, command
            line = capsys.readouterr().err
            assert f"--adapter_folder {folder}: " in line and says in line, command
