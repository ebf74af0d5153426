"""Blocks of models that are not built like Llama's: mixers beside attention, experts of every build.

A model of several kinds of blocks, such as a hybrid, has one `Block` for each kind, with how many of them
there are. Everything is read from config.json's fields. Pure: no torch.

Letters: D hidden, H query heads, K key-value heads, hd head size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

Sizes = tuple[tuple[str, tuple[int, int]], ...]  # (out, in) of linear layers by name
Lengths = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """What mixes tokens: attention, or a layer that carries a state along a row."""

    linears: Sizes  # the last gives its output
    biases: Lengths = ()
    beside: Lengths = ()  # weights that are in no linear layer: convolutions, norms, sinks
    heads: int = 0  # of attention; 0 where there is none
    kv_heads: int = 0
    head_dim: int = 0
    in_16_bits: tuple[str, ...] = ()  # layers that are never quantized: the model's code reads them
    state: int = 0  # values of the state that every token updates and reads
    state_heads: int = 0
    is_delta_net: bool = False  # whose kernels are flash-linear-attention's, if that is installed


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """What follows: gate, up and down, experts, or both."""

    linears: Sizes = ()  # the last gives its output
    width: int = 0  # values between up and down that a token passes through
    experts: int = 0
    experts_per_token: int = 0
    of_experts: Sizes = ()  # of one
    biases: Lengths = ()
    beside: Lengths = ()
    router_is_linear: bool = False  # and so one of `linears`

    @property
    def each_width(self) -> int:
        """The width of one expert, or of an MLP without any."""
        return self.of_experts[-1][1][1] if self.of_experts else self.width


@dataclass(frozen=True)
class LayerInputs:
    """What Gemma 3n and 4 give each block beside the stream: an embedding of its own, and more streams."""

    vocab: int
    width: int  # of one block's; 0 for none
    streams: int = 1  # of width D (AltUp, arXiv:2301.13310)

    def linears(self, layers: int, hidden: int) -> Sizes:
        """(out, in) of linear layers beside the blocks."""
        ends = ("altup_projections", "altup_unembed_projections")
        return (
            *((("per_layer_model_projection", (layers * self.width, hidden)),) * bool(self.width)),
            *((f"{end}.{i}", (hidden, hidden)) for end in ends for i in range(self.streams - 1)),
        )

    def tables(self, layers: int) -> Sizes:
        """Rows and width of an embedding for all blocks, and of the norm of what is added to it."""
        if not self.width:
            return ()
        return (
            ("embed_tokens_per_layer", (self.vocab, layers * self.width)),
            ("per_layer_projection_norm", (self.width, 1)),
        )


@dataclass(frozen=True)
class Block:
    """One kind of block."""

    mixer: Mixer
    mlp: Mlp
    norms: Lengths


def _attention(
    c: dict,
    *,
    head_dim: int = 0,
    q_times: int = 1,  # 2 where q_proj gives a gate too
    out: str = "o_proj",
    qk_norm: tuple[str, ...] = (),
    bias: bool | None = None,
    out_bias: bool | None = None,  # as the others, unless given
    norm_of_width: bool = False,  # a weight for each value of q and k, not of one head
    sinks: bool = False,
) -> Mixer:
    heads, d = c["num_attention_heads"], c["hidden_size"]
    kv_heads = c.get("num_key_value_heads") or heads
    size = head_dim or c.get("head_dim") or d // heads
    q, kv = heads * size, kv_heads * size
    linears = (
        ("q_proj", (q_times * q, d)),
        ("k_proj", (kv, d)),
        ("v_proj", (kv, d)),
        (out, (d, q)),
    )
    biased = c.get("attention_bias", False) if bias is None else bias
    of_out = biased if out_bias is None else out_bias
    widths = (q, kv) if norm_of_width else (size, size)
    return Mixer(
        linears=linears,
        biases=tuple(
            (name, rows) for name, (rows, _) in linears if (of_out if name == out else biased)
        ),
        beside=(*zip(qk_norm, widths, strict=False), *((("sinks", heads),) if sinks else ())),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
    )


def _gated(width: int, d: int, prefix: str = "", names=("gate_proj", "up_proj", "down_proj")):
    """Sizes of an MLP with a gate."""
    gate, up, down = (prefix + name for name in names)
    return ((gate, (width, d)), (up, (width, d)), (down, (d, width)))


def _dense(c: dict, width: int = 0, **more) -> Mlp:
    width = width or c["intermediate_size"]
    return Mlp(linears=_gated(width, c["hidden_size"], **more), width=width)


def _experts(
    c: dict,
    count: int,
    per_token: int,
    width: int,
    *,
    shared: int = 0,  # width of the experts that every token passes through
    prefix: str = "shared_expert.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    biases: bool = False,
    beside: Lengths = (),
) -> Mlp:
    d = c["hidden_size"]
    if biases:
        beside = (*beside, ("gate_up_proj_bias", 2 * width * count), ("down_proj_bias", d * count))
    return Mlp(
        linears=_gated(shared, d, prefix, names) if shared else (),
        width=per_token * width + shared,
        experts=count,
        experts_per_token=per_token,
        of_experts=(
            ("experts.gate_up_proj", (2 * width, d)),
            ("experts.down_proj", (d, width)),
        ),
        beside=beside,
    )


def _norms(c: dict, *names: str) -> Lengths:
    return tuple((name, c["hidden_size"]) for name in names or _LLAMA_NORMS)


_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")


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
        is_delta_net=True,
    )


def _qwen_hybrid(c: dict, layer: int) -> Block:
    """Qwen3-Next and Qwen3.5: three gated delta nets, then gated attention."""
    kind, fused = c["layer_types"][layer], c["model_type"] == "qwen3_next"
    attends = kind == "full_attention"
    mixer = (
        _attention(c, q_times=2, qk_norm=("q_norm", "k_norm")) if attends else _delta_net(c, fused)
    )
    return Block(mixer, _qwen_mlp(c, layer), _norms(c))


def _qwen_mlp(c: dict, layer: int) -> Mlp:
    """Experts beside one that every token passes through, by a gate; or dense."""
    experts = c.get("num_experts") and layer not in (c.get("mlp_only_layers") or ())
    if not experts or (layer + 1) % (c.get("decoder_sparse_step") or 1):
        return _dense(c)
    mlp = _experts(
        c,
        c["num_experts"],
        c["num_experts_per_tok"],
        c["moe_intermediate_size"],
        shared=c["shared_expert_intermediate_size"],
    )
    gate = (("shared_expert_gate", (1, c["hidden_size"])),)
    return replace(mlp, linears=gate + mlp.linears)


def _gpt_oss(c: dict, layer: int) -> Block:
    experts = c["num_local_experts"]
    mlp = _experts(
        c,
        experts,
        c["num_experts_per_tok"],
        c["intermediate_size"],
        biases=True,
        beside=(("router.bias", experts),),
    )
    return Block(_attention(c, bias=c.get("attention_bias", True), sinks=True), mlp, _norms(c))


def _latent_attention(c: dict) -> Mixer:
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


def _dense_first(c: dict, layer: int) -> Mlp:
    """DeepSeek's: dense in the first layers, then experts beside shared ones."""
    kinds = c.get("mlp_layer_types")
    if kinds[layer] == "dense" if kinds else layer < c.get("first_k_dense_replace", 0):
        return _dense(c)
    width = c["moe_intermediate_size"]
    return _experts(
        c,
        c["n_routed_experts"],
        c["num_experts_per_tok"],
        width,
        shared=width * (c.get("n_shared_experts") or 0),
        prefix="shared_experts.",
    )


def _deepseek(c: dict, layer: int) -> Block:
    return Block(_latent_attention(c), _dense_first(c, layer), _norms(c))


def _glm4_moe(c: dict, layer: int) -> Block:
    norms = ("q_norm", "k_norm") if c.get("use_qk_norm") else ()
    return Block(_attention(c, qk_norm=norms, out_bias=False), _dense_first(c, layer), _norms(c))


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
    )


def _granite_hybrid(c: dict, layer: int) -> Block:
    d, shared = c["hidden_size"], c["shared_intermediate_size"]
    attends = c["layer_types"][layer] in ("attention", "full_attention")
    mixer = _attention(c) if attends else _mamba(c, c["mamba_n_heads"] * c["mamba_d_head"], True)
    dense = (("input_linear", (2 * shared, d)), ("output_linear", (d, shared)))
    if not c.get("num_local_experts"):
        return Block(mixer, Mlp(linears=dense, width=shared), _norms(c))
    per_token, width = c["num_experts_per_tok"], c["intermediate_size"]
    mlp = _experts(c, c["num_local_experts"], per_token, width)
    return Block(mixer, replace(mlp, linears=dense, width=mlp.width + shared), _norms(c))


def _falcon_h1(c: dict, layer: int) -> Block:
    """Attention and a Mamba mixer side by side in each block."""
    width = c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"]
    mamba, attention = _mamba(c, width, bool(c.get("mamba_rms_norm"))), _attention(c)
    mixer = replace(
        attention,
        linears=mamba.linears + attention.linears,
        biases=mamba.biases + attention.biases,
        beside=mamba.beside + attention.beside,
        in_16_bits=mamba.in_16_bits,
        state=mamba.state,
        state_heads=mamba.state_heads,
    )
    return Block(mixer, _dense(c), _norms(c, "input_layernorm", "pre_ff_layernorm"))


def _lfm2(c: dict, layer: int) -> Block:
    """Short convolutions and attention; some with experts."""
    d, names = c["hidden_size"], ("w1", "w3", "w2")
    if c["layer_types"][layer] == "full_attention":
        mixer = _attention(c, out="out_proj", qk_norm=("q_layernorm", "k_layernorm"))
    else:
        kernel = c.get("conv_L_cache", 3) + bool(c.get("conv_bias"))
        ends = (("in_proj", (3 * d, d)), ("out_proj", (d, d)))
        mixer = Mixer(
            linears=ends,
            biases=tuple((n, rows) for n, (rows, _) in ends) if c.get("conv_bias") else (),
            beside=(("conv", kernel * d),),
            state=d * kernel,
        )
    norms = _norms(c, "operator_norm", "ffn_norm")
    if not c.get("num_experts") or layer < c.get("num_dense_layers", 0):
        return Block(mixer, _dense(c, _lfm2_width(c), names=names), norms)
    experts = _experts(c, c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"])
    return Block(mixer, experts, norms)


def _lfm2_width(c: dict) -> int:
    """The width of a dense MLP, which config.json gives before it is adjusted."""
    width = c["intermediate_size"]
    if c["model_type"] == "lfm2" and c.get("block_auto_adjust_ff_dim", True):
        width = int(c.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        width = -(-width // c["block_multiple_of"]) * c["block_multiple_of"]
    return width


def _llama4(c: dict, layer: int) -> Block:
    step = c.get("interleave_moe_layer_step") or 1
    chosen = c.get("moe_layers")
    has_experts = layer in chosen if chosen else (layer + 1) % step == 0
    if not has_experts:
        return Block(_attention(c), _dense(c, c["intermediate_size_mlp"]), _norms(c))
    width, per_token = c["intermediate_size"], c["num_experts_per_tok"]
    mlp = _experts(c, c["num_local_experts"], per_token, width, shared=width)
    return Block(_attention(c), mlp, _norms(c))


def _normed_mixture(c: dict, layer: int) -> Block:
    """Experts everywhere, and norms over all of q and of k."""
    count = c.get("num_local_experts") or c["num_experts"]
    mixer = _attention(c, qk_norm=("q_norm", "k_norm"), norm_of_width=True)
    width = c["intermediate_size"]
    return Block(mixer, _experts(c, count, c["num_experts_per_tok"], width), _norms(c))


def _shared_beside_routed(c: dict, layer: int) -> Block:
    """dots.llm1, Solar Open: DeepSeek's mixture with plain attention; Solar's in every block."""
    if c["model_type"] == "solar_open":
        return Block(
            _attention(c), _dense_first(c | dict(first_k_dense_replace=0), layer), _norms(c)
        )
    mixer = _attention(c, qk_norm=("q_norm", "k_norm"))
    return Block(mixer, _dense_first(c, layer), _norms(c))


def _qwen2_moe(c: dict, layer: int) -> Block:
    """Qwen3-Next's mixture in every block, with Qwen2's biases."""
    mixer = _attention(c, bias=c.get("qkv_bias", True), out_bias=False)
    return Block(mixer, _qwen_mlp(c, layer), _norms(c))


def _ernie_moe(c: dict, layer: int) -> Block:
    first, last = c["moe_layer_start_index"], c.get("moe_layer_end_index", -1)
    inside = first <= layer <= (c["num_hidden_layers"] - 1 if last == -1 else last)
    mixer = _attention(c, bias=bool(c.get("use_bias")))
    if not inside or (layer + 1) % (c.get("moe_layer_interval") or 1):
        return Block(mixer, _dense(c), _norms(c))
    count, width = c["moe_num_experts"], c["moe_intermediate_size"]
    mlp = _experts(
        c,
        count,
        c["moe_k"],
        width,
        shared=width * (c.get("moe_num_shared_experts") or 0),
        prefix="shared_experts.",
        beside=(("e_score_correction_bias", count),),
    )
    return Block(mixer, mlp, _norms(c))


def _granite_moe(c: dict, layer: int) -> Block:
    d, shared = c["hidden_size"], c.get("shared_intermediate_size") or 0
    mlp = _experts(c, c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"])
    if shared:
        dense = (("input_linear", (2 * shared, d)), ("output_linear", (d, shared)))
        mlp = replace(mlp, linears=dense, width=mlp.width + shared)
    return Block(_attention(c), mlp, _norms(c))


def _phi_moe(c: dict, layer: int) -> Block:
    """Norms have an offset."""
    width, per_token = c["intermediate_size"], c["num_experts_per_tok"]
    mlp = _experts(c, c["num_local_experts"], per_token, width)
    return Block(_attention(c), mlp, _norms(c, *_LLAMA_NORMS * 2))


def _flex_olmo(c: dict, layer: int) -> Block:
    block = _normed_mixture(c, layer)
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    return replace(block, norms=_norms(c, *names))


def _mimo_v2(c: dict, layer: int) -> Block:
    """Windows have sinks and twice as many key-value heads; values are smaller than keys."""
    windowed = c["layer_types"][layer] == "sliding_attention"
    heads, size, values = c["num_attention_heads"], c["head_dim"], c["v_head_dim"]
    kv_heads = c["num_key_value_heads"] * (2 if windowed else 1)
    d = c["hidden_size"]
    mixer = _attention(c | dict(num_key_value_heads=kv_heads), out_bias=False, sinks=windowed)
    sizes = dict(mixer.linears) | dict(v_proj=(kv_heads * values, d), o_proj=(d, heads * values))
    mixer = replace(mixer, linears=tuple(sizes.items()), head_dim=size)
    return Block(mixer, _dense_first(c, layer), _norms(c))


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
        is_delta_net=True,
    )


def _kimi_linear(c: dict, layer: int) -> Block:
    attends = c["layer_types"][layer] == "full_attention"
    mixer = _latent_attention(c) if attends else _kimi_delta(c)
    names = dict(
        n_routed_experts="num_experts",
        n_shared_experts="num_shared_experts",
        num_experts_per_tok="num_experts_per_token",
    )
    given = c | {name: c[field] for name, field in names.items()}
    return Block(mixer, _dense_first(given, layer), _norms(c))


def _nemotron_h(c: dict, layer: int) -> Block:
    """Nemotron-H (arXiv:2504.03624) and Nemotron 3: each block is a mixer or an MLP, without a gate."""
    d, kind, norms = c["hidden_size"], c["layer_types"][layer], _norms(c, "norm")
    nothing = Mixer(linears=())
    if kind == "full_attention":
        return Block(_attention(c), Mlp(), norms)
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
        return Block(_mamba(given, width, norm=True), Mlp(), norms)
    if kind == "mlp":
        return Block(nothing, _ungated(c["intermediate_size"], d), norms)
    width, latent = c["moe_intermediate_size"], c.get("moe_latent_size")
    shared = _ungated(c["moe_shared_expert_intermediate_size"], d, "shared_experts.")
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
    return Block(nothing, mlp, norms)


def _ungated(width: int, d: int, prefix: str = "") -> Mlp:
    """An MLP of two layers."""
    sizes = ((prefix + "up_proj", (width, d)), (prefix + "down_proj", (d, width)))
    return Mlp(linears=sizes, width=width)


_AROUND_MLP = ("pre_feedforward_layernorm", "post_feedforward_layernorm")


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


def _gemma3n(c: dict, layer: int) -> Block:
    """Gemma 3n: four streams that are mixed around each block, and a low-rank layer beside attention."""
    d, n, rank = c["hidden_size"], c["altup_num_inputs"], c["laurel_rank"]
    mixer = _attention(c, qk_norm=("q_norm", "k_norm"))
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
    mlp = _with_layer_input(c, _dense(c, widths[layer] if widths else 0))
    names = (*_LLAMA_NORMS, *_AROUND_MLP, "router_norm", "post_laurel_norm", "correct_output_scale")
    return Block(mixer, mlp, _norms(c, *names))


def _gemma4(c: dict, layer: int) -> Block:
    """Gemma 4: wide heads where all tokens are seen, keys that serve as values, a mixture beside an MLP."""
    d, heads, shares = c["hidden_size"], _gemma4_heads(c, layer), _shares_keys(c, layer)
    mixer = _attention(c | heads, qk_norm=("q_norm", "k_norm"))
    if shares:
        mixer = _without_keys(mixer)
    elif c.get("attention_k_eq_v") and not _is_window(c, layer):
        mixer = replace(mixer, linears=tuple(x for x in mixer.linears if x[0] != "v_proj"))
    twice = 2 if c.get("use_double_wide_mlp") and shares else 1
    mlp = _dense(c, twice * c["intermediate_size"])
    norms: tuple[str, ...] = (*_LLAMA_NORMS, *_AROUND_MLP)
    if c.get("enable_moe_block"):
        count = c["num_experts"]
        routed = _experts(c, count, c["top_k_experts"], c["moe_intermediate_size"])
        mlp = replace(
            routed,
            linears=(("router.proj", (count, d)), *mlp.linears),
            width=routed.width + mlp.width,
            beside=(("router.scale", d), ("router.per_expert_scale", count)),
            router_is_linear=True,
        )
        norms += (f"{_AROUND_MLP[1]}_1", f"{_AROUND_MLP[1]}_2", f"{_AROUND_MLP[0]}_2")
    return Block(mixer, _with_layer_input(c, mlp), _norms(c, *norms))


def _is_window(c: dict, layer: int) -> bool:
    kinds = c.get("layer_types")
    return kinds[layer] == "sliding_attention" if kinds else (layer + 1) % 6 != 0


def _gemma4_heads(c: dict, layer: int) -> dict:
    """Sizes of a layer's heads: as Google's files give them, or as transformers writes them."""
    if "per_layer_config" in c:
        return dict((c["per_layer_config"] or {}).get(str(layer), {}))
    if _is_window(c, layer):
        return {}
    kv_heads = c.get("num_global_key_value_heads") if c.get("attention_k_eq_v") else None
    heads = dict(head_dim=c.get("global_head_dim", 512))
    return heads | (dict(num_key_value_heads=kv_heads) if kv_heads else {})


_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# Each model_type's block of a number.
_BUILDERS: dict[str, Callable[[dict, int], Block]] = {
    "gpt_oss": _gpt_oss,
    "qwen3_5_text": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "qwen3_next": _qwen_hybrid,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe_lite": _deepseek,
    "glm4_moe": _glm4_moe,
    "granitemoehybrid": _granite_hybrid,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama4_text": _llama4,
    "minimax_m2": _normed_mixture,
    "olmoe": _normed_mixture,
    "flex_olmo": _flex_olmo,
    "qwen2_moe": _qwen2_moe,
    "dots1": _shared_beside_routed,
    "solar_open": _shared_beside_routed,
    "ernie4_5_moe": _ernie_moe,
    "granitemoe": _granite_moe,
    "granitemoeshared": _granite_moe,
    "phimoe": _phi_moe,
    "mimo_v2_flash": _mimo_v2,
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
}
# Layers that `all-linear` leaves out, by the last part of their names (adapters/lora.py, `left_out`).
_LEFT_OUT = dict.fromkeys(
    (
        *("qwen3_next", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"),
        *("dots1", "solar_open", "ernie4_5_moe"),
    ),
    _OF_EXPERTS,
) | {
    **dict.fromkeys(("granitemoehybrid", "falcon_h1", "nemotron_h"), ("out_proj",)),
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
    if config.get("model_type") not in ("gemma3n_text", "gemma4_text"):
        return None
    return LayerInputs(
        config.get("vocab_size_per_layer_input") or config["vocab_size"],
        config.get("hidden_size_per_layer_input") or 0,
        config.get("altup_num_inputs", 1),
    )
