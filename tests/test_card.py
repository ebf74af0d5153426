"""The model card's snippet loads what was trained: run as it stands, it gives the trained model."""

from __future__ import annotations

import json
import re

import pytest
import torch

from fsdp_qlora.cli import main
from fsdp_qlora.commands.generate import load_for_inference

from .tokenizers import save_chat_model


@pytest.mark.parametrize("train_type", ["qlora", "lora", "full"])
def test_the_snippet_of_the_card_gives_the_model_that_was_trained(tmp_path, train_type):
    base, out = save_chat_model(tmp_path / "base", num_hidden_layers=1), tmp_path / "out"
    (tmp_path / "rows.jsonl").write_text(json.dumps(dict(prompt="a", completion="b")) + "\n")
    argv = ["train", "--model_name", base, "--dataset", str(tmp_path / "rows.jsonl")]
    argv += ["--train_type", train_type, "--device", "cpu", "--world_size", "1", "--lora_rank", "4"]
    argv += ["--precision", "fp32", "--lr", "0.01", "--output_dir", str(out)]
    assert main(argv) == 0
    folder = out / ("model" if train_type == "full" else "adapter")
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    code = code.replace("THIS FOLDER", str(folder)).replace('"base"', f'"{base}"')
    made: dict = {}
    exec(code.replace("torch.bfloat16", "torch.float32"), made)
    adapter = None if train_type == "full" else folder
    model = str(folder) if train_type == "full" else base
    expected = load_for_inference(model, adapter, dtype=torch.float32).eval()
    ids = made["tokenizer"]("Who are you?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        ours, theirs = expected(ids).logits, made["model"].eval().float()(ids).logits
        plain = load_for_inference(base, None, dtype=torch.float32).eval()(ids).logits
    assert (ours - theirs).abs().max() < 0.1 * (ours - plain).abs().max()
