"""Models with a language model inside, beside towers for images, are refused; the remedy works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from fsdp_qlora.build import planned_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.export.merge_base import open_base

from .tokenizers import VOCAB_SIZE, save_tokenizer

TEXT = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
VISION = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
WRAPPERS = {
    "gemma3": (
        "Gemma3ForCausalLM",
        dict(
            text_config=TEXT
            | dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
            vision_config=VISION,
            mm_tokens_per_image=4,
            image_token_index=5,
        ),
    ),
    "mistral3": (
        "MistralForCausalLM",
        dict(
            text_config=TEXT | dict(model_type="mistral"),
            image_token_index=5,
            vision_config=VISION | dict(model_type="pixtral", head_dim=16),
        ),
    ),
    "llava": (
        "LlamaForCausalLM",
        dict(
            text_config=TEXT | dict(model_type="llama"),
            image_token_index=5,
            vision_config=VISION | dict(model_type="clip_vision_model", projection_dim=32),
        ),
    ),
    "idefics3": (
        "LlamaForCausalLM",
        dict(text_config=TEXT | dict(model_type="llama"), vision_config=VISION, image_token_id=5),
    ),
}


@pytest.fixture(params=WRAPPERS)
def wrapper(request, tmp_path):
    """(kind, class for text alone, folder) of a tiny random model."""
    kind, (inner, config) = request.param, WRAPPERS[request.param]
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(kind, **config), dtype=torch.float32
    ).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return kind, inner, str(tmp_path)


def settings(folder) -> RunConfig:
    return RunConfig(model_name=str(folder), precision="fp32", device="cpu", lora_rank=2)


def test_a_model_with_towers_is_refused_with_the_class_for_text_alone(wrapper):
    kind, inner, folder = wrapper
    (Path(folder) / "model.safetensors").unlink()  # said before weights are looked for
    for read in (
        lambda: planned_model(settings(folder), torch.device("cpu")),
        lambda: open_base(folder),
    ):
        with pytest.raises(
            ValueError, match=f"--model_name {folder}: {kind} has a language"
        ) as caught:
            read()
        assert inner in str(caught.value) and "\n" not in str(caught.value)


def test_the_language_model_that_the_page_takes_out_has_the_same_logits_and_trains(
    wrapper, tmp_path
):
    _, inner, folder = wrapper
    page = (Path(__file__).parents[1] / "docs/families.md").read_text()
    (code,) = re.findall(r"```python\n(from transformers import MODEL_FOR.*?)```", page, re.DOTALL)
    code = re.sub(r"(?m)^name, folder = .*$", "", code)
    if wrapper[0] == "idefics3":
        code = code.replace("model.language_model", "model.text_model")
    names = dict(name=folder, folder=str(tmp_path / "text"))
    exec(compile(code, "docs/families.md", "exec"), names)
    text, whole = names["text"].eval(), names["model"].eval()
    assert type(text).__name__ == inner
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(text(ids).logits, whole(input_ids=ids).logits)
    model, _ = planned_model(settings(tmp_path / "text"), torch.device("cpu"))
    assert sum(".q_proj.lora_A." in name for name, _ in model.named_parameters()) == 2
