"""LoRA and DoRA on frozen linear layers: a model gets its adapters.

PEFT decides what an adapter is called, how it is configured and how it is saved, so that everything
written here loads in plain PEFT; `lora_ops` and `dora` compute. LoRA is arXiv:2106.09685.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from ..config.settings import default_of
from ..experts import adapt_experts, expert_parameters, target_ends
from ..model.blocks import base_model, block_list
from ..model.conv1d import holds_transposed
from ..quantization.quantize import QuantLinear
from .biases import add_biases_as_computed, check_biases
from .dora import Magnitude
from .lora_layer import LoraLinear
from .targets import but_experts, check_patterns, left_out, resolve_targets


def lora_config(
    *,
    rank: int = 64,
    alpha: int = 16,
    dropout: float = 0.0,
    target_modules: str | list[str] | None = "all-linear",
    **more: Any,
) -> LoraConfig:
    """A PEFT LoRA configuration for causal language models; `more` is PEFT's, such as use_dora.

    The adapter's output is scaled by alpha / rank. dropout: share of its input. target_modules:
    "all-linear" is every linear layer but the head, None is PEFT's choice.
    """
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=target_modules,
        **more,
    )


def apply_adapters(
    model: nn.Module, config: LoraConfig, dtype: torch.dtype = torch.float32
) -> PeftModel:
    """Freeze the model and inject LoRA layers; adapters are stored in `dtype`.

    `config.target_parameters` names those of experts, or is ["experts"] for all of them.
    Works on the meta device (values come later, `init_adapters`) and on a loaded model. Raises
    ValueError, listing the candidates, if a target module or parameter does not exist, and for what
    PEFT's configuration can ask for and these layers don't compute.
    """
    _check_options(config)
    _check_suits(model, config)
    left = left_out(model) if config.target_modules == "all-linear" else {}
    config.target_modules = resolve_targets(model, config.target_modules)
    targets, blocks = config.target_parameters, config.layers_to_transform
    within = tuple(f"{block_list(model)[0]}.{i}." for i in blocks or ())
    experts = expert_parameters(base_model(model), targets, within)
    ends = target_ends(targets, experts)
    config.target_parameters = None  # PEFT would look for parameters of that name now
    check_patterns(model, config, experts)
    if holds_transposed(model):
        config.fan_in_fan_out = True  # as PEFT calls it where it loads this
    config._register_custom_module({QuantLinear: LoraLinear, nn.Linear: LoraLinear})
    on_meta, excluded = next(model.parameters()).is_meta, config.exclude_modules
    config.exclude_modules = but_experts(model, excluded)
    with warnings.catch_warnings():  # patterns are checked, and PEFT does not see those of experts
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")
        peft_model = get_peft_model(
            model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=on_meta
        )
    config.exclude_modules = excluded
    with torch.device("meta") if on_meta else nullcontext():
        adapt_experts(peft_model, experts, config)
    config.target_parameters = ([*experts] if blocks else ends) if experts else None
    check_biases(peft_model, config.bias)
    for p in trainable_parameters(peft_model).values():
        p.data = p.data.to(dtype)
    if config.use_dora:
        _measure_magnitudes_again(peft_model)
    add_biases_as_computed(peft_model)
    peft_model.left_out = left
    return peft_model


def _measure_magnitudes_again(model: PeftModel):
    """Norms in the adapters' dtype: PEFT took them when A and B still had the model's."""
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            for name in layer.lora_magnitude_vector:
                Magnitude.init(layer, name)


# Fields of a LoraConfig that are followed here, and those that change nothing in training.
_FOLLOWED = {
    "r",
    "lora_alpha",
    "lora_dropout",
    "lora_bias",
    "target_modules",
    "exclude_modules",
    "target_parameters",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "bias",
    "init_lora_weights",
    "fan_in_fan_out",
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
}
_OTHER_WAYS = {
    "modules_to_save": "call adapters.modules_to_save.apply_modules_to_save after it",
    "trainable_token_indices": "train all embeddings, with adapters.modules_to_save",
}


def _check_options(config: LoraConfig, but: Iterable[str] = ()):
    """Refuse what PEFT's own layers would compute and these would silently leave out.

    `but` names options that PEFT follows by itself, beside the layers.
    """
    for f in fields(config):
        given = getattr(config, f.name)
        if f.name in (*_FOLLOWED, *but) or not given or given == default_of(f):
            continue
        raise ValueError(
            f"LoraConfig.{f.name} = {given!r} is not computed here; "
            f"{_OTHER_WAYS.get(f.name, 'leave it out')}"
        )


def _check_suits(model: nn.Module, config: LoraConfig):
    """Refuse options that this model gives no meaning."""
    if config.fan_in_fan_out and not holds_transposed(model):
        raise ValueError(
            "LoraConfig.fan_in_fan_out = True is for weights that lie transposed, and this "
            "model has none; leave it out"
        )
    if next(model.parameters()).is_meta and config.init_lora_weights is not True:
        raise ValueError(
            f"LoraConfig.init_lora_weights = {config.init_lora_weights!r}: on the meta "
            "device there are no weights to begin from, and init_adapters gives PEFT's "
            "default; leave it out, or load the model first"
        )


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that take gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def is_of_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's weight, as PEFT calls them."""
    return any(part.startswith("lora_") for part in name.split("."))


def adapter_counts(model: nn.Module) -> dict[str, int]:
    """How many layers of each name are adapted, as printed at the start."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            key = name.rsplit(".", 1)[-1]
            counts[key] = counts.get(key, 0) + 1
    return counts
