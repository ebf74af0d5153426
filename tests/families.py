"""A tiny random model of every family that is tested, as config.json describes it.

Names are those that users know; several share one architecture. Each has what sets its family apart:
biases, norms, caps, scales, windows, fused layers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from fsdp_qlora.adapters.targets import left_out
from fsdp_qlora.catalog.blocks import layer_blocks
from fsdp_qlora.catalog.families import with_common_names
from fsdp_qlora.loading import meta_model
from fsdp_qlora.model.blocks import linear_names
from fsdp_qlora.model.row_mixers import row_mixers

from .chat_templates import of_family
from .tiny import with_lora

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


# Types of 2025 and 2026, and older ones that were not listed: mixers beside attention, latent attention,
# experts of other builds. Inputs of linear layers are whole blocks of 64, as in published models.
_DELTA = dict(
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
_MAMBA = dict(
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=16,
    mamba_n_groups=1,
    mamba_chunk_size=8,
    mamba_expand=2,
)
_MLA = dict(
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
_LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=64)
_ROUTED = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
_INDEXER = dict(index_n_heads=16, index_head_dim=16, index_topk=8)
_FOUR_LAYERS = dict(
    num_hidden_layers=4,
    layer_types=["sliding_attention", "full_attention"] * 2,
    sliding_window=8,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=64,
    vocab_size_per_layer_input=97,
    head_dim=16,
    tie_word_embeddings=True,
)
NEWER_FAMILIES = {
    "Qwen3.5": dict(model_type="qwen3_5_text", head_dim=32, **_DELTA),
    "Qwen3.5-MoE": dict(
        model_type="qwen3_5_moe_text",
        head_dim=32,
        shared_expert_intermediate_size=64,
        **_DELTA,
        **_EXPERTS,
    ),
    "Qwen3-Next": dict(
        model_type="qwen3_next",
        head_dim=32,
        shared_expert_intermediate_size=64,
        **_DELTA,
        **_EXPERTS,
    ),
    "Qwen2-MoE": dict(model_type="qwen2_moe", shared_expert_intermediate_size=64, **_EXPERTS),
    "Granite 4 H": dict(
        model_type="granitemoehybrid",
        layer_types=["mamba", "attention"],
        shared_intermediate_size=64,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.3,
        logits_scaling=4.0,
        position_embedding_type="nope",
        **_LOCAL_EXPERTS,
        **_MAMBA,
    ),
    "Granite 3 MoE": dict(
        model_type="granitemoe", logits_scaling=4.0, residual_multiplier=0.3, **_LOCAL_EXPERTS
    ),
    "Granite 3 MoE, shared expert": dict(
        model_type="granitemoeshared",
        logits_scaling=4.0,
        shared_intermediate_size=64,
        **_LOCAL_EXPERTS,
    ),
    "LFM2": dict(
        model_type="lfm2",
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
    ),
    "LFM2-MoE": dict(
        model_type="lfm2_moe",
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
        tie_word_embeddings=True,
        **_EXPERTS,
    ),
    "Falcon-H1": dict(model_type="falcon_h1", mamba_d_ssm=128, **_MAMBA),
    "Bamba": dict(model_type="bamba", attn_layer_indices=[1], **_MAMBA),
    "Nemotron 3": dict(
        model_type="nemotron_h",
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        num_hidden_layers=4,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        head_dim=16,
    ),
    "Nemotron": dict(model_type="nemotron"),
    "Gemma 3n": dict(
        model_type="gemma3n_text",
        laurel_rank=64,
        activation_sparsity_pattern=[0.95, 0.0, 0.0, 0.0],
        final_logit_softcapping=3.0,
        **_FOUR_LAYERS,
    ),
    "Gemma 4": dict(
        model_type="gemma4_text", global_head_dim=32, final_logit_softcapping=3.0, **_FOUR_LAYERS
    ),
    "Gemma 4 MoE": dict(
        model_type="gemma4_text",
        head_dim=16,
        global_head_dim=32,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=64,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        tie_word_embeddings=True,
        **WINDOWS,
    ),
    "Llama 4": dict(
        model_type="llama4_text",
        head_dim=16,
        intermediate_size=64,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=1,
        moe_layers=[1],
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
    "gpt-oss": dict(model_type="gpt_oss", head_dim=16, **_LOCAL_EXPERTS, **WINDOWS),
    "DeepSeek V2": dict(model_type="deepseek_v2", **_MLA, **_ROUTED),
    "DeepSeek V3": dict(model_type="deepseek_v3", **_MLA, **_ROUTED),
    "DeepSeek V3.2": dict(model_type="deepseek_v32", **_INDEXER, **_MLA, **_ROUTED),
    "GLM-4": dict(model_type="glm4", head_dim=16, attention_bias=True),
    "GLM-4, 9B": dict(model_type="glm", head_dim=16, attention_bias=True),
    "GLM-4.5": dict(
        model_type="glm4_moe", head_dim=16, use_qk_norm=True, attention_bias=True, **_ROUTED
    ),
    "GLM-4.7-Flash": dict(model_type="glm4_moe_lite", **_MLA, **_ROUTED),
    "GLM-5": dict(model_type="glm_moe_dsa", **_INDEXER, **_MLA, **_ROUTED),
    "Kimi Linear": dict(
        model_type="kimi_linear",
        layer_types=["linear_attention", "full_attention"],
        linear_head_dim=64,
        linear_num_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        **_MLA | dict(q_lora_rank=None),
    ),
    "Youtu": dict(model_type="youtu", **_MLA),
    "MiniCPM 3": dict(model_type="minicpm3", **_MLA),
    "OLMo 3": dict(model_type="olmo3", **WINDOWS),
    "OLMo Hybrid": dict(model_type="olmo_hybrid", **_DELTA),
    "OLMoE": dict(model_type="olmoe", num_experts=4, num_experts_per_tok=2, intermediate_size=64),
    "FlexOlmo": dict(
        model_type="flex_olmo", num_experts=4, num_experts_per_tok=2, intermediate_size=64
    ),
    "Ministral": dict(model_type="ministral", head_dim=16, **WINDOWS),
    "Ministral 3": dict(model_type="ministral3"),
    "ERNIE 4.5": dict(model_type="ernie4_5", use_bias=True, head_dim=16),
    "ERNIE 4.5 MoE": dict(
        model_type="ernie4_5_moe",
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_intermediate_size=64,
        moe_layer_start_index=1,
    ),
    "Apertus": dict(model_type="apertus"),
    "Cohere": dict(model_type="cohere", logit_scale=0.25, use_qk_norm=True),
    "Cohere 2": dict(model_type="cohere2", logit_scale=0.25, **WINDOWS),
    "EXAONE 4": dict(model_type="exaone4", **WINDOWS),
    "K-EXAONE": dict(
        model_type="exaone_moe",
        num_shared_experts=1,
        mlp_layer_types=["dense", "sparse"],
        **WINDOWS,
        **_EXPERTS,
    ),
    "MiniMax M2": dict(model_type="minimax_m2", head_dim=16, rotary_dim=8, **_LOCAL_EXPERTS),
    "MiniMax 01": dict(
        model_type="minimax",
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        block_size=8,
        **_LOCAL_EXPERTS,
    ),
    "Hunyuan": dict(model_type="hunyuan_v1_dense", head_dim=16),
    "Hunyuan-A13B": dict(
        model_type="hunyuan_v1_moe",
        head_dim=16,
        num_experts=4,
        moe_topk=2,
        num_shared_expert=1,
        intermediate_size=64,
    ),
    "Hunyuan 3": dict(
        model_type="hy_v3", head_dim=16, first_k_dense_replace=1, num_shared_experts=1, **_EXPERTS
    ),
    "AFM (Arcee)": dict(model_type="arcee"),
    "Trinity (Arcee)": dict(
        model_type="afmoe",
        num_dense_layers=1,
        num_shared_experts=1,
        head_dim=16,
        **WINDOWS,
        **_EXPERTS,
    ),
    "Seed-OSS": dict(
        model_type="seed_oss",
        head_dim=16,
        attention_bias=True,
        residual_dropout=0.0,
        attention_dropout=0.0,
    ),
    "Phi-4-mini": dict(model_type="phi3", partial_rotary_factor=0.75, tie_word_embeddings=True),
    "Phi-2": dict(model_type="phi"),
    "Phi-3.5-MoE": dict(
        model_type="phimoe", input_jitter_noise=0.0, router_jitter_noise=0.0, **_LOCAL_EXPERTS
    ),
    "StarCoder 2": dict(
        model_type="starcoder2", sliding_window=8, residual_dropout=0.0, embedding_dropout=0.0
    ),
    "Falcon": dict(model_type="falcon", new_decoder_architecture=True, num_kv_heads=2),
    "GPT-NeoX": dict(model_type="gpt_neox"),
    "OPT": dict(model_type="opt", ffn_dim=128, word_embed_proj_dim=64, dropout=0.0),
    "CWM": dict(model_type="cwm", head_dim=16, **WINDOWS),
    "Helium": dict(model_type="helium", head_dim=16),
    "dots.llm1": dict(
        model_type="dots1", head_dim=16, layer_types=["full_attention"] * 2, **_ROUTED
    ),
    "Solar Open": dict(model_type="solar_open", head_dim=16, **_ROUTED),
    "VaultGemma": dict(
        model_type="vaultgemma",
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        **WINDOWS,
    ),
    "HyperCLOVA X": dict(model_type="hyperclovax"),
    "nanochat": dict(model_type="nanochat"),
    "Jais 2": dict(model_type="jais2", head_dim=16),
    "MiMo V2 Flash": dict(
        model_type="mimo_v2_flash",
        head_dim=16,
        v_head_dim=16,
        swa_head_dim=16,
        swa_v_head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        **WINDOWS,
    ),
    "Mellum": dict(model_type="mellum", head_dim=16, **WINDOWS, **_EXPERTS),
    "Command A MoE": dict(
        model_type="cohere2_moe",
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        tie_word_embeddings=True,
        **WINDOWS,
    ),
    "MiniMax M3": dict(
        model_type="minimax_m3_vl_text",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
        dense_intermediate_size=128,
        shared_intermediate_size=64,
        rotary_dim=8,
        mlp_layer_types=["dense", "sparse"],
    ),
    "Granite SWA": dict(model_type="granite_swa", **WINDOWS),
    "Granite MoE SWA": dict(
        model_type="granitemoe_swa",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=64,
    ),
    "A.X K1": dict(model_type="axk1", **_MLA, **_ROUTED),
    "Gemma 4 unified": dict(model_type="gemma4_unified_text", head_dim=16),
}
NEWER_FAMILIES = {
    family: dict(tie_word_embeddings=False) | fields for family, fields in NEWER_FAMILIES.items()
}
EVERY_FAMILY = FAMILIES | MOE_FAMILIES | NEWER_FAMILIES
# Of which not all holds that does of those: compressed keys and values go across rows of a pack, and PEFT
# can't adapt the groups of an output projection.
TRIED = {
    "DeepSeek V4": dict(
        model_type="deepseek_v4",
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=64,
        q_lora_rank=64,
        o_lora_rank=64,
        o_groups=2,
        index_n_heads=2,
        index_head_dim=64,
        index_topk=4,
        hc_mult=2,
        sliding_window=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        layer_types=[
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=8),
        mlp_layer_types=["hash_moe", "moe", "moe"],
    ),
}


def family_config(family: str, **more):
    """The tiny model's configuration."""
    fields = SIZES | (EVERY_FAMILY | TRIED)[family] | more
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


# Of other builds than Llama's: blocks of several kinds, mixers beside attention, shared experts.
BUILT = [f for f in NEWER_FAMILIES if layer_blocks(with_common_names(family_config(f).to_dict()))]


def two_alike(family: str) -> tuple[nn.Module, nn.Module]:
    """Two models of a family with the same random weights, in fp32, of which one may be changed."""
    torch.manual_seed(0)
    first, second = (
        AutoModelForCausalLM.from_config(family_config(family), dtype=torch.float32).eval()
        for _ in range(2)
    )
    with torch.no_grad():
        for p in first.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.1)
    second.load_state_dict(first.state_dict())
    return second, first


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


# Linear layers whose weight the model's own code reads, by the last part of their names: frozen, 16 bits.
READ = {
    "bamba": ["out_proj"],
    "deepseek_v32": ["weights_proj"],
    "falcon_h1": ["out_proj"],
    "gemma3n_text": ["correction_coefs", "prediction_coefs"],
    "glm_moe_dsa": ["weights_proj"],
    "granitemoehybrid": ["out_proj"],
    "hunyuan_v1_moe": ["wg"],
    "nemotron_h": ["out_proj"],
}
# Linear layers that the model's own code runs under no_grad: adapters there would never learn.
UNTRAINED = dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), ["weights_proj", "wq_b", "wk"])
# Types in which PEFT takes the names of an MLP's layers for weights of experts.
TAKEN_FOR_EXPERTS = {
    "afmoe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "dots1",
    "ernie4_5_moe",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hunyuan_v1_moe",
    "qwen3_next",
    "solar_open",
}
MLP = ["gate", "gate_proj", "up_proj", "down_proj"]  # and the router


def reference(folder: str, family: str, kind: str):
    """A family's model under plain transformers, bitsandbytes and PEFT, as a run of this kind is.

    Without a line of this project but the adapters' first values.
    """
    config = family_config(family)
    kept = READ.get(config.model_type, [])
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=["lm_head", *kept],
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=quantization if kind == "qlora" else None,
        attn_implementation=attention_of(family),
    )
    if kind == "qlora":
        round_others(model)
    head = model.get_output_embeddings()
    frozen = [
        *kept,
        *UNTRAINED.get(config.model_type, []),
        *(MLP if config.model_type in TAKEN_FOR_EXPERTS else []),
    ]
    names = [
        name
        for name, m in model.named_modules()
        if isinstance(m, (torch.nn.Linear, Conv1D)) and m is not head
        if not type(m).__name__.endswith("Router") and name.rsplit(".", 1)[-1] not in frozen
    ]
    return with_lora(model, "|".join(name.replace(".", r"\.") for name in names))


def attention_of(family: str) -> str | None:
    """The attention that computes all that a family's configuration says; None: transformers' choice."""
    return "eager" if getattr(family_config(family), "attn_logit_softcapping", None) else None


@torch.no_grad()
def round_others(model):
    """Give experts, and layers of a class of their own, what 4 bits stand for; bitsandbytes does not."""
    for module in model.modules():
        kind = type(module).__name__
        transposed = getattr(module, "is_transposed", kind == "Llama4TextExperts")
        if kind == "FalconLinear":
            module.weight.copy_(rounded(module.weight))
        for p in module.parameters(recurse=False):
            if p.dim() == 3 and "Conv" not in kind:
                for weight in p.transpose(1, 2) if transposed else p:
                    weight.copy_(rounded(weight))


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """A weight after 4 bits."""
    return dequantize_4bit(*quantize_4bit(weight.data.contiguous(), quant_type="nf4"))


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
    "n_routed_experts": "experts",
    "moe_num_experts": "experts",
    "shared_expert_intermediate_size": "a shared expert",
    "shared_intermediate_size": "a shared expert",
    "n_shared_experts": "a shared expert",
    "kv_lora_rank": "latent attention",
    "index_topk": "indexed attention",
    "linear_num_key_heads": "gated delta nets",
    "linear_num_heads": "gated delta nets",
    "mamba_d_head": "Mamba mixers",
    "mamba_head_dim": "Mamba mixers",
    "num_kv_shared_layers": "keys and values of earlier layers",
    "attention_chunk_size": "attention in chunks",
    "use_bias": "biases",
    "attention_bias": "biases",
}


# By vLLM's list of supported models (https://docs.vllm.ai/en/latest/models/supported_models.html, November
# 2026): text models whose LoRA adapters it serves, and those that it serves merged.
VLLM_ADAPTERS = set(
    """
    afmoe apertus arcee cohere cohere2 cwm deepseek_v2 deepseek_v3 deepseek_v32 ernie4_5 ernie4_5_moe
    exaone4 falcon_h1 gemma gemma2 gemma3_text gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa
    gpt_oss granite granitemoe granitemoehybrid granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax lfm2 lfm2_moe llama minicpm3 minimax_m2 mistral mixtral nemotron nemotron_h olmo olmo2
    olmo3 olmo_hybrid opt phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next seed_oss smollm3
    starcoder2 vaultgemma
    """.split()
)
VLLM_MERGED = set(
    """
    exaone_moe falcon flex_olmo gemma3n_text gpt2 gpt_neox jais2 kimi_linear mellum mimo_v2_flash olmoe
    stablelm
    """.split()
)


def _vllm(model_type: str) -> str:
    """What vLLM takes of a trained model; empty if its list does not name the type."""
    if model_type in VLLM_ADAPTERS:
        return "adapter, merged"
    return "merged" if model_type in VLLM_MERGED else ""


def families_table() -> str:
    """The table of docs/families.md: each family of these lists, and what a run does with it."""
    lines = [
        "| family | `model_type` | `all-linear` adapts | left out | packing | vLLM "
        "| chat template | also tested |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family in EVERY_FAMILY:
        config = family_config(family)
        model = meta_model(config, torch.float32, "eager")
        cells = (
            family,
            config.model_type,
            ", ".join(n for n in linear_names(model) if n not in left_out(model)),
            ", ".join(left_out(model)),
            "by rows" if row_mixers(model) else "yes",
            _vllm(config.model_type),
            of_family(family),
            ", ".join(_special(family, config)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _special(family: str, config) -> list[str]:
    """What is special about a family."""
    fields = EVERY_FAMILY[family]
    special = [text for key, text in TRAITS.items() if fields.get(key)]
    if "rope_type" in fields.get("rope_parameters", {}):
        special.append("scaled rotation")
    if config.tie_word_embeddings:
        special.append("tied")
    return list(dict.fromkeys(special))
