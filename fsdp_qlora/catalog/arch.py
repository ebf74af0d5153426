"""Shapes of decoder models: what is in a block, and how many weights of each kind there are.

Memory and time follow from a model's shape alone, so estimates need its config.json and no weights;
`known_models.py` has that file for models people name most. Pure: no torch.

Letters: V vocabulary, D hidden, I intermediate, H query heads, K key-value heads, hd head size,
R LoRA rank, O out rows of a linear layer.
"""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from .known_models import known_config, known_name

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
        raise ValueError(f"--model_name {name}: config.json has no {', '.join(missing)}, so it is not a "
                         "decoder of the Llama kind and can't be estimated")
    if wrong := [key for key in MUST_HAVE if config[key] < 1]:
        raise ValueError(f"--model_name {name}: config.json has {wrong[0]} {config[wrong[0]]}; it must "
                         "be 1 or more")
    if experts := [key for key in EXPERT_COUNTS if (config.get(key) or 1) > 1]:
        raise ValueError(f"--model_name {name}: a mixture of experts ({experts[0]} "
                         f"{config[experts[0]]}) can't be estimated in this version")
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
        raise ValueError(f"--model_name {path}: not a config.json ({error}); give the model's folder, "
                         "or a hub name") from None
    if not isinstance(found, dict):
        raise ValueError(f"--model_name {path}: it holds no JSON object; give the model's folder, or a "
                         "hub name")
    return found


def shape_from_params(text: str) -> ModelShape:
    """The shape of a model built like Llama 3 with about so many weights: `7B`, `350M` or a number.

    Width grows with depth, as in the family: D = 128 x layers, 8 key-value heads, I = 3.5 D. Raises
    ValueError, naming --params, for what is no size or beyond reach.
    """
    found = re.fullmatch(r"([\d.]+)\s*([KMBT]?)", text.strip().upper())
    try:
        if not found: raise ValueError
        wanted = float(found[1]) * dict(K=1e3, M=1e6, B=1e9, T=1e12).get(found[2], 1)
    except ValueError:
        raise ValueError(f"--params {text}: give a size such as 7B, 350M or 8030261248") from None
    if not 5e6 <= wanted <= 2e12:
        raise ValueError(f"--params {text}: {wanted:,.0f} weights; 5M to 2T can be estimated")
    vocab = 128256 if wanted > 5e8 else 32000
    def llama(layers):
        heads = max(1, layers if layers < 64 else layers // 8 * 8)
        return ModelShape(name=f"a Llama of {text.strip()} weights", family="llama", vocab=vocab,
                          hidden=128 * heads, intermediate=448 * heads, layers=layers, heads=heads,
                          kv_heads=min(heads, 8), head_dim=128, tied=wanted < 3e9)
    near = min(map(llama, range(1, 400)), key=lambda s: abs(s.total_params() - wanted))
    rest = (wanted - near.total_params()) / sum(near.block_params().values())
    return replace(near, layers=max(1, near.layers + round(rest)))
