"""The shape of a model: from its config.json, by its name, or of a number of weights.

`known_models.py` has the config.json of models that people name most. Pure: no torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

from ..json_input import from_json
from .arch import ModelShape
from .blocks import Block, layer_blocks, layer_inputs
from .families import FAMILIES, Traits, positions_of, traits_of, with_common_names
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
