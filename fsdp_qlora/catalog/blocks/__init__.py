"""Blocks of models that are not built like Llama's, from config.json's fields.

A model of several kinds of blocks, such as a hybrid, has one `Block` for each kind, with how many of them
there are. Pure: no torch.

Modules, each importing only from those before it: parts, mixtures, hybrids, gemma.
"""

from __future__ import annotations

from collections.abc import Callable

from .gemma import gemma3n, gemma4
from .hybrids import (
    bamba,
    falcon_h1,
    granite_hybrid,
    kimi_linear,
    lfm2,
    minimax,
    nemotron_h,
    olmo_hybrid,
    qwen_hybrid,
)
from .mixtures import (
    deepseek,
    ernie_moe,
    flex_olmo,
    glm4_moe,
    gpt_oss,
    granite_moe,
    llama4,
    mimo_v2,
    normed_mixture,
    phi_moe,
    qwen2_moe,
    shared_beside_routed,
)
from .parts import Block, LayerInputs, Mixer, Sizes

__all__ = ["Block", "LayerInputs", "Mixer", "Sizes", "layer_blocks", "layer_inputs", "left_out"]

_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")

# Each model_type's block of a number.
_BUILDERS: dict[str, Callable[[dict, int], Block]] = {
    "gpt_oss": gpt_oss,
    "qwen3_5_text": qwen_hybrid,
    "qwen3_5_moe_text": qwen_hybrid,
    "qwen3_next": qwen_hybrid,
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "glm4_moe_lite": deepseek,
    "glm4_moe": glm4_moe,
    "granitemoehybrid": granite_hybrid,
    "bamba": bamba,
    "falcon_h1": falcon_h1,
    "lfm2": lfm2,
    "lfm2_moe": lfm2,
    "llama4_text": llama4,
    "minimax": minimax,
    "minimax_m2": normed_mixture,
    "olmoe": normed_mixture,
    "flex_olmo": flex_olmo,
    "qwen2_moe": qwen2_moe,
    "dots1": shared_beside_routed,
    "solar_open": shared_beside_routed,
    "ernie4_5_moe": ernie_moe,
    "granitemoe": granite_moe,
    "granitemoeshared": granite_moe,
    "phimoe": phi_moe,
    "mimo_v2_flash": mimo_v2,
    "kimi_linear": kimi_linear,
    "nemotron_h": nemotron_h,
    "olmo_hybrid": olmo_hybrid,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "gemma4_unified_text": gemma4,
}

# Layers that `all-linear` leaves out, by the last part of their names (adapters/targets.py, `left_out`).
_LEFT_OUT = dict.fromkeys(
    (
        *("qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"),
        *("dots1", "solar_open", "ernie4_5_moe"),
    ),
    _OF_EXPERTS,
) | {
    **dict.fromkeys(("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"), ("out_proj",)),
    "gemma3n_text": ("correction_coefs", "prediction_coefs"),
}


def layer_blocks(config: dict) -> list[Block]:
    """Each block of the model that a config.json describes, in order.

    Empty for a type whose blocks are all alike and built like Llama's (families.py).
    """
    build = _BUILDERS.get(config.get("model_type", ""))
    return [build(config, layer) for layer in range(config["num_hidden_layers"])] if build else []


def left_out(family: str) -> tuple[str, ...]:
    """Last parts of the names of layers that `all-linear` leaves out of a model_type."""
    return _LEFT_OUT.get(family, ())


def layer_inputs(config: dict) -> LayerInputs | None:
    """What the model that a config.json describes gives its blocks beside the stream."""
    if config.get("model_type") not in ("gemma3n_text", "gemma4_text", "gemma4_unified_text"):
        return None
    return LayerInputs(
        config.get("vocab_size_per_layer_input") or config["vocab_size"],
        config.get("hidden_size_per_layer_input") or 0,
        config.get("altup_num_inputs", 1),
    )
