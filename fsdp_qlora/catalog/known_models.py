"""The config.json of models that people name most, gated ones too, by their hub names.

The numbers are each file's own, in transformers' fields, so that `AutoConfig.for_model` makes the
real model of them. Pure: no torch.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from shlex import quote

# With a value for each layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "hybrid_override_pattern")
# Of the same shape: tuned models, and those whose linear weights bitsandbytes stored in 4 bits.
_TUNED = re.compile(r"-(instruct|chat|it|base|coder|bf16|fp8|(unsloth-)?bnb-4bit)(?=-|$)")


def why_no_model(folder: Path) -> str:
    """What a folder without config.json is, and what to give as --model_name instead."""
    found = [f for f in (folder, folder / "adapter") if (f / "adapter_config.json").is_file()]
    if found:
        return (
            f"it is an adapter; give its base as --model_name, or merge it first: fsdp-qlora merge "
            f"{quote(str(found[0]))} --output_dir merged"
        )
    inside = [f.parent for f in sorted(folder.glob("*/config.json"))]
    if inside:
        return f"the folder has no config.json; give {inside[0]}"
    if any(folder.glob("*.gguf")):
        return "its GGUF files can't be trained; give the model that they were made from"
    return (
        "the folder has no config.json; give a folder in transformers' format or a hub name such as "
        "org/model"
    )


def bare_name(name: str) -> str:
    """A hub name without owner, case, `Meta-`, `NVIDIA-`, `-hf` and what marks a tuned model."""
    return _TUNED.sub("", _plain(name))


def _plain(name: str) -> str:
    """A hub name without owner, case, `Meta-`, `NVIDIA-` and `-hf`."""
    last = re.sub(r"[\s_]+", "-", name.strip().rstrip("/").rsplit("/", 1)[-1].lower())
    last = re.sub(
        r"^(llama|gemma|phi)(?=\d)", r"\1-", last.removeprefix("meta-").removeprefix("nvidia-")
    )
    return last.removesuffix("-hf")


def known_name(name: str) -> str:
    """The full hub name of a known model; owner, case and `-hf` may be left out or differ.

    A model tuned for chat (`-Instruct`, `-chat`, `-it`) has the shape of the one it was made from, as has
    one stored in another format (`-BF16`, `-FP8`), and `-bnb-4bit` is what this project makes of it.
    Raises ValueError, listing close names, for a model that is not known.
    """
    by_bare, wanted = _full_names(), bare_name(name)
    if wanted in by_bare:
        return by_bare[wanted]
    near = dict.fromkeys(by_bare[key] for key in get_close_matches(wanted, by_bare, 4, 0.5))
    raise ValueError(
        f"--model_name {name}: no known model, folder or file; "
        f"{'close' if near else 'known'} names: {', '.join(near or KNOWN)}. Give one of "
        "them, a folder with config.json, or that file"
    )


def is_known(name: str) -> bool:
    """Whether the shape of a model of this name is known here."""
    return bare_name(name) in _full_names()


def hub_name(name: str) -> str:
    """The hub name of a model that is named without its owner; any other name, or a folder, as it is.

    `llama-3.1-8b` is `meta-llama/Llama-3.1-8B`. A tuned model (`-Instruct`, `-chat`) is not taken for
    the one that it was made from: raises ValueError, with what to give instead.
    """
    if "/" in name or Path(name).exists() or not is_known(name):
        return name
    full = known_name(name)
    if _TUNED.sub("", plain := _plain(name)) != plain and plain != _plain(full):
        owner = full.partition("/")[0]
        raise ValueError(
            f"--model_name {name}: no folder of this name; give the model's full name on the hub, "
            f"such as {owner}/{name}, or {full} for the model that it was made from"
        )
    return full


def _full_names() -> dict[str, str]:
    """The full hub name of each known model by its bare one; without a version it is the newest."""
    names = {bare_name(full): full for full in KNOWN}
    return {re.sub(r"-v[\d.]+$", "", bare): full for bare, full in names.items()} | names


def known_config(name: str, layers: int | None = None) -> dict:
    """The config.json of a known model, in transformers' fields, or of its first `layers`.

    Raises ValueError if it is not known.
    """
    config = dict(KNOWN[known_name(name)])
    if layers is None:
        return config
    cut = {key: value[:layers] for key, value in config.items() if key in _PER_LAYER}
    if shared := config.get("num_kv_shared_layers"):  # the last ones
        cut["num_kv_shared_layers"] = max(0, shared - config["num_hidden_layers"] + layers)
    return config | cut | dict(num_hidden_layers=layers)


def _llama(vocab, hidden, intermediate, layers, heads, kv_heads, positions, theta, **more) -> dict:
    """config.json's fields for a model built like Llama."""
    return (
        dict(
            model_type="llama",
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=positions,
            rope_theta=theta,
            rms_norm_eps=1e-5,
            hidden_act="silu",
            tie_word_embeddings=False,
        )
        | more
    )


def _llama3(*sizes, factor: float, **more) -> dict:
    """Llama 3.1 and 3.2: a vocabulary of 128k, 131k positions by scaled rotary angles."""
    hidden, intermediate, layers, heads, kv_heads = sizes
    scaling = dict(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return (
        _llama(
            128256,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            131072,
            500000.0,
            rope_scaling=scaling,
        )
        | more
    )


def _qwen2(vocab, hidden, intermediate, layers, heads, kv_heads, positions, tied, **more) -> dict:
    return (
        _llama(
            vocab,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            positions,
            1000000.0,
            model_type="qwen2",
            rms_norm_eps=1e-6,
            tie_word_embeddings=tied,
        )
        | more
    )


def _qwen3(hidden, intermediate, layers, heads, kv_heads, tied) -> dict:
    return _llama(
        151936,
        hidden,
        intermediate,
        layers,
        heads,
        kv_heads,
        40960,
        1000000.0,
        model_type="qwen3",
        rms_norm_eps=1e-6,
        head_dim=128,
        tie_word_embeddings=tied,
    )


def _gpt_oss(layers, experts) -> dict:
    rope = dict(
        rope_type="yarn",
        rope_theta=150000.0,
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    )
    return dict(
        model_type="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rope_parameters=rope,
        rms_norm_eps=1e-5,
        attention_bias=True,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_local_experts=experts,
        num_experts_per_tok=4,
        tie_word_embeddings=False,
    )


def _every(layers: int, interval: int, kind: str) -> list[str]:
    """Kinds of layers, of which each `interval`th is attention and the others are `kind`."""
    return [kind if (i + 1) % interval else "full_attention" for i in range(layers)]


def _qwen_hybrid(hidden, layers, heads, kv_heads, **more) -> dict:
    """Qwen3-Next and Qwen3.5: three of four layers are gated delta nets."""
    return (
        dict(
            vocab_size=248320,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=256,
            max_position_embeddings=262144,
            rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25),
            rms_norm_eps=1e-6,
            layer_types=_every(layers, 4, "linear_attention"),
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            tie_word_embeddings=False,
        )
        | more
    )


def _qwen3_5(hidden, intermediate, layers, heads, kv_heads, **more) -> dict:
    return _qwen_hybrid(
        hidden,
        layers,
        heads,
        kv_heads,
        model_type="qwen3_5_text",
        intermediate_size=intermediate,
        **more,
    )


def _every_tenth(layers: int) -> list[str]:
    """Granite 4's kinds of layers: of ten, the sixth is attention."""
    return ["full_attention" if i % 10 == 5 else "linear_attention" for i in range(layers)]


_LATENT = dict(kv_lora_rank=512, qk_rope_head_dim=64, n_shared_experts=1, norm_topk_prob=True)


def _deepseek_v3(vocab, heads, experts, **more) -> dict:
    config = _llama(vocab, 7168, 18432, 61, heads, heads, 163840, 10000.0, rms_norm_eps=1e-6)
    return (
        config
        | _LATENT
        | dict(
            model_type="deepseek_v3",
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            v_head_dim=128,
            moe_intermediate_size=2048,
            n_routed_experts=experts,
            num_experts_per_tok=8,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
        )
        | more
    )


def _kimi_linear() -> dict:
    """Kimi Linear: three of four layers are delta nets, and so is the last but one."""
    layers, attends = 27, (3, 7, 11, 15, 19, 23, 26)
    return dict(
        model_type="kimi_linear",
        vocab_size=163840,
        hidden_size=2304,
        intermediate_size=9216,
        moe_intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=32,
        model_max_length=1048576,
        rms_norm_eps=1e-5,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts=256,
        num_experts_per_token=8,
        num_shared_experts=1,
        num_expert_group=1,
        topk_group=1,
        routed_scaling_factor=2.446,
        layer_types=[
            "full_attention" if i in attends else "linear_attention" for i in range(layers)
        ],
        mlp_layer_types=["dense"] + ["sparse"] * (layers - 1),
        linear_head_dim=128,
        linear_num_heads=32,
        linear_conv_kernel_dim=4,
        tie_word_embeddings=False,
    )


def _nemotron_h(hidden, intermediate, heads, kv_heads, positions, pattern, **mamba) -> dict:
    """Nemotron-H and Nemotron 3: M mixes by Mamba 2, * attends, - is an MLP, E a mixture."""
    return dict(
        model_type="nemotron_h",
        vocab_size=131072,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=len(pattern),
        hybrid_override_pattern=pattern,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        max_position_embeddings=positions,
        layer_norm_epsilon=1e-5,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
        use_conv_bias=True,
        tie_word_embeddings=False,
        **mamba,
    )


def _gemma3n(layers, intermediate, shared) -> dict:
    return dict(
        model_type="gemma3n_text",
        vocab_size=262400,
        hidden_size=2048,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        sliding_window=512,
        layer_types=_every(layers, 5, "sliding_attention"),
        final_logit_softcapping=30.0,
        vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256,
        altup_num_inputs=4,
        num_kv_shared_layers=shared,
        laurel_rank=64,
        tie_word_embeddings=True,
    )


def _gemma4(hidden, intermediate, layers, heads, kv_heads, **more) -> dict:
    """Gemma 4; heads of layers that see all tokens have 512 values, those of windows 256."""
    given = dict(
        model_type="gemma4_text",
        vocab_size=262144,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=256,
        global_head_dim=512,
        max_position_embeddings=131072,
        rms_norm_eps=1e-6,
        sliding_window=512,
        layer_types=_every(layers, 6, "sliding_attention"),
        final_logit_softcapping=30.0,
        vocab_size_per_layer_input=262144,
        hidden_size_per_layer_input=256,
        tie_word_embeddings=True,
    )
    return given | more


def _large_gemma4(*sizes, global_kv_heads, **more) -> dict:
    """Gemma 4 without embeddings of each layer: keys serve as values where all tokens are seen."""
    return _gemma4(
        *sizes,
        max_position_embeddings=262144,
        sliding_window=1024,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=global_kv_heads,
        **more,
    )


def _glm_flash() -> dict:
    return (
        _llama(154880, 2048, 10240, 47, 20, 20, 202752, 1000000.0)
        | _LATENT
        | dict(
            model_type="glm4_moe_lite",
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
            moe_intermediate_size=1536,
            n_routed_experts=64,
            num_experts_per_tok=4,
            n_group=1,
            topk_group=1,
            mlp_layer_types=["dense"] + ["sparse"] * 46,
            routed_scaling_factor=1.8,
        )
    )


def _mixtral(vocab, hidden, intermediate, layers, heads, positions) -> dict:
    return _llama(
        vocab,
        hidden,
        intermediate,
        layers,
        heads,
        8,
        positions,
        1000000.0,
        model_type="mixtral",
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
    )


def _qwen3_moe(hidden, expert, layers, heads, experts) -> dict:
    return _llama(
        151936,
        hidden,
        3 * hidden,
        layers,
        heads,
        4,
        40960,
        1000000.0,
        model_type="qwen3_moe",
        rms_norm_eps=1e-6,
        head_dim=128,
        moe_intermediate_size=expert,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _gemma(family, hidden, intermediate, layers, heads, kv_heads, **more) -> dict:
    return (
        _llama(
            256000,
            hidden,
            intermediate,
            layers,
            heads,
            kv_heads,
            8192,
            10000.0,
            model_type=family,
            rms_norm_eps=1e-6,
            head_dim=256,
            tie_word_embeddings=True,
            hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh",
        )
        | more
    )


def _gemma2(*sizes, **more) -> dict:
    """Gemma 2: scores are capped, and every other layer sees 4096 tokens."""
    return _gemma(
        "gemma2",
        *sizes,
        **dict(
            query_pre_attn_scalar=256,
            sliding_window=4096,
            attn_logit_softcapping=50.0,
            final_logit_softcapping=30.0,
        )
        | more,
    )


def _gpt2(hidden, layers, heads) -> dict:
    """GPT-2, whose file says n_embd, n_layer, n_head and n_positions."""
    return dict(
        model_type="gpt2",
        vocab_size=50257,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


# The numbers of each model's config.json on the Hugging Face hub.
KNOWN = {
    "meta-llama/Llama-2-7b-hf": _llama(32000, 4096, 11008, 32, 32, 32, 4096, 10000.0),
    "meta-llama/Llama-2-13b-hf": _llama(32000, 5120, 13824, 40, 40, 40, 4096, 10000.0),
    "meta-llama/Llama-2-70b-hf": _llama(32000, 8192, 28672, 80, 64, 8, 4096, 10000.0),
    "codellama/CodeLlama-7b-hf": _llama(32016, 4096, 11008, 32, 32, 32, 16384, 1000000.0),
    "codellama/CodeLlama-13b-hf": _llama(32016, 5120, 13824, 40, 40, 40, 16384, 1000000.0),
    "codellama/CodeLlama-34b-hf": _llama(32000, 8192, 22016, 48, 64, 8, 16384, 1000000.0),
    "meta-llama/Meta-Llama-3-8B": _llama(128256, 4096, 14336, 32, 32, 8, 8192, 500000.0),
    "meta-llama/Meta-Llama-3-70B": _llama(128256, 8192, 28672, 80, 64, 8, 8192, 500000.0),
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k": _llama(
        128256, 4096, 14336, 32, 32, 8, 1048576, 3580165449.0
    ),
    "gradientai/Llama-3-70B-Instruct-Gradient-262k": _llama(
        128256, 8192, 28672, 80, 64, 8, 262144, 283461213.0
    ),
    "meta-llama/Llama-3.1-8B": _llama3(4096, 14336, 32, 32, 8, factor=8.0),
    "meta-llama/Llama-3.1-70B": _llama3(8192, 28672, 80, 64, 8, factor=8.0),
    "meta-llama/Llama-3.2-1B": _llama3(
        2048, 8192, 16, 32, 8, factor=32.0, head_dim=64, tie_word_embeddings=True
    ),
    "meta-llama/Llama-3.2-3B": _llama3(
        3072, 8192, 28, 24, 8, factor=32.0, head_dim=128, tie_word_embeddings=True
    ),
    "meta-llama/Llama-3.1-405B": _llama3(16384, 53248, 126, 128, 8, factor=8.0),
    "meta-llama/Llama-3.3-70B-Instruct": _llama3(8192, 28672, 80, 64, 8, factor=8.0),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _llama(32000, 2048, 5632, 22, 32, 4, 2048, 10000.0),
    "01-ai/Yi-34B": _llama(64000, 7168, 20480, 60, 56, 8, 4096, 5000000.0),
    "mistralai/Mistral-7B-v0.1": _llama(
        32000, 4096, 14336, 32, 32, 8, 32768, 10000.0, model_type="mistral", sliding_window=4096
    ),
    "mistralai/Mistral-7B-v0.3": _llama(
        32768, 4096, 14336, 32, 32, 8, 32768, 1000000.0, model_type="mistral", sliding_window=None
    ),
    "mistralai/Mistral-Nemo-Base-2407": _llama(
        131072,
        5120,
        14336,
        40,
        32,
        8,
        131072,
        1000000.0,
        model_type="mistral",
        sliding_window=None,
        head_dim=128,
    ),
    "Qwen/Qwen2.5-0.5B": _qwen2(151936, 896, 4864, 24, 14, 2, 32768, True),
    "Qwen/Qwen2.5-1.5B": _qwen2(151936, 1536, 8960, 28, 12, 2, 131072, True),
    "Qwen/Qwen2.5-3B": _qwen2(151936, 2048, 11008, 36, 16, 2, 32768, True),
    "Qwen/Qwen2.5-7B": _qwen2(152064, 3584, 18944, 28, 28, 4, 131072, False),
    "Qwen/Qwen2.5-14B": _qwen2(152064, 5120, 13824, 48, 40, 8, 131072, False),
    "Qwen/Qwen2.5-32B": _qwen2(152064, 5120, 27648, 64, 40, 8, 131072, False),
    "Qwen/Qwen2.5-72B": _qwen2(152064, 8192, 29568, 80, 64, 8, 131072, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(
        151936, 1536, 8960, 28, 12, 2, 131072, False, rope_theta=10000.0
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _qwen2(
        152064, 3584, 18944, 28, 28, 4, 131072, False, rope_theta=10000.0
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": _qwen2(
        152064, 5120, 13824, 48, 40, 8, 131072, False, rms_norm_eps=1e-5
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _qwen2(
        152064, 5120, 27648, 64, 40, 8, 131072, False, rms_norm_eps=1e-5
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _llama3(4096, 14336, 32, 32, 8, factor=8.0),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": _llama3(8192, 28672, 80, 64, 8, factor=8.0),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8, False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8, False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8, False),
    "mistralai/Mixtral-8x7B-v0.1": _mixtral(32000, 4096, 14336, 32, 32, 32768),
    "mistralai/Mixtral-8x22B-v0.1": _mixtral(32768, 6144, 16384, 56, 48, 65536),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(2048, 768, 48, 32, experts=128),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 1536, 94, 64, experts=128),
    "google/gemma-7b": _gemma("gemma", 3072, 24576, 28, 16, 16),
    "google/gemma-2b": _gemma("gemma", 2048, 16384, 18, 8, 1),
    "google/gemma-3n-E2B": _gemma3n(30, 8192, shared=10),
    "google/gemma-3n-E4B": _gemma3n(35, 16384, shared=15),
    "google/gemma-4-E2B": _gemma4(
        1536,
        6144,
        35,
        8,
        1,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
        layer_types=_every(35, 5, "sliding_attention"),
    ),
    "google/gemma-4-E4B": _gemma4(2560, 10240, 42, 8, 2, num_kv_shared_layers=18),
    "google/gemma-4-26B-A4B": _large_gemma4(
        2816,
        2112,
        30,
        16,
        8,
        global_kv_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "google/gemma-4-31B": _large_gemma4(5376, 21504, 60, 32, 16, global_kv_heads=4),
    "google/gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4),
    "google/gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8),
    "google/gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, head_dim=128, query_pre_attn_scalar=144),
    "microsoft/Phi-3-mini-4k-instruct": _llama(
        32064,
        3072,
        8192,
        32,
        32,
        32,
        4096,
        10000.0,
        model_type="phi3",
        sliding_window=2047,
        original_max_position_embeddings=4096,
    ),
    "microsoft/phi-4": _llama(
        100352,
        5120,
        17920,
        40,
        40,
        10,
        16384,
        250000.0,
        model_type="phi3",
        sliding_window=None,
        original_max_position_embeddings=16384,
    ),
    "openai/gpt-oss-20b": _gpt_oss(layers=24, experts=32),
    "openai/gpt-oss-120b": _gpt_oss(layers=36, experts=128),
    "Qwen/Qwen3.5-9B": _qwen3_5(4096, 12288, 32, 16, 4),
    "Qwen/Qwen3.5-35B-A3B": _qwen_hybrid(
        2048,
        40,
        16,
        2,
        model_type="qwen3_5_moe_text",
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": _qwen_hybrid(
        2048,
        48,
        16,
        2,
        model_type="qwen3_next",
        vocab_size=151936,
        intermediate_size=5632,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
    ),
    "deepseek-ai/DeepSeek-V3": _deepseek_v3(
        129280, 128, 256, n_group=8, topk_group=4, first_k_dense_replace=3
    ),
    "moonshotai/Kimi-K2-Instruct": _deepseek_v3(163840, 64, 384, routed_scaling_factor=2.827),
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": _kimi_linear(),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _nemotron_h(
        2688,
        1856,
        32,
        2,
        262144,
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        mamba_num_heads=64,
        mamba_head_dim=64,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        n_routed_experts=128,
        num_experts_per_tok=6,
        routed_scaling_factor=2.5,
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _nemotron_h(
        4096,
        21504,
        32,
        2,
        262144,
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        mamba_num_heads=128,
        mamba_head_dim=64,
        moe_intermediate_size=2688,
        moe_latent_size=1024,
        moe_shared_expert_intermediate_size=5376,
        n_routed_experts=512,
        num_experts_per_tok=22,
        routed_scaling_factor=5.0,
    ),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": _nemotron_h(
        4480,
        15680,
        40,
        8,
        131072,
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        mamba_num_heads=128,
        mamba_head_dim=80,
    ),
    "zai-org/GLM-4.7-Flash": _glm_flash(),
    "zai-org/GLM-4.5-Air": _llama(
        151552,
        4096,
        10944,
        46,
        96,
        8,
        131072,
        1000000.0,
        model_type="glm4_moe",
        head_dim=128,
        attention_bias=True,
        moe_intermediate_size=1408,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
    ),
    "meta-llama/Llama-4-Scout-17B-16E": _llama(
        202048,
        5120,
        8192,
        48,
        40,
        8,
        262144,
        500000.0,
        model_type="llama4_text",
        head_dim=128,
        intermediate_size_mlp=16384,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
    ),
    "MiniMaxAI/MiniMax-M2": _llama(
        200064,
        3072,
        1536,
        62,
        48,
        8,
        196608,
        5000000.0,
        model_type="minimax_m2",
        head_dim=128,
        num_local_experts=256,
        num_experts_per_tok=8,
    ),
    "allenai/OLMoE-1B-7B-0924": _llama(
        50304,
        2048,
        1024,
        16,
        16,
        16,
        4096,
        10000.0,
        model_type="olmoe",
        num_experts=64,
        num_experts_per_tok=8,
    ),
    "LiquidAI/LFM2-1.2B": _llama(
        65536,
        2048,
        12288,
        16,
        32,
        8,
        128000,
        1000000.0,
        model_type="lfm2",
        layer_types=["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
        block_auto_adjust_ff_dim=True,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        conv_L_cache=3,
        tie_word_embeddings=True,
    ),
    "ibm-granite/granite-4.0-h-tiny": _llama(
        100352,
        1536,
        512,
        40,
        12,
        4,
        131072,
        10000.0,
        model_type="granitemoehybrid",
        layer_types=_every_tenth(40),
        shared_intermediate_size=1024,
        num_local_experts=64,
        num_experts_per_tok=6,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        position_embedding_type="nope",
        tie_word_embeddings=True,
    ),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "HuggingFaceTB/SmolLM2-135M": _llama(
        49152, 576, 1536, 30, 9, 3, 8192, 100000.0, tie_word_embeddings=True
    ),
    "HuggingFaceTB/SmolLM2-360M": _llama(
        49152, 960, 2560, 32, 15, 5, 8192, 100000.0, tie_word_embeddings=True
    ),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(
        49152, 2048, 8192, 24, 32, 32, 8192, 130000.0, tie_word_embeddings=True
    ),
}
