"""Which layers an adapter is for, and which all-linear leaves out.

The names are PEFT's, so that what is adapted here is what plain PEFT adapts when it loads the adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from peft import LoraConfig
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT_TARGETS
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from ..catalog.families import DEFAULT_TARGETS
from ..experts import stacked_weights
from ..model.blocks import base_model, has_experts, linear_layers, linear_names, output_head
from ..quantization.quantize import directly_read, without_gradients


def resolve_targets(model: nn.Module, targets) -> set[str] | list[str] | str | None:
    """Module names to adapt; "all-linear" is every linear layer but the head.

    Raises ValueError with the names that exist, if one is not found.
    """
    found = linear_names(model)
    taken = taken_for_experts(model, found)
    if targets == "all-linear":
        return found.keys() - taken
    if targets is None:
        targets = _default_targets(base_model(model).config.model_type, found)
    if targets is None or isinstance(targets, str):
        return targets
    if lost := sorted(taken_for_experts(model, targets)):
        raise ValueError(
            f"--lora_target_modules {','.join(lost)}: in {base_model(model).config.model_type}, PEFT "
            "takes this for the experts' weights; leave it out, or adapt the experts: "
            "--lora_target_parameters experts"
        )
    head = output_head(model)
    linears = linear_layers(model)
    known = set(found) | {name for name, m in model.named_modules() if m is head}
    missing = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in linears)]
    if missing:
        frozen = "; for its experts see --lora_target_parameters" if has_experts(model) else ""
        raise ValueError(
            f"--lora_target_modules {','.join(missing)}: no such linear layer; this "
            f"model has {', '.join(sorted(known))}{frozen}"
        )
    return targets


def taken_for_experts(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Names of layers that PEFT takes for the experts' weights, where older files had such layers.

    In some mixtures it reads `gate_proj` as `experts.gate_up_proj`, also where a dense MLP or a shared
    expert is called so: adapters of these would not load
    (https://github.com/huggingface/peft/pull/3083).
    """
    fused = ["gate_proj", "up_proj", "w1", "w3"]  # PEFT wants both of a pair, or refuses one
    asked = LoraConfig(target_modules=[*names, *fused])
    convert_peft_config_for_transformers(asked, model=base_model(model), conversions=None)
    return {*names} - set(asked.target_modules)


def left_out(model: nn.Module) -> dict[str, str]:
    """Names of linear layers that all-linear leaves out, each with the reason; the head is none of them."""
    found = linear_names(model)
    names = {m: name for name, m in model.named_modules()}

    def last_parts(layers: set[nn.Module]) -> list[str]:
        return sorted({names[m].rsplit(".", 1)[-1] for m in layers if m is not output_head(model)})

    return (
        dict.fromkeys(last_parts(without_gradients(model)), "the model runs it without gradients")
        | dict.fromkeys(last_parts(directly_read(model)), "the model's code reads its weight")
        | dict.fromkeys(
            sorted(taken_for_experts(model, found)), "PEFT takes its name for the experts'"
        )
    )


def _default_targets(family: str, found) -> list[str] | None:
    """Names for a family that PEFT has no choice for; None leaves the choice to PEFT.

    Raises ValueError, listing the candidates, if there is none here either.
    """
    if family in PEFT_TARGETS:
        return None
    if family in DEFAULT_TARGETS:
        return list(DEFAULT_TARGETS[family])
    raise ValueError(
        f"--lora_target_modules default: PEFT has no choice for {family}; give "
        f"all-linear or some of {', '.join(found)}"
    )


def but_experts(model: nn.Module, excluded: str | list[str] | None) -> str | list[str] | None:
    """PEFT's `exclude_modules` with stacked experts: a layer beside them may be called as they are."""
    names = [weight.removesuffix(".weight") for weight in stacked_weights(model)]
    if not names:
        return excluded
    if isinstance(excluded, str):
        return "|".join([f"({excluded})", *map(re.escape, names)])
    return [*(excluded or ()), *names]


def check_patterns(model: nn.Module, config: LoraConfig, experts: Iterable[str] = ()):
    """Refuse a rank or alpha for what is not adapted: PEFT only warns, or says nothing."""
    targets = config.target_modules
    if targets is None:
        targets = PEFT_TARGETS[base_model(model).config.model_type]
    if isinstance(targets, str):
        return
    adapted = [
        name
        for name in linear_layers(model)
        if any(name == t or name.endswith(f".{t}") for t in targets)
    ] + [*experts]
    for flag in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, flag):
            if any(re.fullmatch(rf"(.*\.)?({key})", name) for name in adapted):
                continue
            found = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in adapted))
            raise ValueError(
                f"--lora_{flag} {key}: no adapted layer of that name; there are {found}"
            )
