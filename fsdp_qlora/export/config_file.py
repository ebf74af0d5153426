"""A saved model's config.json as servers and converters of any age read it.

transformers 5 puts all about rotary positions into `rope_parameters` and the dtype into `dtype`.
transformers 4, and vLLM and others beside it, know neither: they rotate by their default base without a
word (https://github.com/vllm-project/vllm/pull/44158). The older names mean the same to transformers 5.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..json_input import read_object

_GPT_NEOX = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_NAMES = {"gpt_neox": _GPT_NEOX, "gpt_neox_japanese": _GPT_NEOX}  # where they were others
_COUNTS_EXPERTS = (
    "qwen3_moe",
    "qwen3_vl_moe_text",
)  # as num_experts, which is num_local_experts now
_SCALINGS = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
)  # that transformers 4 has
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"  # kinds of layers with values of their own
_INSIDE = ("text_config", "language_config", "llm_config")


def write_older_names(folder: Path):
    """Let transformers 4 read a model folder's config.json too.

    What training had to turn off, the cache of keys and values, is left out.
    """
    path = folder / "config.json"
    config = with_older_names(read_object(path))
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def with_older_names(config: dict) -> dict:
    """A configuration with the older names beside the newer, also of a language model inside of it."""
    config = {k: v for k, v in config.items() if k != "use_cache" or v}
    for name in _INSIDE:
        if isinstance(config.get(name), dict):
            config[name] = with_older_names(config[name])
    if isinstance(config.get("dtype"), str):
        config["torch_dtype"] = config["dtype"]
    if config.get("model_type") in _COUNTS_EXPERTS and "num_local_experts" in config:
        config.setdefault("num_experts", config["num_local_experts"])
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        names = _NAMES.get(config.get("model_type", ""), {})
        older = {names.get(k, k): v for k, v in _older_rope(rope).items()}
        config |= {k: v for k, v in older.items() if config.get(k) is None}
    return config


def _older_rope(rope: dict) -> dict:
    """rope_theta, partial_rotary_factor and rope_scaling, as they stood beside each other."""
    if isinstance(rope.get(_GLOBAL), dict):
        local = rope.get(_LOCAL) or {}
        of_local = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        return _older_rope(rope[_GLOBAL]) | of_local
    if rope.get("rope_type", "default") not in _SCALINGS:
        return {}
    own = ("rope_theta", "partial_rotary_factor")
    older = {name: rope[name] for name in own if rope.get(name) is not None}
    scaling = {k: v for k, v in rope.items() if k not in own}
    is_scaled = scaling.get("rope_type", "default") != "default" or len(scaling) > 1
    return older | ({"rope_scaling": scaling} if is_scaled else {})
