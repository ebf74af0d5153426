"""Shapes of decoder models: what is in a block, and how many weights of each kind there are.

Memory and time follow from a model's shape alone, so estimates need its config.json and no weights.
`KNOWN` holds that file's numbers for models people name most, gated ones too; `known_config(name)`
gives them in transformers' own fields, so that `AutoConfig.for_model` makes the real model of them.
Pure: no torch.

Letters: V vocabulary, D hidden, I intermediate, H query heads, K key-value heads, hd head size,
R LoRA rank, O out rows of a linear layer.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

# Family traits that config.json leaves to transformers' defaults.
TIED_BY_DEFAULT = ("gemma", "gemma2")
QKV_BIAS = ("qwen2",)
QK_NORM = ("qwen3",)
FOUR_NORMS = ("gemma2",)
FUSED = ("phi3",)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3")
# What PEFT adapts if no target is named.
DEFAULT_TARGETS = {"phi3": ("qkv_proj",)}

MUST_HAVE = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads")
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of one decoder model."""
    name: str
    family: str              # transformers' model_type
    vocab: int               # V
    hidden: int              # D
    intermediate: int        # I
    layers: int
    heads: int               # H
    kv_heads: int            # K
    head_dim: int            # hd
    tied: bool               # one tensor is embedding and head
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    max_positions: int | None = None

    @property
    def fused(self) -> bool:
        """True if q, k, v are one linear layer, and gate and up another."""
        return self.family in FUSED

    @property
    def qk_norm(self) -> bool:
        """True if each head's q and k are normalised."""
        return self.family in QK_NORM

    @property
    def norms_per_block(self) -> int:
        """Norms of width D in a block."""
        return 4 if self.family in FOUR_NORMS else 2

    @property
    def known_family(self) -> bool:
        """False if the block is only assumed to be built like Llama's."""
        return self.family in FAMILIES

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear layer of a block, by name, in the order of the forward."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        d, i = self.hidden, self.intermediate
        if self.fused:
            return dict(qkv_proj=(q + 2 * kv, d), o_proj=(d, q), gate_up_proj=(2 * i, d),
                        down_proj=(d, i))
        return dict(q_proj=(q, d), k_proj=(kv, d), v_proj=(kv, d), o_proj=(d, q),
                    gate_proj=(i, d), up_proj=(i, d), down_proj=(d, i))

    def biases(self) -> dict[str, int]:
        """Length of the bias of each linear layer of a block that has one."""
        def has_bias(name):
            if name == "o_proj": return self.o_bias
            return self.qkv_bias if name[0] in "qkv" else self.mlp_bias
        return {name: out for name, (out, _) in self.linears().items() if has_bias(name)}

    def block_params(self) -> dict[str, int]:
        """Weights of one block: `linears`, and `norms` with the biases."""
        norms = self.norms_per_block * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return dict(linears=sum(out * wide for out, wide in self.linears().values()),
                    norms=norms + sum(self.biases().values()))

    def params(self) -> dict[str, int]:
        """Weights of the model by kind; `head` is 0 where the embedding is used again."""
        block, embedding = self.block_params(), self.vocab * self.hidden
        return dict(embedding=embedding, linears=self.layers * block["linears"],
                    norms=self.layers * block["norms"] + self.hidden,
                    head=0 if self.tied else embedding)

    def total_params(self) -> int:
        """Weights of the model, as `sum(p.numel() for p in model.parameters())`."""
        return sum(self.params().values())

    def targets(self, wanted: str | list[str] | None = "all-linear") -> tuple[str, ...]:
        """Names of the adapted linear layers of a block, and lm_head if it is adapted.

        `wanted` is what PEFT takes: "all-linear", names, or None for PEFT's choice. Raises
        ValueError, listing the names there are, for one that does not exist.
        """
        names = tuple(self.linears())
        if wanted == "all-linear": return names
        if wanted is None: return DEFAULT_TARGETS.get(self.family, ("q_proj", "v_proj"))
        known = (*names, "lm_head")
        wanted = [wanted] if isinstance(wanted, str) else wanted
        last = [name.rsplit(".", 1)[-1] for name in wanted]
        if missing := [name for name in last if name not in known]:
            raise ValueError(f"--lora_target_modules {','.join(missing)}: no such module; "
                             f"{self.name} has {', '.join(known)}")
        return tuple(name for name in known if name in last)

    def lora_block_params(self, rank: int, targets: tuple[str, ...]) -> int:
        """Adapter weights of one block: A (R, in) and B (out, R) for each target."""
        return rank * sum(sum(shape) for name, shape in self.linears().items() if name in targets)

    def lora_params(self, rank: int = 64, targets: str | list[str] | None = "all-linear") -> int:
        """Adapter weights of the model."""
        names = self.targets(targets)
        head = rank * (self.vocab + self.hidden) if "lm_head" in names else 0
        return self.layers * self.lora_block_params(rank, names) + head

    def cut(self, layers: int) -> ModelShape:
        """The same model with fewer blocks."""
        return replace(self, name=f"{self.name} ({layers} of {self.layers} layers)", layers=layers)


def shape_from_config(config: dict, name: str = "") -> ModelShape:
    """The shape that a config.json describes, as a dict.

    Raises ValueError for a file that is no decoder's, or one of experts, which are not modelled.
    """
    config = config.get("text_config") or config
    name = name or config.get("_name_or_path") or config.get("model_type", "model")
    if missing := [key for key in MUST_HAVE if not isinstance(config.get(key), int)]:
        raise ValueError(f"{name}: config.json has no {', '.join(missing)}, so it is not a decoder "
                         "of the Llama kind and can't be estimated")
    if wrong := [key for key in MUST_HAVE if config[key] < 1]:
        raise ValueError(f"{name}: config.json has {wrong[0]} {config[wrong[0]]}; it must be 1 or "
                         "more")
    if experts := [key for key in EXPERT_COUNTS if (config.get(key) or 1) > 1]:
        raise ValueError(f"{name}: a mixture of experts ({experts[0]} {config[experts[0]]}) can't "
                         "be estimated in this version")
    family, heads = config.get("model_type", "llama"), config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    tied = config.get("tie_word_embeddings")
    return ModelShape(
        name=name, family=family, vocab=config["vocab_size"], hidden=config["hidden_size"],
        intermediate=config["intermediate_size"], layers=config["num_hidden_layers"], heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        tied=family in TIED_BY_DEFAULT if tied is None else bool(tied),
        qkv_bias=family in QKV_BIAS or bias, o_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        max_positions=config.get("max_position_embeddings"))


def model_shape(model: str | Path | dict) -> ModelShape:
    """The shape of a config dict, a folder with config.json, such a file, or a known model's name.

    Raises ValueError, with close names and the other ways to give a model, if it is none of these.
    """
    if isinstance(model, dict): return shape_from_config(model)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file(): return shape_from_config(read_json(file), str(model))
    return shape_from_config(known_config(str(model)), known_name(str(model)))


def read_json(path: Path) -> dict:
    """A JSON object of a file; ValueError, naming it, if it is something else."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(found, dict): raise ValueError(f"{path} holds no JSON object")
    return found


TUNED = re.compile(r"-(instruct|chat|it)(?=-|$)")


def bare_name(name: str) -> str:
    """A hub name without owner, case, `Meta-`, `-hf` and what marks a tuned model."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower()
    return TUNED.sub("", last.removeprefix("meta-").removesuffix("-hf"))


def known_name(name: str) -> str:
    """The full hub name of a known model; owner, case and `-hf` may be left out or differ.

    A model tuned for chat (`-Instruct`, `-chat`, `-it`) has the shape of the one it was made from.
    Raises ValueError, listing close names, for a model that is not known.
    """
    by_bare = {bare_name(full): full for full in KNOWN}
    wanted = bare_name(name)
    if wanted in by_bare: return by_bare[wanted]
    near = [by_bare[key] for key in get_close_matches(wanted, by_bare, 4, 0.5)]
    raise ValueError(f"{name}: not a known model, folder or file; {'close' if near else 'known'} "
                     f"names: {', '.join(near or KNOWN)}. Give one of them, a folder with "
                     "config.json, or that file")


def known_config(name: str) -> dict:
    """The config.json of a known model, in transformers' fields; ValueError if it is not known."""
    return dict(KNOWN[known_name(name)])


def _llama(vocab, hidden, intermediate, layers, heads, kv_heads, positions, theta, **more) -> dict:
    """config.json's fields for a model built like Llama."""
    return dict(model_type="llama", vocab_size=vocab, hidden_size=hidden,
                intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
                num_key_value_heads=kv_heads, max_position_embeddings=positions, rope_theta=theta,
                rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False) | more


def _llama3(*sizes, factor: float, **more) -> dict:
    """Llama 3.1 and 3.2: a vocabulary of 128k, 131k positions by scaled rotary angles."""
    hidden, intermediate, layers, heads, kv_heads = sizes
    scaling = dict(rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)
    return _llama(128256, hidden, intermediate, layers, heads, kv_heads, 131072, 500000.0,
                  rope_scaling=scaling) | more


def _qwen2(vocab, hidden, intermediate, layers, heads, kv_heads, positions, tied) -> dict:
    return _llama(vocab, hidden, intermediate, layers, heads, kv_heads, positions, 1000000.0,
                  model_type="qwen2", rms_norm_eps=1e-6, tie_word_embeddings=tied)


def _qwen3(hidden, intermediate, layers, heads, kv_heads, tied) -> dict:
    return _llama(151936, hidden, intermediate, layers, heads, kv_heads, 40960, 1000000.0,
                  model_type="qwen3", rms_norm_eps=1e-6, head_dim=128, tie_word_embeddings=tied)


def _gemma(family, hidden, intermediate, layers, heads, kv_heads, **more) -> dict:
    return _llama(256000, hidden, intermediate, layers, heads, kv_heads, 8192, 10000.0,
                  model_type=family, rms_norm_eps=1e-6, head_dim=256, tie_word_embeddings=True,
                  hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh") | more


# The numbers of each model's config.json on the Hugging Face hub.
KNOWN = {
    "meta-llama/Llama-2-7b-hf": _llama(32000, 4096, 11008, 32, 32, 32, 4096, 10000.0),
    "meta-llama/Llama-2-13b-hf": _llama(32000, 5120, 13824, 40, 40, 40, 4096, 10000.0),
    "meta-llama/Llama-2-70b-hf": _llama(32000, 8192, 28672, 80, 64, 8, 4096, 10000.0),
    "codellama/CodeLlama-34b-hf": _llama(32000, 8192, 22016, 48, 64, 8, 16384, 1000000.0),
    "meta-llama/Meta-Llama-3-8B": _llama(128256, 4096, 14336, 32, 32, 8, 8192, 500000.0),
    "meta-llama/Meta-Llama-3-70B": _llama(128256, 8192, 28672, 80, 64, 8, 8192, 500000.0),
    "meta-llama/Llama-3.1-8B": _llama3(4096, 14336, 32, 32, 8, factor=8.0),
    "meta-llama/Llama-3.1-70B": _llama3(8192, 28672, 80, 64, 8, factor=8.0),
    "meta-llama/Llama-3.2-1B": _llama3(2048, 8192, 16, 32, 8, factor=32.0, head_dim=64,
                                       tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B": _llama3(3072, 8192, 28, 24, 8, factor=32.0, head_dim=128,
                                       tie_word_embeddings=True),
    "01-ai/Yi-34B": _llama(64000, 7168, 20480, 60, 56, 8, 4096, 5000000.0),
    "mistralai/Mistral-7B-v0.1": _llama(32000, 4096, 14336, 32, 32, 8, 32768, 10000.0,
                                        model_type="mistral", sliding_window=4096),
    "mistralai/Mistral-7B-v0.3": _llama(32768, 4096, 14336, 32, 32, 8, 32768, 1000000.0,
                                        model_type="mistral", sliding_window=None),
    "Qwen/Qwen2.5-0.5B": _qwen2(151936, 896, 4864, 24, 14, 2, 32768, True),
    "Qwen/Qwen2.5-1.5B": _qwen2(151936, 1536, 8960, 28, 12, 2, 131072, True),
    "Qwen/Qwen2.5-7B": _qwen2(152064, 3584, 18944, 28, 28, 4, 131072, False),
    "Qwen/Qwen2.5-14B": _qwen2(152064, 5120, 13824, 48, 40, 8, 131072, False),
    "Qwen/Qwen2.5-32B": _qwen2(152064, 5120, 27648, 64, 40, 8, 131072, False),
    "Qwen/Qwen2.5-72B": _qwen2(152064, 8192, 29568, 80, 64, 8, 131072, False),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, True),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32, 8, True),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8, False),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8, False),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8, False),
    "google/gemma-7b": _gemma("gemma", 3072, 24576, 28, 16, 16),
    "google/gemma-2-9b": _gemma("gemma2", 3584, 14336, 42, 16, 8, query_pre_attn_scalar=256,
                                sliding_window=4096, attn_logit_softcapping=50.0,
                                final_logit_softcapping=30.0),
    "microsoft/Phi-3-mini-4k-instruct": _llama(
        32064, 3072, 8192, 32, 32, 32, 4096, 10000.0, model_type="phi3", sliding_window=2047,
        original_max_position_embeddings=4096),
    "HuggingFaceTB/SmolLM2-135M": _llama(49152, 576, 1536, 30, 9, 3, 8192, 100000.0,
                                         tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-360M": _llama(49152, 960, 2560, 32, 15, 5, 8192, 100000.0,
                                         tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(49152, 2048, 8192, 24, 32, 32, 8192, 130000.0,
                                         tie_word_embeddings=True),
}
