"""A tiny random model of every family that is tested, as config.json describes it.

Names are those that users know; several share one architecture. Each has what sets its family apart:
biases, norms, caps, scales, windows, fused layers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.catalog.arch import shape_from_config

SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
    rope_theta=500000.0,
)
WINDOWS = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
FAMILIES = {
    "Llama 2": dict(model_type="llama", num_key_value_heads=4, tie_word_embeddings=False),
    "CodeLlama": dict(model_type="llama", rope_theta=1e6, tie_word_embeddings=False),
    "Yi": dict(model_type="llama", rope_theta=5e6, tie_word_embeddings=False),
    "Llama 3": dict(model_type="llama", rope_theta=5e5, tie_word_embeddings=False),
    "Llama 3.1": dict(model_type="llama", rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False),
    "Llama 3.2": dict(
        model_type="llama",
        rope_parameters=LLAMA3_ROPE | dict(factor=32.0),
        head_dim=16,
        tie_word_embeddings=True,
    ),
    "SmolLM2": dict(model_type="llama", rope_theta=1e5, tie_word_embeddings=True),
    "Mistral": dict(model_type="mistral", sliding_window=8, tie_word_embeddings=False),
    "Qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "Qwen2.5": dict(model_type="qwen2", tie_word_embeddings=False, rope_theta=1e6),
    "Qwen3": dict(model_type="qwen3", head_dim=32, tie_word_embeddings=False),
    "Gemma": dict(model_type="gemma", head_dim=32),
    "Gemma 2": dict(
        model_type="gemma2",
        head_dim=32,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        **WINDOWS,
    ),
    "Gemma 3": dict(model_type="gemma3_text", head_dim=32, query_pre_attn_scalar=16, **WINDOWS),
    "Phi-3": dict(model_type="phi3", sliding_window=8, tie_word_embeddings=False),
    "Phi-4": dict(model_type="phi3", sliding_window=None, tie_word_embeddings=False),
    "GPT-2": dict(
        model_type="gpt2",
        n_positions=128,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_inner=None,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    ),
    "OLMo": dict(model_type="olmo", clip_qkv=0.5, tie_word_embeddings=False),
    "OLMo 2": dict(model_type="olmo2", tie_word_embeddings=False),
    "SmolLM3": dict(model_type="smollm3", no_rope_layers=[1, 0], tie_word_embeddings=True),
    "Granite": dict(
        model_type="granite",
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.3,
        logits_scaling=4.0,
        tie_word_embeddings=True,
    ),
    "StableLM": dict(
        model_type="stablelm",
        use_qkv_bias=True,
        partial_rotary_factor=0.25,
        tie_word_embeddings=False,
    ),
}

MOE_FAMILIES = {
    "Mixtral": dict(
        model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    ),
    "Qwen3-MoE": dict(
        model_type="qwen3_moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}


def family_config(family: str, **more):
    """The tiny model's configuration."""
    fields = SIZES | (FAMILIES | MOE_FAMILIES)[family] | more
    if fields["model_type"] == "gpt2":  # its names of the same sizes
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ):
            fields.pop(name)
    return AutoConfig.for_model(**fields)


def save_family(folder: str | Path, family: str, **more) -> str:
    """A random model of a family in transformers' format, every kind of weight away from its default."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(family, **more), dtype=torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
            else:
                p.normal_(0, 0.1)
    model.save_pretrained(folder)
    return str(folder)


# What sets a family apart, as docs/families.md says it.
TRAITS = {
    "sliding_window": "sliding windows",
    "attn_logit_softcapping": "capped scores",
    "final_logit_softcapping": "capped logits",
    "logits_scaling": "scaled logits",
    "clip_qkv": "clipped q, k, v",
    "num_local_experts": "experts",
    "num_experts": "experts",
    "no_rope_layers": "layers without rotation",
    "partial_rotary_factor": "partly rotated heads",
}


def families_table() -> str:
    """The table of docs/families.md: each family of these lists, its adapted layers, what is special."""
    lines = ["| family | `model_type` | `all-linear` adapts | also tested |", "|---|---|---|---|"]
    for family, fields in (FAMILIES | MOE_FAMILIES).items():
        shape = shape_from_config(family_config(family).to_dict())
        special = [text for key, text in TRAITS.items() if fields.get(key)]
        if "rope_type" in fields.get("rope_parameters", {}):
            special.append("scaled rotation")
        if shape.traits.qk_norm:
            special.append("normed q and k")
        if shape.traits.qkv_bias:
            special.append("biases")
        if shape.tied:
            special.append("tied")
        targets = ", ".join(name.rsplit(".", 1)[-1] for name in shape.linears())
        lines.append(f"| {family} | {fields['model_type']} | {targets} | {', '.join(special)} |")
    return "\n".join(lines)
