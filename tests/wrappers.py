"""A tiny random model of every tested type that has a language model inside, as config.json describes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig

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
TOWER = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
_QWEN_TOWER = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=14)
_MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
_SMALL_OMNI = dict(image_token_id=260, video_token_id=261, vision_start_token_id=262)


@dataclass(frozen=True)
class Wrapped:
    """A type's class, its configuration, and where its language model lies."""

    kind: str
    config: dict
    decoder: str = "model.language_model"
    head: str = "lm_head"

    def inner(self, name: str) -> str:
        """The name in the language model of one of the whole's."""
        if name.startswith(f"{self.decoder}."):
            return "model." + name.removeprefix(f"{self.decoder}.")
        return "lm_head" + name.removeprefix(self.head) if name.startswith(self.head) else name


WRAPPED = {
    "gemma3": Wrapped(
        "Gemma3ForConditionalGeneration",
        dict(
            text_config=TEXT
            | dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
            vision_config=TOWER,
            mm_tokens_per_image=4,
        ),
    ),
    "mistral3": Wrapped(
        "Mistral3ForConditionalGeneration",
        dict(
            text_config=TEXT | dict(model_type="mistral"),
            vision_config=TOWER | dict(model_type="pixtral", head_dim=16),
            tie_word_embeddings=False,
        ),
    ),
    "llama4": Wrapped(
        "Llama4ForConditionalGeneration",
        dict(
            text_config=TEXT
            | dict(
                intermediate_size_mlp=128,
                interleave_moe_layer_step=3,
                no_rope_layers=[1, 0],
                num_local_experts=2,
            ),
            vision_config=TOWER | dict(vision_output_dim=64, projector_input_dim=64),
        ),
        "language_model.model",
        "language_model.lm_head",
    ),
    "qwen3_vl": Wrapped(
        "Qwen3VLForConditionalGeneration",
        dict(
            text_config=TEXT | dict(rope_parameters=_MROPE),
            vision_config=_QWEN_TOWER | dict(out_hidden_size=64, deepstack_visual_indexes=[0, 1]),
            **_SMALL_OMNI,
        ),
    ),
    "qwen2_5_vl": Wrapped(
        "Qwen2_5_VLForConditionalGeneration",
        dict(
            text_config=TEXT | dict(rope_parameters=_MROPE),
            vision_config=_QWEN_TOWER | dict(out_hidden_size=64),
            tie_word_embeddings=True,
            **_SMALL_OMNI,
        ),
    ),
    "llava": Wrapped(
        "LlavaForConditionalGeneration",
        dict(
            text_config=TEXT | dict(model_type="llama"),
            vision_config=TOWER | dict(model_type="clip_vision_model", projection_dim=32),
        ),
    ),
    "idefics3": Wrapped(
        "Idefics3ForConditionalGeneration",
        dict(text_config=TEXT | dict(model_type="llama"), vision_config=TOWER, image_token_id=5),
        "model.text_model",
    ),
}


def save_wrapped(folder: str | Path, kind: str, **more) -> str:
    """A random model in fp32 with its tokenizer; norms and biases are moved, so that a lost one shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **WRAPPED[kind].config | more)
    model = getattr(transformers, WRAPPED[kind].kind)(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    (Path(folder) / "preprocessor_config.json").write_text('{"image_size": 28}')
    return str(folder)


def whole_model(folder: str, kind: str, **how):
    """The model as plain transformers loads it, with what it says of missing and unexpected tensors."""
    return getattr(transformers, WRAPPED[kind].kind).from_pretrained(
        folder, dtype=torch.float32, **how
    )
