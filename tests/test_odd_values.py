"""Values that nobody means, on the command line and in files: one line that names the flag."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from fsdp_qlora.bench.row import append_row, empty_row
from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.settings import counted
from fsdp_qlora.dist import free_port
from fsdp_qlora.lifecycle.launcher import _rendezvous_endpoint
from fsdp_qlora.quantization.quantize import QuantLinear
from tests.tiny import save_tiny
from tests.tokenizers import VOCAB_SIZE, save_tokenizer

torch.set_num_threads(1)
TEXTS = [
    f.name
    for f in fields(RunConfig)
    if f.type in ("str", "str | None") and not f.metadata["choices"] and not f.metadata["later"]
]
NUMBERS = [f.name for f in fields(RunConfig) if f.type == "float"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, vocab_size=VOCAB_SIZE)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def refused(capsys):
    """The error line of a command that must end with exit code 2."""

    def call(*argv) -> str:
        assert main([str(a) for a in argv]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(lines) == 1
        return lines[0]

    return call


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_text_is_refused(refused, name, text):
    """An empty --dataset or --output_dir would be the current folder."""
    assert refused("train", f"--{name}={text}").endswith(
        f"--{name} must be left out or have a value, got {text!r}"
    )


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e400", ""])
def test_a_number_that_is_none_is_refused(refused, name, number):
    assert f"--{name}" in refused("train", f"--{name}={number}")


@pytest.mark.parametrize(
    "argv, part",
    [
        (["--save_model="], "'' is not true or false"),  # must not stand for false
        (["--seed", "-1"], "--seed must be from 0"),
        (["--seed", "4294967296"], "--seed must be from 0"),
        (["--timeout_minutes", "1e-9"], "--timeout_minutes must be from 0.01"),
        (["--timeout_minutes", "1e12"], "--timeout_minutes must be from 0.01"),
        (["--lora_alpha", "0"], "--lora_alpha must be 1 or more"),  # adapters would stay untrained
        (["--lora_rank", "0x10"], "--lora_rank: '0x10' is not a whole number"),
        (["--lora_rank", "4.0"], "--lora_rank: '4.0' is not a whole number"),
        (["--eval_steps", "0.2"], "not a whole number; a share of the run is not taken"),
        (
            ["--max_grad_norm", "0"],
            "above 0, got 0; to clip nothing use --apply_gradient_clipping false",
        ),
        (["--lr", "fast"], "--lr: 'fast' is not a number"),
        (["--lr"], "--lr: the value is missing; see --help"),
        (["--lr", "1e-5", "--lr"], "--lr"),
        (["4"], "unexpected argument '4'"),
    ],
)
def test_other_values_of_train(refused, argv, part):
    assert part in refused("train", *argv)


@pytest.mark.parametrize(
    "argv, part",
    [
        (["bench", "--steps", "0"], "--steps must be 1 or more"),
        (["bench", "--warmup", "-1"], "--warmup must be 0 or more"),
        (
            ["generate", "--prompt", "x", "--base_quant", "int3"],
            "--base_quant int3: choose auto, none",
        ),
        (
            ["generate", "--prompt", "x", "--max_new_tokens", "0"],
            "--max_new_tokens must be 1 or more",
        ),
        (["generate", "--prompt", "\udcff"], "--prompt is not UTF-8"),
    ],
)
def test_values_of_other_commands(refused, argv, part):
    assert part in refused(*argv)


@pytest.mark.parametrize("name", ["nonsense", "flash_attention_7"])
def test_an_unknown_attention_kernel_names_its_flag(refused, folder, tmp_path, name):
    (tmp_path / "rows.jsonl").write_text('{"text": "hello"}\n')
    error = refused(
        "train",
        "--model_name",
        folder,
        "--dataset",
        tmp_path / "rows.jsonl",
        "--device",
        "cpu",
        "--attn_implementation",
        name,
    )
    assert f"--attn_implementation {name}" in error


@pytest.mark.parametrize(
    "files, part",
    [
        ({"adapter_config.json": "{"}, "adapter_config.json: Expecting"),
        (
            {"adapter_config.json": '{"peft_type": "LORA"}', "adapter_model.safetensors": "<html>"},
            "save the adapter again",
        ),
        ({"adapter_config.json": "{}", "fsdp_qlora.json": "{}"}, "give --base_quant"),
        ({"adapter_config.json": "{}", "fsdp_qlora.json": "<html>"}, "give --base_quant"),
        ({}, "no adapter_config.json there"),
    ],
)
def test_a_broken_adapter_folder_is_named(refused, folder, tmp_path, files, part):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    error = refused(
        "generate",
        "--model_name",
        folder,
        "--device",
        "cpu",
        "--prompt",
        "x",
        "--adapter_folder",
        tmp_path,
    )
    assert str(tmp_path) in error and part in error


def test_a_wrong_adapter_folder_is_said_before_the_base_is_read(refused, folder, tmp_path):
    """A large base takes minutes; here its weights can't be read at all."""
    base = tmp_path / "base"
    shutil.copytree(folder, base)
    (base / "model.safetensors").unlink()
    error = refused(
        "generate",
        "--model_name",
        base,
        "--device",
        "cpu",
        "--prompt",
        "x",
        "--adapter_folder",
        tmp_path / "nowhere",
    )
    assert "nowhere: no adapter_config.json there" in error


@pytest.mark.parametrize("text, part", [(None, "no such file"), ("", "no row is left")])
def test_held_out_rows_are_named_by_their_own_flag(refused, folder, tmp_path, text, part):
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "heldout.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    if text is not None:
        held_out.write_text(text)
    error = refused(
        "train",
        "--model_name",
        folder,
        "--device",
        "cpu",
        "--dataset",
        rows,
        "--eval_dataset",
        held_out,
    )
    assert f"--eval_dataset {held_out}: {part}" in error and "--dataset" not in error


@pytest.mark.parametrize(
    "text, part",
    [
        ("", "no row is left to train on (it is empty); give rows"),
        (
            json.dumps(dict(prompt="a" * 99, completion="b")) + "\n",
            "on (1 read; dropped 1: no trained token",
        ),
    ],
)
def test_a_stream_without_a_row_to_train_on_is_refused_before_the_base_is_read(
    refused, folder, tmp_path, text, part
):
    """The same words as without --stream; the base's weights can't be read at all."""
    base, rows = tmp_path / "base", tmp_path / "rows.jsonl"
    shutil.copytree(folder, base)
    (base / "model.safetensors").write_bytes(b"")
    rows.write_text(text)
    argv = [
        "train",
        "--model_name",
        base,
        "--dataset",
        rows,
        "--device",
        "cpu",
        "--context_length",
        64,
    ]
    errors = {refused(*argv), refused(*argv, "--stream")}  # one line
    (error,) = errors
    assert f"--dataset {rows}: no row is left" in error and part in error


@pytest.mark.parametrize(
    "flag, place, part",
    [
        ("quantized_cache", "rows.jsonl", "is a file"),
        ("quantized_cache", "rows.jsonl/deep", "is a file"),
        ("data_cache", "rows.jsonl", "is a file"),
        ("profiling_output", "rows.jsonl", "is a file"),
        ("quantized_cache", "/proc/x", "/proc "),
        ("output_dir", "/proc/x", "/proc "),
        ("output_dir", "/sys/x", "/sys "),
    ],
)
def test_a_folder_that_cant_be_written_is_refused_before_the_base_is_read(
    refused, folder, tmp_path, flag, place, part
):
    base, rows = tmp_path / "base", tmp_path / "rows.jsonl"
    shutil.copytree(folder, base)
    (base / "model.safetensors").write_bytes(b"")
    rows.write_text('{"text": "hello"}\n')
    error = refused(
        "train",
        "--model_name",
        base,
        "--device",
        "cpu",
        "--dataset",
        rows,
        "--profile",
        "--output_dir",
        tmp_path / "out",
        f"--{flag}",
        tmp_path / place,
    )
    assert f"--{flag} {tmp_path / place}: " in error and part in error and "rrno" not in error
    assert "0.0 GB" not in error and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "--results"],
        ["bench", "--report", "x", "--picture"],
        ["plan", "--params", "7B", "--gpu", "h100", "--picture"],
    ],
)
@pytest.mark.parametrize("place", ["rows.jsonl/x", "/proc/x/y", "."])
def test_a_file_that_cant_be_written_is_refused_before_any_work(refused, tmp_path, argv, place):
    (tmp_path / "rows.jsonl").write_text("mine")
    error = refused(*argv, tmp_path / place)
    assert f"{argv[-1]} {tmp_path / place}: " in error and "give another file" in error


def test_a_disk_that_is_full_when_a_row_was_measured_does_not_lose_the_row(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match='--results .*file/rows.jsonl: .*; the row was {"name": "mine"'
    ):
        append_row(empty_row("mine"), tmp_path / "file" / "rows.jsonl")


def test_a_file_as_model_is_called_one(refused, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    argv = ["--model_name", tmp_path / "rows.jsonl", "--device", "cpu"]
    assert "rows.jsonl: it is a file; give a folder" in refused("train", *argv)


def test_a_home_folder_that_no_shell_expanded_is_not_a_folder_named_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = RunConfig(output_dir="~/run", quantized_cache="~/cache", model_name="~", dataset="a~b")
    assert (config.output_dir, config.quantized_cache) == ("/home/me/run", "/home/me/cache")
    assert (config.model_name, config.dataset) == ("/home/me", "a~b")


@pytest.mark.parametrize("number, text", [(0, "0 rows"), (1, "1 row"), (2000, "2,000 rows")])
def test_one_is_no_plural(number, text):
    assert counted(number, "row") == text


def test_names_in_any_script_work(folder, tmp_path):
    path = tmp_path / "übung 日本" / "🙂.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(dict(prompt="日本", completion="🙂")) + "\n")
    assert (
        main(
            [
                "train",
                "--model_name",
                str(folder),
                "--dataset",
                str(path),
                "--device",
                "cpu",
                "--precision",
                "fp32",
                "--lora_rank",
                "2",
                "--log_to",
                "jsonl",
                "--output_dir",
                str(path.parent / "aus gabe"),
            ]
        )
        == 0
    )
    assert (path.parent / "aus gabe" / "adapter" / "adapter_model.safetensors").is_file()


# ---- where ranks meet --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        dict(master_addr="nowhere.invalid"),
        dict(master_addr="192.0.2.1"),
        dict(master_port="abc"),
        dict(master_port="99999"),
    ],
)
def test_a_place_where_ranks_cant_meet_is_refused_at_once(settings):
    with pytest.raises(ValueError, match="--master_addr .* --master_port .*leave both out"):
        _rendezvous_endpoint(RunConfig(**settings))


def test_ranks_meet_at_the_port_asked_for_or_at_a_free_one():
    port = free_port()
    assert _rendezvous_endpoint(RunConfig(master_port=str(port))) == f"localhost:{port}"
    assert _rendezvous_endpoint(RunConfig()) != _rendezvous_endpoint(RunConfig())


# ---- a loop of the user's under autocast -------------------------------------------------------


def test_a_quantized_layer_follows_autocast_as_a_linear_layer_does():
    layer = QuantLinear.from_linear(torch.nn.Linear(64, 32, bias=False))
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(
        y, torch.nn.functional.linear(x.bfloat16(), layer.dequantize(torch.bfloat16))
    )
    y.sum().backward()
    assert x.grad.dtype == torch.float32 and x.grad.any()


def test_rows_longer_than_the_models_positions_are_refused(refused, folder, tmp_path):
    """Its 128 positions; shorter rows pass whatever --context_length says."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(dict(prompt="a" * 150, completion="b")) + "\n")
    error = refused("train", "--model_name", folder, "--device", "cpu", "--dataset", rows)
    assert "--context_length 512: the data have rows of" in error and "128 positions" in error
    file = Path(shutil.copytree(folder, tmp_path / "stretched")) / "config.json"
    settings = json.loads(file.read_text())
    settings["rope_parameters"] |= dict(rope_type="linear", factor=2.0)
    file.write_text(json.dumps(settings))
    assert (
        main(
            [
                "train",
                "--model_name",
                str(file.parent),
                "--device",
                "cpu",
                "--dataset",
                str(rows),
                "--dry_run",
            ]
        )
        == 0
    )


@pytest.mark.parametrize(
    "command, flag, needs",
    [
        ("data", "output_dir", "--model_name={folder} --dataset={rows}"),
        ("report", "output", "--run={folder}"),
        ("calibrate", "output", "--device=cpu --world_size=1"),
        ("convert", "output_dir", "--weights={rows} --model_name={folder}"),
        ("export", "output_dir", "--folder={folder} --to=ollama"),
    ],
)
def test_what_a_command_writes_is_asked_for_before_its_work(
    refused, folder, tmp_path, command, flag, needs
):
    """Not with a bare error of the system at the end of it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    given = needs.format(folder=folder, rows=rows).split()
    target = rows / "deep" / "x.html"
    assert f"--{flag} {target}: {rows} is a file; give another" in refused(
        command, *given, f"--{flag}={target}"
    )
