"""Blocks whose mixer carries a state along a row: gated delta nets, Mamba, short convolutions."""

from __future__ import annotations

from dataclasses import replace

from .mixtures import dense_first, latent_attention, qwen_mlp
from .parts import Block, Mixer, Mlp, attention, dense, experts, norms, ungated


def _delta_net(c: dict, fused: bool) -> Mixer:
    """Gated delta net (arXiv:2412.06464): as Qwen3-Next's code has it (`fused`), or Qwen3.5's."""
    d, heads = c["hidden_size"], c["linear_num_value_heads"]
    size = c["linear_value_head_dim"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * size
    joined = (("in_proj_qkvz", (2 * (keys + values), d)), ("in_proj_ba", (2 * heads, d)))
    apart = (
        ("in_proj_qkv", (2 * keys + values, d)),
        ("in_proj_z", (values, d)),
        ("in_proj_b", (heads, d)),
        ("in_proj_a", (heads, d)),
    )
    conv = c.get("linear_conv_kernel_dim", 4) * (2 * keys + values)
    return Mixer(
        linears=(*(joined if fused else apart), ("out_proj", (d, values))),
        beside=(("conv1d", conv), ("dt_bias", heads), ("A_log", heads), ("norm", size)),
        state=heads * size * c["linear_key_head_dim"],
        state_heads=heads,
        rule="delta",
    )


def qwen_hybrid(c: dict, layer: int) -> Block:
    """Qwen3-Next and Qwen3.5: three gated delta nets, then gated attention."""
    kind, fused = c["layer_types"][layer], c["model_type"] == "qwen3_next"
    attends = kind == "full_attention"
    mixer = (
        attention(c, q_times=2, qk_norm=("q_norm", "k_norm")) if attends else _delta_net(c, fused)
    )
    return Block(mixer, qwen_mlp(c, layer), norms(c))


def olmo_hybrid(c: dict, layer: int) -> Block:
    """OLMo Hybrid: gated delta nets behind norms, then attention before them."""
    if c["layer_types"][layer] == "full_attention":
        mixer = attention(c, qk_norm=("q_norm", "k_norm"), norm_of_width=True)
        after = norms(c, "post_attention_layernorm", "post_feedforward_layernorm")
        return Block(mixer, dense(c), after)
    d, heads = c["hidden_size"], c["linear_num_value_heads"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = heads * c["linear_value_head_dim"]
    conv = c.get("linear_conv_kernel_dim", 4) * (2 * keys + values)
    mixer = Mixer(
        linears=(
            *(("q_proj", (keys, d)), ("k_proj", (keys, d)), ("v_proj", (values, d))),
            *(("a_proj", (heads, d)), ("b_proj", (heads, d))),
            *(("g_proj", (values, d)), ("o_proj", (d, values))),
        ),
        beside=(
            *(("conv1d", conv), ("dt_bias", heads), ("A_log", heads)),
            ("o_norm", c["linear_value_head_dim"]),
        ),
        state=values * c["linear_key_head_dim"],
        state_heads=heads,
        rule="delta",
    )
    return Block(mixer, dense(c), norms(c))


def _mamba(c: dict, width: int, norm: bool, prefix: str = "") -> Mixer:
    """Mamba 2 (arXiv:2405.21060)."""
    d, heads = c["hidden_size"], c["mamba_n_heads"]
    convolved = width + 2 * c["mamba_n_groups"] * c["mamba_d_state"]
    ends = ((prefix + "in_proj", (width + convolved + heads, d)), (prefix + "out_proj", (d, width)))
    kernel = c.get("mamba_d_conv", 4) + bool(c.get("mamba_conv_bias", True))
    of_heads = tuple((name, heads) for name in ("dt_bias", "A_log", "D"))
    return Mixer(
        linears=ends,
        biases=tuple((n, rows) for n, (rows, _) in ends) if c.get("mamba_proj_bias") else (),
        beside=(("conv1d", kernel * convolved), *of_heads, *((("norm", width),) if norm else ())),
        in_16_bits=(prefix + "out_proj",),
        state=width * c["mamba_d_state"],
        state_heads=heads,
        rule="mamba2",
    )


def granite_hybrid(c: dict, layer: int) -> Block:
    d, shared = c["hidden_size"], c["shared_intermediate_size"]
    attends = c["layer_types"][layer] in ("attention", "full_attention")
    mixer = attention(c) if attends else _mamba(c, c["mamba_n_heads"] * c["mamba_d_head"], True)
    linears = (("input_linear", (2 * shared, d)), ("output_linear", (d, shared)))
    if not c.get("num_local_experts"):
        return Block(mixer, Mlp(linears=linears, width=shared), norms(c))
    per_token, width = c["num_experts_per_tok"], c["intermediate_size"]
    mlp = experts(c, c["num_local_experts"], per_token, width)
    return Block(mixer, replace(mlp, linears=linears, width=mlp.width + shared), norms(c))


def bamba(c: dict, layer: int) -> Block:
    """Mamba 2 in every block, but for attention in those of some numbers."""
    attends = layer in (c.get("attn_layer_indices") or ())
    mixer = attention(c) if attends else _mamba(c, c["mamba_n_heads"] * c["mamba_d_head"], True)
    return Block(mixer, dense(c), norms(c, "input_layernorm", "pre_ff_layernorm"))


def falcon_h1(c: dict, layer: int) -> Block:
    """Attention and a Mamba mixer side by side in each block."""
    width = c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"]
    mamba, heads = _mamba(c, width, bool(c.get("mamba_rms_norm"))), attention(c)
    mixer = replace(
        heads,
        linears=mamba.linears + heads.linears,
        biases=mamba.biases + heads.biases,
        beside=mamba.beside + heads.beside,
        in_16_bits=mamba.in_16_bits,
        state=mamba.state,
        state_heads=mamba.state_heads,
        rule=mamba.rule,
    )
    return Block(mixer, dense(c), norms(c, "input_layernorm", "pre_ff_layernorm"))


def lfm2(c: dict, layer: int) -> Block:
    """Short convolutions and attention; some with experts."""
    d, names = c["hidden_size"], ("w1", "w3", "w2")
    if c["layer_types"][layer] == "full_attention":
        mixer = attention(c, out="out_proj", qk_norm=("q_layernorm", "k_layernorm"))
    else:
        kernel = c.get("conv_L_cache", 3) + bool(c.get("conv_bias"))
        ends = (("in_proj", (3 * d, d)), ("out_proj", (d, d)))
        mixer = Mixer(
            linears=ends,
            biases=tuple((n, rows) for n, (rows, _) in ends) if c.get("conv_bias") else (),
            beside=(("conv", kernel * d),),
            state=d * kernel,
        )
    of_block = norms(c, "operator_norm", "ffn_norm")
    if not c.get("num_experts") or layer < c.get("num_dense_layers", 0):
        return Block(mixer, dense(c, _lfm2_width(c), names=names), of_block)
    mlp = experts(c, c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"])
    return Block(mixer, mlp, of_block)


def _lfm2_width(c: dict) -> int:
    """The width of a dense MLP, which config.json gives before it is adjusted."""
    width = c["intermediate_size"]
    if c["model_type"] == "lfm2" and c.get("block_auto_adjust_ff_dim", True):
        width = int(c.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // c["block_multiple_of"]) * c["block_multiple_of"]
    return width


def _kimi_delta(c: dict) -> Mixer:
    """Kimi delta attention (arXiv:2510.26692): a decay for each channel, from a product of low rank."""
    d, heads, size = c["hidden_size"], c["linear_num_heads"], c["linear_head_dim"]
    width, kernel = heads * size, c.get("linear_conv_kernel_dim", 4)
    linears = (
        *((name, (width, d)) for name in ("q_proj", "k_proj", "v_proj")),
        *(("f_a_proj", (size, d)), ("f_b_proj", (width, size)), ("b_proj", (heads, d))),
        *(("g_a_proj", (size, d)), ("g_b_proj", (width, size)), ("o_proj", (d, width))),
    )
    return Mixer(
        linears=linears,
        beside=(
            ("conv1d", 3 * width * kernel),
            ("dt_bias", width),
            ("A_log", heads),
            ("norm", size),
        ),
        state=width * size,
        state_heads=heads,
        rule="delta",
        decays_by_channel=True,
    )


def kimi_linear(c: dict, layer: int) -> Block:
    attends = c["layer_types"][layer] == "full_attention"
    mixer = latent_attention(c) if attends else _kimi_delta(c)
    names = dict(
        n_routed_experts="num_experts",
        n_shared_experts="num_shared_experts",
        num_experts_per_tok="num_experts_per_token",
    )
    given = c | {name: c[field] for name, field in names.items()}
    return Block(mixer, dense_first(given, layer), norms(c))


def nemotron_h(c: dict, layer: int) -> Block:
    """Nemotron-H (arXiv:2504.03624) and Nemotron 3: each block is a mixer or an MLP, without a gate."""
    d, kind, one = c["hidden_size"], c["layer_types"][layer], norms(c, "norm")
    nothing = Mixer(linears=())
    if kind == "full_attention":
        return Block(attention(c), Mlp(), one)
    if kind == "linear_attention":
        names = dict(
            mamba_n_heads="mamba_num_heads",
            mamba_n_groups="n_groups",
            mamba_d_state="ssm_state_size",
            mamba_d_conv="conv_kernel",
            mamba_conv_bias="use_conv_bias",
        )
        given = c | {name: c[field] for name, field in names.items() if field in c}
        width = c["mamba_num_heads"] * c["mamba_head_dim"]
        return Block(_mamba(given, width, norm=True), Mlp(), one)
    if kind == "mlp":
        return Block(nothing, ungated(c["intermediate_size"], d), one)
    width, latent = c["moe_intermediate_size"], c.get("moe_latent_size")
    shared = ungated(c["moe_shared_expert_intermediate_size"], d, "shared_experts.")
    ends = (("fc1_latent_proj", (latent, d)), ("fc2_latent_proj", (d, latent))) if latent else ()
    inputs = latent or d
    mlp = replace(
        shared,
        linears=ends + shared.linears,
        width=shared.width + c["num_experts_per_tok"] * width,
        experts=c["n_routed_experts"],
        experts_per_token=c["num_experts_per_tok"],
        of_experts=(("experts.up_proj", (width, inputs)), ("experts.down_proj", (inputs, width))),
    )
    return Block(nothing, mlp, one)


def minimax(c: dict, layer: int) -> Block:
    """MiniMax 01 (arXiv:2501.08313): lightning attention and attention in turn, and experts everywhere."""
    kinds = c.get("layer_types") or ("linear_attention", "full_attention")
    attends = kinds[layer % len(kinds)] == "full_attention"
    mixer = attention(c) if attends else _lightning(c)
    per_token, width = c["num_experts_per_tok"], c["intermediate_size"]
    return Block(mixer, experts(c, c["num_local_experts"], per_token, width), norms(c))


def _lightning(c: dict) -> Mixer:
    """Lightning attention (arXiv:2401.04658): a decay for each head, and a gate of what it gives."""
    d, heads = c["hidden_size"], c["num_attention_heads"]
    size = c.get("head_dim") or d // heads
    width = heads * size
    linears = (("qkv_proj", (3 * width, d)), ("output_gate", (width, d)), ("out_proj", (d, width)))
    return Mixer(
        linears=linears,
        beside=(("norm", width),),
        state=width * size,
        state_heads=heads,
        rule="lightning",
        chunk=c.get("block_size") or 256,
    )
