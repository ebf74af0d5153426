"""What a run and a merge leave behind: generation that stops, one chat template, prompts as trained."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from fsdp_qlora.cli import main
from fsdp_qlora.data import row_from_record
from fsdp_qlora.export.merge import merge_adapter
from tests.ranks import run_ranks
from tests.tokenizers import CHATML, save_chat_model

END = 2  # <|im_end|>, and 0 is the EOS
OTHER = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
RECORDS = {
    "alpaca": {"instruction": "Say hi", "output": "hi"},
    "question": {"question": "Say hi", "answer": "hi"},
    "prompt": {"prompt": "Say hi", "completion": "hi"},
}
# Together they can't be saved by transformers, yet bases have them.
ODD = {"temperature": 0.9, "top_p": 0.6, "do_sample": False}


def call(argvs: list[list[str]]) -> list[tuple[int, str]]:
    """Exit code and output of `fsdp-qlora` for each command line, in this rank."""
    results = []
    for argv in argvs:
        text = io.StringIO()
        with redirect_stdout(text), redirect_stderr(text):
            code = main(argv)
        results.append((code, text.getvalue()))
    return results


def without_template(folder: Path) -> str:
    """A copy of a model whose tokenizer has no chat template."""
    copy = shutil.copytree(folder, folder.with_name("plain"))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    assert AutoTokenizer.from_pretrained(copy).chat_template is None
    return str(copy)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Folders `chat` and `plain` of models, and one of a run for each kind of model and rows."""
    root = tmp_path_factory.mktemp("runs")
    save_chat_model(root / "chat", eos_token_id=0, bos_token_id=None, max_position_embeddings=256)
    (root / "chat" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "bos_token_id": 1, "repetition_penalty": 1.1, **ODD})
    )
    plain = without_template(root / "chat")
    argvs = []
    for base, kind, name in [
        (root / "chat", "full", "prompt"),
        (root / "chat", "lora", "prompt"),
        *((plain, "lora", name) for name in RECORDS),
    ]:
        rows = root / f"{name}.jsonl"
        rows.write_text(json.dumps(RECORDS[name]) + "\n")
        out = root / f"{Path(base).name}-{kind}-{name}"
        argvs.append(
            [
                "train",
                "--model_name",
                str(base),
                "--dataset",
                str(rows),
                "--train_type",
                kind,
                "--output_dir",
                str(out),
                "--precision",
                "fp32",
                "--device",
                "cpu",
                "--context_length",
                "256",
                "--compile",
                "false",
                "--max_steps",
                "2",
            ]
        )
    sample = root / "prompts.txt"
    sample.write_text("Say hi\n")
    argvs[-1] += ["--sample_prompts", str(sample), "--sample_tokens", "2"]
    for codes in run_ranks(call, 1, argvs, grouped=False):
        for code, text in codes:
            assert code == 0, text
    return root


def settings_of(folder) -> dict:
    return json.loads((Path(folder) / "generation_config.json").read_text())


def stops_of(folder) -> list[int]:
    """Where transformers stops with a folder's own settings."""
    stops = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    return stops if isinstance(stops, list) else [stops]


def test_a_full_save_keeps_its_bases_generation_settings_and_stops_at_the_trained_end(runs):
    saved = runs / "chat-full-prompt" / "model"
    assert stops_of(saved) == [0, END]
    kept = settings_of(runs / "chat") | {"eos_token_id": [0, END]}
    assert {name: settings_of(saved)[name] for name in kept} == kept


def test_a_merged_folder_stops_at_the_trained_end_and_keeps_the_other_settings(runs, tmp_path):
    adapter = runs / "chat-lora-prompt" / "adapter"
    merged = merge_adapter(str(runs / "chat"), adapter, tmp_path / "merged")
    assert settings_of(merged) == settings_of(runs / "chat") | {"eos_token_id": [0, END]}
    assert stops_of(merged) == [0, END]
    bare = shutil.copytree(runs / "chat", tmp_path / "bare")
    (bare / "generation_config.json").unlink()
    assert stops_of(merge_adapter(str(bare), adapter, tmp_path / "merged too")) == [0, END]
    known = {"eos_token_id": [END, 0], "pad_token_id": 0}
    (bare / "generation_config.json").write_text(json.dumps(known))
    assert settings_of(merge_adapter(str(bare), adapter, tmp_path / "and this")) == known


def put_template(folder: Path, template: str | None, place: str):
    """Let a folder have `template` in one of the places where transformers looks for it."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    if template and place == "inline":
        config["chat_template"] = template
    elif template:
        (folder / "chat_template.jinja").write_text(template)
    if place == "several":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(template + "tools")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


PLACES = ("inline", "file", "several")


@pytest.mark.parametrize("of_adapter", [*PLACES, "none"])
@pytest.mark.parametrize("of_base", PLACES)
def test_a_merged_folder_has_the_adapters_chat_template_and_nothing_of_the_bases(
    runs, tmp_path, of_base, of_adapter
):
    base = shutil.copytree(runs / "chat", tmp_path / "base")
    adapter = shutil.copytree(runs / "chat-lora-prompt" / "adapter", tmp_path / "adapter")
    put_template(base, CHATML, of_base)
    put_template(adapter, OTHER if of_adapter != "none" else None, of_adapter)
    (base / "special_tokens_map.json").write_text('{"eos_token": "<|im_start|>"}')
    merged = merge_adapter(str(base), adapter, tmp_path / "merged")
    wanted, found = (AutoTokenizer.from_pretrained(folder) for folder in (adapter, merged))
    assert found.chat_template == wanted.chat_template and found.eos_token == wanted.eos_token
    assert not any(
        "<|im_start|>{{" in file.read_text()
        for file in merged.rglob("*")
        if file.suffix in (".jinja", ".json") and file.name != "tokenizer.json"
    )


def test_an_adapter_that_brings_a_template_alone_replaces_the_bases(runs, tmp_path):
    for place in PLACES:
        base = shutil.copytree(runs / "chat", tmp_path / place / "base")
        put_template(base, CHATML, place)
        adapter = shutil.copytree(
            runs / "chat-lora-prompt" / "adapter", tmp_path / place / "adapter"
        )
        for file in adapter.glob("*token*"):
            file.unlink()
        (adapter / "chat_template.jinja").write_text(OTHER)
        merged = merge_adapter(str(base), adapter, tmp_path / place / "merged")
        assert AutoTokenizer.from_pretrained(merged).chat_template == OTHER
        assert "chat_template" not in json.loads((merged / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("name", RECORDS)
def test_generate_asks_as_rows_were_asked_where_there_is_no_template(
    runs, tmp_path, name, monkeypatch, capsys
):
    adapter, asked = runs / f"plain-lora-{name}" / "adapter", []
    monkeypatch.setattr(
        LlamaForCausalLM, "generate", lambda self, inputs, **_: asked.append(inputs)
    )
    assert main(["generate", str(adapter), "--prompt", "Say hi", "--device", "cpu"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    trained = row_from_record(RECORDS[name], "row").plain_prompt
    assert tokenizer.decode(asked[0][0]) == trained
    merged = merge_adapter(str(runs / "plain"), adapter, tmp_path / "merged")
    text = AutoTokenizer.from_pretrained(merged).apply_chat_template(
        [{"role": "user", "content": "Say hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == trained
    assert stops_of(merged) == [0]


def test_samples_in_training_ask_so_too(runs):
    lines = (runs / "plain-lora-prompt" / "metrics.jsonl").read_text().splitlines()
    samples = [record for record in map(json.loads, lines) if record.get("kind") == "samples"]
    assert samples and all(sample["prompt"] == "Say hi" for sample in samples[0]["samples"])


# ---- what generate reads -----------------------------------------------------------------------------


def refused(capsys, *argv) -> str:
    assert main(["generate", *map(str, argv), "--prompt", "hi", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_generate_reads_no_pickle(runs, tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(torch, "load", lambda *args, **named: opened.append(args))
    base = shutil.copytree(runs / "chat", tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    torch.save(weights, base / "pytorch_model.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    named = ["--model_name", base]
    assert "names pytorch_model.bin, which is not a safetensors file" in refused(capsys, *named)
    (base / "model.safetensors.index.json").unlink()
    (base / "model.safetensors").rename(base / "other.safetensors")
    assert "model.safetensors" in refused(capsys, *named)
    (base / "other.safetensors").unlink()
    assert "it holds only pytorch_model.bin" in refused(capsys, *named)
    adapter = shutil.copytree(runs / "chat-lora-prompt" / "adapter", tmp_path / "adapter")
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors can't be read" in refused(capsys, adapter)
    base = shutil.copytree(runs / "chat", tmp_path / "both")
    shutil.copy(adapter / "adapter_config.json", base)
    assert "contains an adapter_config.json" in refused(capsys, "--model_name", base)
    assert not opened


def test_a_broken_tokenizer_of_an_adapter_is_one_line(runs, tmp_path, capsys):
    adapter = shutil.copytree(runs / "chat-lora-prompt" / "adapter", tmp_path / "adapter")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / file).write_text("{")
    assert "its tokenizer can't be loaded" in refused(capsys, adapter)


def test_broken_generation_settings_are_one_line(runs, tmp_path):
    for text, fault in (
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not valid JSON (nested too deeply)"),
    ):
        base = shutil.copytree(runs / "chat", tmp_path / f"base{len(text)}")
        (base / "generation_config.json").write_text(text)
        argv = [
            "train",
            "--model_name",
            str(base),
            "--dataset",
            str(runs / "prompt.jsonl"),
            "--device",
            "cpu",
            "--precision",
            "fp32",
            "--output_dir",
            str(tmp_path / "out"),
        ]
        [(code, said)] = call([argv])
        assert code == 2 and "generation_config.json: " + fault in said
