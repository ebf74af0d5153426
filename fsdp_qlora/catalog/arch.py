"""Shapes of decoder models: what is in a block, and how many weights of each kind there are.

Memory and time follow from a model's shape alone, so estimates need its config.json and no weights;
`known_models.py` has that file for models people name most. Pure: no torch.

Letters: V vocabulary, D hidden, I intermediate, H query heads, K key-value heads, hd head size,
R LoRA rank, O out rows of a linear layer, E experts.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten

from ..json_input import from_json
from .blocks import Block, LayerInputs, Sizes, layer_blocks, layer_inputs, left_out
from .families import (
    DEFAULT_TARGETS,
    FAMILIES,
    LLAMA,
    Traits,
    positions_of,
    traits_of,
    with_common_names,
)
from .known_models import known_config, known_name, why_no_model

_MUST_HAVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_MAY_HAVE = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of one decoder model."""

    name: str
    family: str  # transformers' model_type
    vocab: int  # V
    hidden: int  # D
    intermediate: int  # I
    layers: int
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # hd
    traits: Traits = LLAMA  # of the family and this model of it
    max_positions: int | None = None
    experts: int = 0  # E
    experts_per_token: int = 0
    new_blocks: int = 0  # among the layers: Llama-Pro's, trained (llama_pro.py)
    # Where blocks differ, or are not built like Llama's: a shape for each kind, as if all blocks were of
    # it, with `block`; and the kind of each block, in order.
    kinds: tuple[ModelShape, ...] = ()
    order: tuple[int, ...] = ()
    block: Block | None = None
    inputs: LayerInputs | None = None  # of each block, beside the stream

    @property
    def tied(self) -> bool:
        """True if one tensor is embedding and head."""
        return self.traits.tied

    @property
    def known_family(self) -> bool:
        """False if the block is only assumed to be built like Llama's."""
        return self.family in FAMILIES or bool(self.kinds)

    @property
    def mlp_width(self) -> int:
        """Values between up and down that a token passes through; of all its experts."""
        if self.block:
            return self.block.mlp.width
        return self.intermediate * max(1, self.experts_per_token)

    @property
    def norms(self) -> int:
        """Norms of width D in a block."""
        return len(self.block.norms) if self.block else self.traits.norms

    @property
    def in_16_bits(self) -> tuple[str, ...]:
        """Names of a block's linear layers that are never quantized."""
        return self.block.mixer.in_16_bits if self.block else ()

    @property
    def has_state(self) -> bool:
        """Whether some mixers carry a state along a row."""
        return any(kind.state_width for kind, _ in self.block_kinds())

    @property
    def state_width(self) -> int:
        """Values of a token that a mixer with a state convolves, and takes in: 0 without one."""
        mixer = self.block.mixer if self.block else None
        return sum(out for _, (out, _) in mixer.linears[:-1]) if mixer and mixer.state else 0

    @property
    def learned_positions(self) -> int:
        """Rows of an embedding of positions, which most families do without."""
        return (self.max_positions or 0) if self.traits.layers == "gpt2" else 0

    def attention_linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the linear layers of a block's attention; the last gives its output."""
        if self.block:
            return dict(self.block.mixer.linears)
        q, kv, d = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        if self.traits.layers == "gpt2":
            return {"attn.c_attn": (q + 2 * kv, d), "attn.c_proj": (d, q)}
        if self.traits.layers == "fused":
            return dict(qkv_proj=(q + 2 * kv, d), o_proj=(d, q))
        return dict(q_proj=(q, d), k_proj=(kv, d), v_proj=(kv, d), o_proj=(d, q))

    def mlp_linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the linear layers of a block's MLP; the last gives its output."""
        d, i = self.hidden, self.intermediate
        if self.block:
            return dict(self.block.mlp.linears)
        if self.traits.experts:
            return {}
        if self.traits.layers == "gpt2":
            return {"mlp.c_fc": (i, d), "mlp.c_proj": (d, i)}
        if self.traits.layers == "fused":
            return dict(gate_up_proj=(2 * i, d), down_proj=(d, i))
        return dict(gate_proj=(i, d), up_proj=(i, d), down_proj=(d, i))

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear layer of a block, by name, in the order of the forward.

        Of a model of several kinds of blocks, those of all kinds: for names, not for counting.
        """
        if self.kinds:
            return {name: size for kind in self.kinds for name, size in kind.linears().items()}
        return self.attention_linears() | self.mlp_linears()

    def expert_linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the weights of one expert; empty without experts."""
        if self.kinds:
            return next((k.expert_linears() for k in self.kinds if k.experts), {})
        if self.block:
            return dict(self.block.mlp.of_experts)
        if not self.traits.experts:
            return {}
        return {
            "experts.gate_up_proj": (2 * self.intermediate, self.hidden),
            "experts.down_proj": (self.hidden, self.intermediate),
        }

    def biases(self) -> dict[str, int]:
        """Length of the bias of each linear layer of a block that has one."""
        if self.block:
            return dict(self.block.mixer.biases + self.block.mlp.biases)
        attention = list(self.attention_linears())
        has = {name: self.traits.mlp_bias for name in self.mlp_linears()}
        has |= dict.fromkeys(attention[:-1], self.traits.qkv_bias) | {
            attention[-1]: self.traits.o_bias
        }
        return {name: out for name, (out, _) in self.linears().items() if has[name]}

    def norm_weights(self) -> list[tuple[str, int]]:
        """Name and length of each weight of a block's norms, and of others that are in no linear layer."""
        if self.block:
            return [*self.block.norms, *self.block.mixer.beside, *self.block.mlp.beside]
        widths = dict(
            head=(self.head_dim, self.head_dim),
            width=(self.heads * self.head_dim, self.kv_heads * self.head_dim),
        )
        of_qk = zip(("q_norm", "k_norm"), widths.get(self.traits.qk_norm, ()), strict=False)
        names = self.traits.norm_names * self.traits.norm_parts
        return [*((name, self.hidden) for name in names), *of_qk]

    def block_params(self) -> dict[str, int]:
        """Weights of one block: `linears`, and `norms` with biases and a router."""
        each = sum(out * wide for out, wide in self.linears().values())
        experts = sum(out * wide for out, wide in self.expert_linears().values())
        norms = sum(width for _, width in self.norm_weights()) + sum(self.biases().values())
        return dict(linears=each + self.experts * experts, norms=norms + self.router_weights)

    @property
    def router_weights(self) -> int:
        """Weights of a block's router that are in no linear layer."""
        in_linear = self.block and self.block.mlp.router_is_linear
        return 0 if in_linear else self.experts * self.hidden

    def outer_linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of linear layers beside the blocks and the head."""
        return dict(self.inputs.linears(self.layers, self.hidden)) if self.inputs else {}

    def outer_tables(self) -> Sizes:
        """Rows and width of other weights beside the blocks, the last norm and the vocabulary."""
        return self.inputs.tables(self.layers) if self.inputs else ()

    def block_kinds(self) -> tuple[tuple[ModelShape, int], ...]:
        """The shape of each kind of block, with how many there are."""
        if not self.kinds:
            return ((self, self.layers),)
        return tuple(
            (self.kinds[kind], count) for kind, count in sorted(Counter(self.order).items())
        )

    def used_linears(self) -> int:
        """Weights of a block's linear layers that a token is multiplied with."""
        experts = sum(out * wide for out, wide in self.expert_linears().values())
        return (
            sum(out * wide for out, wide in self.linears().values())
            + self.experts_per_token * experts
        )

    def params(self) -> dict[str, int]:
        """Weights of the model by kind; `head` is 0 where the embedding is used again.

        `norms` are all that is neither linear nor the embedding or head; an embedding of each layer too.
        """
        embedding = self.vocab * self.hidden
        blocks = [(kind.block_params(), count) for kind, count in self.block_kinds()]
        last = self.hidden * (self.traits.norm_parts + self.learned_positions)
        last += sum(rows * width for _, (rows, width) in self.outer_tables())
        outer = sum(out * wide for out, wide in self.outer_linears().values())
        return dict(
            embedding=embedding,
            linears=outer + sum(count * block["linears"] for block, count in blocks),
            norms=sum(count * block["norms"] for block, count in blocks) + last,
            head=0 if self.tied else embedding,
        )

    def total_params(self) -> int:
        """Weights of the model, as `sum(p.numel() for p in model.parameters())`."""
        return sum(self.params().values())

    def targets(self, wanted: str | list[str] | None = "all-linear") -> tuple[str, ...]:
        """Names of the adapted linear layers of a block, and lm_head if it is adapted.

        `wanted` is what PEFT takes: "all-linear", names, or None for PEFT's choice. Raises
        ValueError, listing the names there are, for one that does not exist.
        """
        names = (*self.linears(), *self.outer_linears())
        if wanted == "all-linear":
            return tuple(n for n in names if n.rsplit(".", 1)[-1] not in left_out(self.family))
        if wanted is None:
            wanted = [*DEFAULT_TARGETS.get(self.family, ())] or ["q_proj", "v_proj"]
        known = (*names, "lm_head")
        wanted = [wanted] if isinstance(wanted, str) else wanted

        def is_of(name, asked):
            return f".{name}".endswith(f".{asked.rsplit('.', 1)[-1]}")

        # What one kind of block lacks, another has.
        missing = [w for w in wanted if not any(is_of(name, w) for name in known)]
        if missing and not self.block:
            raise ValueError(
                f"--lora_target_modules {','.join(missing)}: no such module; "
                f"{self.name} has {', '.join(known)}"
            )
        return tuple(name for name in known if any(is_of(name, w) for w in wanted))

    def expert_targets(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """Names of the adapted weights of experts; "experts" is all of them.

        Raises ValueError, listing the names there are, for one that does not exist.
        """
        names, wanted = tuple(self.expert_linears()), tuple(wanted)

        def is_of(name, asked):
            return asked in ("experts", name) or name.endswith(asked.split(".")[-1])

        missing = [w for w in wanted if not any(is_of(name, w) for name in names)]
        if missing and not self.block:
            raise ValueError(
                f"--lora_target_parameters {','.join(missing)}: no such parameter; "
                f"{self.name} has {', '.join(names) or 'no experts'}"
            )
        return tuple(name for name in names if any(is_of(name, w) for w in wanted))

    def lora_block_params(self, rank: int, targets: tuple[str, ...]) -> int:
        """Adapter weights of one block: A (R, in) and B (out, R) for each target."""
        return rank * sum(sum(shape) for name, shape in self.linears().items() if name in targets)

    def lora_params(self, rank: int = 64, targets: str | list[str] | None = "all-linear") -> int:
        """Adapter weights of the model."""
        names = self.targets(targets)
        head = rank * (self.vocab + self.hidden) if "lm_head" in names else 0
        outer = rank * sum(sum(s) for name, s in self.outer_linears().items() if name in names)
        return (
            head
            + outer
            + sum(count * kind.lora_block_params(rank, names) for kind, count in self.block_kinds())
        )

    def cut(self, layers: int) -> ModelShape:
        """The same model with fewer blocks, the first ones."""
        name = f"{self.name} ({layers} of {self.layers} layers)"
        return replace(self, name=name, layers=layers, order=self.order[:layers])


def shape_from_config(config: dict, name: str = "") -> ModelShape:
    """The shape that a config.json describes, as a dict.

    Raises ValueError for a file that is no decoder's, or one of experts of an unknown kind.
    """
    config = with_common_names(_text_config(config))
    if config.get("intermediate_size") is None:  # of a mixture without a dense block
        config["intermediate_size"] = config.get("moe_intermediate_size")
    name = name or config.get("_name_or_path") or config.get("model_type", "model")
    _check_fields(name, config)
    family, traits = config.get("model_type", "llama"), traits_of(config)
    heads, blocks = config["num_attention_heads"], layer_blocks(config)
    experts = next((config[key] for key in _EXPERT_COUNTS if (config.get(key) or 1) > 1), 0)
    if experts and not blocks:
        _check_experts(name, config, traits, experts)
    shape = ModelShape(
        name=name,
        family=family,
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=experts and config.get("moe_intermediate_size") or config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        traits=traits,
        max_positions=positions_of(config),
        experts=experts,
        experts_per_token=(config.get("num_experts_per_tok") or 0) if experts else 0,
    )
    return _of_blocks(shape, config, blocks) if blocks else shape


def _of_blocks(shape: ModelShape, config: dict, blocks: list[Block]) -> ModelShape:
    """The shape of a model that is built of these blocks."""
    distinct = list(dict.fromkeys(blocks))
    kinds = tuple(
        replace(
            shape,
            block=block,
            heads=block.mixer.heads,
            kv_heads=block.mixer.kv_heads,
            head_dim=block.mixer.head_dim,
            intermediate=block.mlp.each_width,
            experts=block.mlp.experts,
            experts_per_token=block.mlp.experts_per_token,
        )
        for block in distinct
    )
    order = tuple(map(distinct.index, blocks))
    return replace(shape, kinds=kinds, order=order, inputs=layer_inputs(config))


def _text_config(config: dict) -> dict:
    """The part of a config.json that describes the language model, which may be inside of another."""
    text = config.get("text_config")
    if not isinstance(text, dict) or not text:
        return config
    tied = text.get("tie_word_embeddings")
    return text | dict(
        tie_word_embeddings=config.get("tie_word_embeddings") if tied is None else tied
    )


def _check_fields(name: str, config: dict):
    """Refuse a config.json whose sizes are missing, or can't be. Raises ValueError."""
    where = f"--model_name {name}: config.json has"
    if missing := [key for key in _MUST_HAVE if config.get(key) is None]:
        raise ValueError(
            f"{where} no {', '.join(missing)}, so it is not a decoder of the Llama kind "
            "and can't be estimated"
        )
    if config.get("is_encoder_decoder"):
        raise ValueError(
            f"{where} is_encoder_decoder, so it is not a decoder of the Llama kind "
            "and can't be estimated"
        )
    for key in (*_MUST_HAVE, *_MAY_HAVE):
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(
                f"{where} {key} {shorten(json.dumps(value), 40)}; it must be a whole "
                "number of 1 or more"
            )
    if type(config.get("tie_word_embeddings")) not in (bool, type(None)):
        raise ValueError(
            f"{where} tie_word_embeddings {config['tie_word_embeddings']!r}; it must be "
            "true or false"
        )
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or 1
    if heads % kv_heads:
        raise ValueError(
            f"{where} num_attention_heads {heads}, which is not a multiple of "
            f"num_key_value_heads {kv_heads}; give the file as the model's maker wrote it"
        )


def _check_experts(name: str, config: dict, traits: Traits, experts: int):
    """Refuse a mixture of experts that is built in a way not known here. Raises ValueError."""
    family, used = config.get("model_type"), config.get("num_experts_per_tok")
    if not traits.experts:
        fault = f"the experts of {family} are not known here"
    elif config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        fault = "only some of its blocks have experts"
    elif type(used) is not int or not 1 <= used <= experts:
        raise ValueError(
            f"--model_name {name}: config.json has num_experts_per_tok {json.dumps(used)}; "
            f"it must be 1 to {experts}, as many as there are experts"
        )
    else:
        return
    known = ", ".join(f for f, t in FAMILIES.items() if t.experts)
    raise ValueError(
        f"--model_name {name}: a mixture of experts that can't be estimated: {fault}; "
        f"known are {known} with experts everywhere"
    )


def model_shape(model: str | Path | dict) -> ModelShape:
    """The shape of a config dict, a folder with config.json, such a file, or a known model's name.

    Raises ValueError, with close names and the other ways to give a model, if it is none of these.
    """
    if isinstance(model, dict):
        return shape_from_config(model)
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ValueError(f"--model_name {model}: {why_no_model(path)}")
    if file.is_file():
        return shape_from_config(_read_json(file), str(model))
    return shape_from_config(known_config(str(model)), known_name(str(model)))


def _read_json(path: Path) -> dict:
    """A JSON object of a file; ValueError, naming it, if it is something else."""
    try:
        found = from_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--model_name {path}: not a config.json ({error}); give the model's folder, "
            "or a hub name"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(
            f"--model_name {path}: not a JSON object; give the model's folder, or a hub name"
        )
    return found


def shape_from_params(text: str) -> ModelShape:
    """The shape of a model built like Llama 3 with about so many weights: `7B`, `350M` or a number.

    Width grows with depth, as in the family: D = 128 x layers, 8 key-value heads, I = 3.5 D. Raises
    ValueError, naming --params, for what is no size or beyond reach.
    """
    found = re.fullmatch(r"([\d.,_]+(?:E\+?\d+)?)\s*([KMBT]?)", text.strip().upper())
    try:
        if not found:
            raise ValueError
        wanted = float(re.sub("[,_]", "", found[1])) * dict(K=1e3, M=1e6, B=1e9, T=1e12).get(
            found[2], 1
        )
    except ValueError:
        raise ValueError(f"--params {text}: give a size such as 7B, 350M or 8030261248") from None
    if not 5e6 <= wanted <= 2e12:
        unit = f"; did you mean {text.strip()}B?" if 0.1 <= wanted <= 2000 and not found[2] else ""
        raise ValueError(f"--params {text}: give 5M to 2T weights, which can be estimated{unit}")
    vocab = 128256 if wanted > 5e8 else 32000

    def llama(layers):
        heads = max(1, layers if layers < 64 else layers // 8 * 8)
        return ModelShape(
            name=f"a Llama of {text.strip()} weights",
            family="llama",
            vocab=vocab,
            hidden=128 * heads,
            intermediate=448 * heads,
            layers=layers,
            heads=heads,
            kv_heads=min(heads, 8),
            head_dim=128,
            traits=Traits(tied=wanted < 3e9),
        )

    near = min(map(llama, range(1, 400)), key=lambda s: abs(s.total_params() - wanted))
    rest = (wanted - near.total_params()) / sum(near.block_params().values())
    return replace(near, layers=max(1, near.layers + round(rest)))
