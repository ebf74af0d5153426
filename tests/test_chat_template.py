"""`--chat_template`: rows in another form than the tokenizer's, kept beside what is trained."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.preflight.run_data import read_data, run_tokenizer

from .tokenizers import save_chat_model, save_tokenizer

END = "<|endoftext|>"


def turns(mark: str) -> str:
    """A template that begins each turn with a mark."""
    return (
        f"{{% for m in messages %}}{mark}{{{{ m['role'] }}}}: {{{{ m['content'] + eos_token }}}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{mark}assistant: {{% endif %}}"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and a conversation to train it on."""
    folder = tmp_path_factory.mktemp("model")
    save_chat_model(folder, num_hidden_layers=1)
    row = dict(messages=[dict(role="user", content="Hi"), dict(role="assistant", content="Pia.")])
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def config_of(folder, template, **others) -> RunConfig:
    rows = str(folder / "rows.jsonl")
    return RunConfig(model_name=str(folder), dataset=rows, chat_template=str(template), **others)


def row_of(config: RunConfig) -> tuple[str, str]:
    """The text of the row, and the part of it that is trained."""
    tokenizer = run_tokenizer(config)
    ids, labels = read_data(config, tokenizer).rows[0]
    return tokenizer.decode(ids), tokenizer.decode(labels[labels != -100])


def test_a_file_a_name_and_the_template_of_another_folder_are_taken(folder, tmp_path):
    file, adapter = tmp_path / "turns.jinja", tmp_path / "adapter"
    file.write_text(turns("#"))
    other = save_tokenizer(adapter)  # without config.json, as beside an adapter
    other.chat_template = turns("@")
    other.save_pretrained(adapter)
    for template, mark in ((file, "#"), (adapter, "@")):
        asked = f"{mark}user: Hi{END}{mark}assistant: "
        assert row_of(config_of(folder, template)) == (f"{asked}Pia.{END}", f"Pia.{END}")
    text, trained = row_of(config_of(folder, "chatml"))
    assert text.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nPia.<|im_end|>")
    assert trained.startswith("Pia.<|im_end|>")


def test_one_of_several_templates_of_the_tokenizer_is_taken_by_its_name(folder, tmp_path):
    save_chat_model(tmp_path, num_hidden_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = dict(default=turns("#"), rag=turns("@"))
    tokenizer.save_pretrained(tmp_path)
    rows = str(folder / "rows.jsonl")
    text, _ = row_of(RunConfig(model_name=str(tmp_path), dataset=rows, chat_template="rag"))
    assert text.startswith("@user: Hi")


def test_a_run_saves_the_template_with_the_adapter(folder, tmp_path):
    file, out = tmp_path / "turns.jinja", tmp_path / "out"
    file.write_text(turns("#"))
    argv = ["train", "--model_name", str(folder), "--dataset", str(folder / "rows.jsonl")]
    argv += ["--device", "cpu", "--world_size", "1", "--output_dir", str(out), "--lora_rank", "2"]
    assert main([*argv, "--chat_template", str(file)]) == 0
    saved = AutoTokenizer.from_pretrained(out / "adapter")
    turn = [dict(role="user", content="Hi")]
    asked = saved.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert asked == f"#user: Hi{END}#assistant: "


@pytest.mark.parametrize(
    "text, words",
    [
        ("{% for m in messages %}{{ m['content'] }}", "line 1"),
        ("{{ raise_exception('no') }}", "no"),
        ("Answer well.", "lacks the question or the answer"),
        ("{{ messages[0]['content'] }}", "lacks the question or the answer"),
    ],
)
def test_a_template_that_cannot_write_a_conversation_is_refused_before_any_row(
    folder, tmp_path, text, words
):
    file = tmp_path / "bad.jinja"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        run_tokenizer(config_of(folder, file))
    message = str(caught.value)
    assert message.startswith(f"--chat_template {file}: ") and words in message
    assert "\n" not in message and "; give " in message


def test_what_has_no_template_is_refused_with_what_can_be_given(folder, tmp_path):
    bare = tmp_path / "bare"
    tokenizer = save_tokenizer(bare)
    (bare / "chat_template.jinja").unlink()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(bare)
    (tmp_path / "nothing").mkdir()
    for given, words in (
        (tmp_path / "none.jinja", "no such file"),
        (bare, "has no chat template"),
        (tmp_path / "nothing", "a name (chatml)"),
        (tmp_path, "a name (chatml)"),
    ):
        with pytest.raises(ValueError, match="--chat_template") as caught:
            run_tokenizer(config_of(folder, given))
        assert words in str(caught.value) and "\n" not in str(caught.value)


def test_markers_that_are_no_tokens_are_said_with_the_flag_that_adds_them(folder, tmp_path, capsys):
    file = tmp_path / "turns.jinja"
    file.write_text(turns("<|turn|>"))
    run_tokenizer(config_of(folder, file))
    assert "--added_tokens '<|turn|>'" in capsys.readouterr().out
    run_tokenizer(config_of(folder, file, added_tokens="<|turn|>"))
    run_tokenizer(config_of(folder, "chatml"))
    assert not capsys.readouterr().out
