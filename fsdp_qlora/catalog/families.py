"""What a family's code says of its blocks and its config.json leaves out: biases, norms, layer names.

Only estimates need this; a run looks at the model itself. A family that is not here is taken to be
built like Llama, and its estimate says so. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Traits:
    """How a family's decoder block is built; the defaults are Llama's."""

    layers: str = "separate"  # or "fused" q, k, v and gate, up; or "gpt2"
    tied: bool = False  # unless config.json says
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    # of width D in a block
    norm_names: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_parts: int = 1  # weights of a norm: none, a scale, or a scale and an offset
    qk_norm: str = ""  # of q and k: "head", one for all heads, or "width", one value each
    output_norm: bool = False  # a norm follows the MLP
    experts: bool = False  # the MLP is a router and experts
    windows: bool = False  # some layers see less than all tokens before
    mixers: bool = False  # some layers are neither attention to all tokens before nor to a window
    softcap: bool = False  # attention's scores are capped
    # Which kernels its attention can take: those of all, those that know sinks ("sinks"), none but under
    # the masks that its code makes ("masked"), or none but its own code ("own").
    attention: str = ""

    @property
    def norms(self) -> int:
        """Norms of width D in a block."""
        return len(self.norm_names)


LLAMA = Traits()
_AROUND_MLP = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_GEMMA2 = Traits(tied=True, norm_names=LLAMA.norm_names + _AROUND_MLP, output_norm=True)
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "granite": LLAMA,
    "qwen2": Traits(qkv_bias=True),
    "qwen3": Traits(qk_norm="head"),
    "gemma": Traits(tied=True),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, qk_norm="head"),
    "gemma3n_text": Traits(tied=True),
    "gemma4_text": Traits(tied=True),
    "gemma4_unified_text": Traits(tied=True),
    "phi3": Traits(layers="fused"),
    "gpt2": Traits(
        layers="gpt2",
        tied=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm_names=("ln_1", "ln_2"),
        norm_parts=2,
    ),
    "olmo": Traits(norm_parts=0),
    "olmo2": Traits(
        qk_norm="width",
        output_norm=True,
        norm_names=("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "smollm3": Traits(tied=True),
    "stablelm": Traits(norm_parts=2),
    "phimoe": Traits(norm_parts=2),
    "mixtral": Traits(experts=True),
    "qwen3_moe": Traits(qk_norm="head", experts=True),
}
# Every model_type that tests/test_families.py compares with transformers, bitsandbytes and PEFT.
TESTED_TYPES = frozenset(
    """
    afmoe apertus arcee axk1 bamba cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3
    deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 flex_olmo
    gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa gpt2 gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax jais2 kimi_linear lfm2 lfm2_moe llama llama4_text mellum
    mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3
    mistral mixtral nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt phi
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()
)
# Whose heads have sinks beside the tokens: their code is eager, and here kernels of model/sinks.py do it.
WITH_SINKS = frozenset("gpt_oss granite_swa granitemoe_swa mimo_v2_flash".split())
# Whose rows stay whole, by name: their config.json does not tell that their code takes no other attention,
# hands nothing on to it, or has mixers beside it.
WITH_WHOLE_ROWS = frozenset("bamba falcon llama4_text nemotron olmo_hybrid stablelm".split())
FROZEN_EXPERTS = frozenset(["llama4_text"])  # PEFT mistakes their sides
# Whose routers transformers has a balance loss for.
BALANCED_EXPERTS = frozenset(
    """
    ernie4_5_moe flex_olmo gpt_oss mellum minimax minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe
    qwen2_moe qwen3_5_moe_text qwen3_moe qwen3_next
    """.split()
)
_OWN_ATTENTION = frozenset(
    """
    bloom codegen deepseek_v4 gpt_neo gpt_neox_japanese gptj hy_v4 mpt openai-gpt xglm
    """.split()
)
_MASKED = frozenset(
    """
    axk2 bamba biogpt deepseek_v32 doge falcon falcon_h1 glm_moe_dsa jamba kimi_linear llama4_text
    nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next stablelm zamba zamba2
    """.split()
)
_STRETCHED = ("linear", "dynamic", "yarn")  # rotary angles, by a factor
# What PEFT adapts if no target is named, where that is not q_proj and v_proj.
DEFAULT_TARGETS = {"phi3": ("qkv_proj",), "gpt2": ("c_attn",)}
# GPT-2's names of the fields that others share.
_OLD_FIELDS = dict(
    n_embd="hidden_size",
    n_layer="num_hidden_layers",
    n_head="num_attention_heads",
    n_positions="max_position_embeddings",
    n_inner="intermediate_size",
)


def traits_of(config: dict) -> Traits:
    """The traits of the model that a config.json describes."""
    traits = FAMILIES.get(config.get("model_type", "llama"), LLAMA)
    bias = bool(config.get("attention_bias", False))
    traits = replace(
        traits,
        qkv_bias=traits.qkv_bias or bias,
        o_bias=traits.o_bias or bias,
        mlp_bias=traits.mlp_bias or bool(config.get("mlp_bias", False)),
    )
    if config.get("model_type") == "stablelm":
        traits = replace(
            traits,
            qkv_bias=bool(config.get("use_qkv_bias")),
            norm_names=LLAMA.norm_names[: 1 if config.get("use_parallel_residual") else 2],
            qk_norm="width" if config.get("qk_layernorm") else "",
        )
    tied = config.get("tie_word_embeddings")
    return replace(
        traits,
        windows=_has_windows(config),
        mixers=bool(set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}),
        softcap=bool(config.get("attn_logit_softcapping")),
        attention=_attention_of(config.get("model_type", "")),
        tied=traits.tied if tied is None else bool(tied),
    )


def _attention_of(family: str) -> str:
    """`Traits.attention` of a model_type."""
    kinds = dict(sinks=WITH_SINKS, masked=_MASKED, own=_OWN_ATTENTION)
    return next((kind for kind, families in kinds.items() if family in families), "")


def _has_windows(config: dict) -> bool:
    """Whether some layers see less than all tokens before."""
    layers = set(config.get("layer_types") or ())
    window = config.get("sliding_window") and config.get("use_sliding_window", True)
    return bool(layers - {"full_attention"} or window and not layers)


def positions_of(config: dict) -> int | None:
    """The most tokens of a row that a model's rotary angles are made for; None if nothing limits them.

    Who stretches them by `linear`, `dynamic` or `yarn` may have left max_position_embeddings as it was.
    """
    positions, rope = config.get("max_position_embeddings"), {}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(key), dict):
            rope = config[key]
    factor = rope.get("factor")
    if rope.get("rope_type", rope.get("type")) not in _STRETCHED or not positions or not factor:
        return positions
    return max(positions, int(factor * (rope.get("original_max_position_embeddings") or positions)))


def positions_in(settings) -> int | None:
    """`positions_of` a model by transformers' settings of it, whatever they call them."""
    settings = settings.get_text_config()
    positions = getattr(settings, "max_position_embeddings", None)
    return positions_of(settings.to_dict() | dict(max_position_embeddings=positions))


def with_common_names(config: dict) -> dict:
    """A config.json with the field names that most families share."""
    config = {_OLD_FIELDS.get(key, key): value for key, value in config.items()}
    if config.get("model_type") == "gpt2" and not config.get("intermediate_size"):
        config["intermediate_size"] = 4 * config.get("hidden_size", 0)
    return _OWN_NAMES.get(config.get("model_type", ""), dict)(config)


# Nemotron-H's letters and older words for what a block is.
_NEMOTRON_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"} | dict(
    mamba="linear_attention", attention="full_attention"
)


def _nemotron_names(config: dict) -> dict:
    """A Nemotron-H's kinds of blocks, each a mixer or an MLP, in the field that hybrids share."""
    fields = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    kinds = next((config[field] for field in fields if config.get(field)), ())
    kinds = [_NEMOTRON_KINDS.get(kind, kind) for kind in kinds]
    return config | dict(layer_types=kinds, num_hidden_layers=len(kinds))


def _gemma3n_names(config: dict) -> dict:
    """A Gemma 3n's config.json, which may give an MLP's width for each layer."""
    widths = config.get("intermediate_size")
    if not isinstance(widths, list) or len(widths) != config.get("num_hidden_layers"):
        return config
    return config | dict(intermediate_sizes=widths, intermediate_size=max(widths))


def _kimi_names(config: dict) -> dict:
    """A Kimi Linear's fields, of which the files have some in `linear_attn_config`, counted from 1."""
    inside = config.get("linear_attn_config") or {}
    names = dict(
        linear_head_dim="head_dim",
        linear_num_heads="num_heads",
        linear_conv_kernel_dim="short_conv_kernel_size",
    )
    found = {name: inside[own] for name, own in names.items() if own in inside}
    if inside.get("kda_layers") and not config.get("layer_types"):
        full = inside.get("full_attn_layers", ())
        found["layer_types"] = [
            "full_attention" if i + 1 in full else "linear_attention"
            for i in range(config["num_hidden_layers"])
        ]
    same = dict(
        max_position_embeddings="model_max_length", num_experts_per_tok="num_experts_per_token"
    )
    found |= {name: config[own] for name, own in same.items() if own in config}
    return config | found


_OWN_NAMES = {
    "nemotron_h": _nemotron_names,
    "kimi_linear": _kimi_names,
    "gemma3n_text": _gemma3n_names,
    "gemma4_text": lambda c: c | dict(num_experts_per_tok=c.get("top_k_experts")),
    "gemma4_unified_text": lambda c: c | dict(num_experts_per_tok=c.get("top_k_experts")),
}
