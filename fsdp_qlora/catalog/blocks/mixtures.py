"""Blocks with experts of every build, and latent attention."""

from __future__ import annotations

from dataclasses import replace

from .parts import LLAMA_NORMS, Block, Mixer, Mlp, Sizes, attention, dense, experts, norms


def latent_attention(c: dict) -> Mixer:
    """Multi-head latent attention (arXiv:2405.04434)."""
    d, heads, rank = c["hidden_size"], c["num_attention_heads"], c.get("q_lora_rank")
    nope, rope, values = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    keys, q = c["kv_lora_rank"], heads * (nope + rope)
    queries: Sizes = (("q_proj", (q, d)),)
    if rank:
        queries = (("q_a_proj", (rank, d)), ("q_b_proj", (q, rank)))
    return Mixer(
        linears=(
            *queries,
            ("kv_a_proj_with_mqa", (keys + rope, d)),
            ("kv_b_proj", (heads * (nope + values), keys)),
            ("o_proj", (d, heads * values)),
        ),
        beside=(*((("q_a_layernorm", rank),) if rank else ()), ("kv_a_layernorm", keys)),
        heads=heads,
        kv_heads=heads,
        head_dim=nope + rope,
    )


def dense_first(c: dict, layer: int) -> Mlp:
    """DeepSeek's: dense in the first layers, then experts beside shared ones."""
    kinds = c.get("mlp_layer_types")
    if kinds[layer] == "dense" if kinds else layer < c.get("first_k_dense_replace", 0):
        return dense(c)
    width = c["moe_intermediate_size"]
    return experts(
        c,
        c["n_routed_experts"],
        c["num_experts_per_tok"],
        width,
        shared=width * (c.get("n_shared_experts") or 0),
        prefix="shared_experts.",
    )


def deepseek(c: dict, layer: int) -> Block:
    return Block(latent_attention(c), dense_first(c, layer), norms(c))


def glm4_moe(c: dict, layer: int) -> Block:
    of_heads = ("q_norm", "k_norm") if c.get("use_qk_norm") else ()
    return Block(attention(c, qk_norm=of_heads, out_bias=False), dense_first(c, layer), norms(c))


def gpt_oss(c: dict, layer: int) -> Block:
    count = c["num_local_experts"]
    mlp = experts(
        c,
        count,
        c["num_experts_per_tok"],
        c["intermediate_size"],
        biases=True,
        beside=(("router.bias", count),),
    )
    return Block(attention(c, bias=c.get("attention_bias", True), sinks=True), mlp, norms(c))


def llama4(c: dict, layer: int) -> Block:
    step = c.get("interleave_moe_layer_step") or 1
    chosen = c.get("moe_layers")
    has_experts = layer in chosen if chosen else (layer + 1) % step == 0
    if not has_experts:
        return Block(attention(c), dense(c, c["intermediate_size_mlp"]), norms(c))
    width, per_token = c["intermediate_size"], c["num_experts_per_tok"]
    mlp = experts(c, c["num_local_experts"], per_token, width, shared=width)
    return Block(attention(c), mlp, norms(c))


def normed_mixture(c: dict, layer: int) -> Block:
    """Experts everywhere, and norms over all of q and of k."""
    count = c.get("num_local_experts") or c["num_experts"]
    mixer = attention(c, qk_norm=("q_norm", "k_norm"), norm_of_width=True)
    width = c["intermediate_size"]
    return Block(mixer, experts(c, count, c["num_experts_per_tok"], width), norms(c))


def flex_olmo(c: dict, layer: int) -> Block:
    block = normed_mixture(c, layer)
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    return replace(block, norms=norms(c, *names))


def shared_beside_routed(c: dict, layer: int) -> Block:
    """dots.llm1, Solar Open: DeepSeek's mixture with plain attention; Solar's in every block."""
    if c["model_type"] == "solar_open":
        return Block(attention(c), dense_first(c | dict(first_k_dense_replace=0), layer), norms(c))
    mixer = attention(c, qk_norm=("q_norm", "k_norm"))
    return Block(mixer, dense_first(c, layer), norms(c))


def qwen_mlp(c: dict, layer: int) -> Mlp:
    """Experts beside one that every token passes through, by a gate; or dense."""
    routed = c.get("num_experts") and layer not in (c.get("mlp_only_layers") or ())
    if not routed or (layer + 1) % (c.get("decoder_sparse_step") or 1):
        return dense(c)
    mlp = experts(
        c,
        c["num_experts"],
        c["num_experts_per_tok"],
        c["moe_intermediate_size"],
        shared=c["shared_expert_intermediate_size"],
    )
    gate = (("shared_expert_gate", (1, c["hidden_size"])),)
    return replace(mlp, linears=gate + mlp.linears)


def qwen2_moe(c: dict, layer: int) -> Block:
    """Qwen3-Next's mixture in every block, with Qwen2's biases."""
    mixer = attention(c, bias=c.get("qkv_bias", True), out_bias=False)
    return Block(mixer, qwen_mlp(c, layer), norms(c))


def ernie_moe(c: dict, layer: int) -> Block:
    first, last = c["moe_layer_start_index"], c.get("moe_layer_end_index", -1)
    inside = first <= layer <= (c["num_hidden_layers"] - 1 if last == -1 else last)
    mixer = attention(c, bias=bool(c.get("use_bias")))
    if not inside or (layer + 1) % (c.get("moe_layer_interval") or 1):
        return Block(mixer, dense(c), norms(c))
    count, width = c["moe_num_experts"], c["moe_intermediate_size"]
    mlp = experts(
        c,
        count,
        c["moe_k"],
        width,
        shared=width * (c.get("moe_num_shared_experts") or 0),
        prefix="shared_experts.",
        beside=(("e_score_correction_bias", count),),
    )
    return Block(mixer, mlp, norms(c))


def granite_moe(c: dict, layer: int) -> Block:
    d, shared = c["hidden_size"], c.get("shared_intermediate_size") or 0
    mlp = experts(c, c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"])
    if shared:
        linears = (("input_linear", (2 * shared, d)), ("output_linear", (d, shared)))
        mlp = replace(mlp, linears=linears, width=mlp.width + shared)
    return Block(attention(c), mlp, norms(c))


def phi_moe(c: dict, layer: int) -> Block:
    """Norms have an offset."""
    width, per_token = c["intermediate_size"], c["num_experts_per_tok"]
    mlp = experts(c, c["num_local_experts"], per_token, width)
    return Block(attention(c), mlp, norms(c, *LLAMA_NORMS * 2))


def mimo_v2(c: dict, layer: int) -> Block:
    """Windows have sinks and twice as many key-value heads; values are smaller than keys."""
    windowed = c["layer_types"][layer] == "sliding_attention"
    heads, size, values = c["num_attention_heads"], c["head_dim"], c["v_head_dim"]
    kv_heads = c["num_key_value_heads"] * (2 if windowed else 1)
    d = c["hidden_size"]
    mixer = attention(c | dict(num_key_value_heads=kv_heads), out_bias=False, sinks=windowed)
    sizes = dict(mixer.linears) | dict(v_proj=(kv_heads * values, d), o_proj=(d, heads * values))
    mixer = replace(mixer, linears=tuple(sizes.items()), head_dim=size)
    return Block(mixer, dense_first(c, layer), norms(c))
