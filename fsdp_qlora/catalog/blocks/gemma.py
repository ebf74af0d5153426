"""Blocks of Gemma 3n and 4: keys that blocks share, an embedding for each block, several streams."""

from __future__ import annotations

from dataclasses import replace

from .parts import LLAMA_NORMS, Block, Mixer, Mlp, attention, dense, experts, norms

_AROUND_MLP = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


def gemma3n(c: dict, layer: int) -> Block:
    """Gemma 3n: four streams that are mixed around each block, and a low-rank layer beside attention."""
    d, n, rank = c["hidden_size"], c["altup_num_inputs"], c["laurel_rank"]
    mixer = attention(c, qk_norm=("q_norm", "k_norm"))
    mixer = _without_keys(mixer) if _shares_keys(c, layer) else mixer
    around = (
        *(("correction_coefs", (n, n)), ("prediction_coefs", (n * n, n))),
        *(("modality_router", (n, d)), ("linear_left", (rank, d)), ("linear_right", (d, rank))),
    )
    mixer = replace(
        mixer,
        linears=around + mixer.linears,
        in_16_bits=("correction_coefs", "prediction_coefs"),
    )
    widths = c.get("intermediate_sizes")
    mlp = _with_layer_input(c, dense(c, widths[layer] if widths else 0))
    names = (*LLAMA_NORMS, *_AROUND_MLP, "router_norm", "post_laurel_norm", "correct_output_scale")
    return Block(mixer, mlp, norms(c, *names))


def gemma4(c: dict, layer: int) -> Block:
    """Gemma 4: wide heads where all tokens are seen, keys that serve as values, a mixture beside an MLP."""
    d, heads, shares = c["hidden_size"], _gemma4_heads(c, layer), _shares_keys(c, layer)
    mixer = attention(c | heads, qk_norm=("q_norm", "k_norm"))
    if shares:
        mixer = _without_keys(mixer)
    elif c.get("attention_k_eq_v") and not _is_window(c, layer):
        mixer = replace(mixer, linears=tuple(x for x in mixer.linears if x[0] != "v_proj"))
    twice = 2 if c.get("use_double_wide_mlp") and shares else 1
    mlp = dense(c, twice * c["intermediate_size"])
    names: tuple[str, ...] = (*LLAMA_NORMS, *_AROUND_MLP)
    if c.get("enable_moe_block"):
        count = c["num_experts"]
        routed = experts(c, count, c["top_k_experts"], c["moe_intermediate_size"])
        mlp = replace(
            routed,
            linears=(("router.proj", (count, d)), *mlp.linears),
            width=routed.width + mlp.width,
            beside=(("router.scale", d), ("router.per_expert_scale", count)),
            router_is_linear=True,
        )
        names += (f"{_AROUND_MLP[1]}_1", f"{_AROUND_MLP[1]}_2", f"{_AROUND_MLP[0]}_2")
    return Block(mixer, _with_layer_input(c, mlp), norms(c, *names))


def _gemma4_heads(c: dict, layer: int) -> dict:
    """Sizes of a layer's heads: as Google's files give them, or as transformers writes them."""
    if "per_layer_config" in c:
        return dict((c["per_layer_config"] or {}).get(str(layer), {}))
    if _is_window(c, layer):
        return {}
    kv_heads = c.get("num_global_key_value_heads") if c.get("attention_k_eq_v") else None
    heads = dict(head_dim=c.get("global_head_dim", 512))
    return heads | (dict(num_key_value_heads=kv_heads) if kv_heads else {})


def _is_window(c: dict, layer: int) -> bool:
    kinds = c.get("layer_types")
    return kinds[layer] == "sliding_attention" if kinds else (layer + 1) % 6 != 0


def _shares_keys(c: dict, layer: int) -> bool:
    """Whether a block's attention reads the keys and values of an earlier one."""
    return 0 < c["num_hidden_layers"] - (c.get("num_kv_shared_layers") or 0) <= layer


def _without_keys(mixer: Mixer) -> Mixer:
    """Attention that reads the keys and values of an earlier block."""
    return replace(
        mixer,
        linears=tuple((n, s) for n, s in mixer.linears if n not in ("k_proj", "v_proj")),
        biases=tuple((n, s) for n, s in mixer.biases if n not in ("k_proj", "v_proj")),
        beside=tuple((n, s) for n, s in mixer.beside if n != "k_norm"),
    )


def _with_layer_input(c: dict, mlp: Mlp) -> Mlp:
    """Gemma's MLP, and what adds the block's own embedding after it."""
    d, width = c["hidden_size"], c.get("hidden_size_per_layer_input")
    if not width:
        return mlp
    gate = (("per_layer_input_gate", (width, d)), ("per_layer_projection", (d, width)))
    return replace(
        mlp,
        linears=gate + mlp.linears,  # before the MLP: the last of its layers gives its output
        beside=(*mlp.beside, ("post_per_layer_input_norm", d)),
    )
