"""The names that PEFT saves trained parameters under."""

from __future__ import annotations

from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from ..experts import names_of_wrappers
from ..model.blocks import base_model
from ..model.wrappers import wrapper_of

_PREFIX = "base_model.model."  # of PEFT's, before the model's own names


def peft_names(model: nn.Module, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of parameters, under the names that PEFT saves them with instead.

    Raises ValueError for a tensor of another adapter than the active one.
    """
    active = model.active_adapter
    adapters = get_peft_model_state_dict(model, named, active, save_embedding_layers=False)
    wrappers, named_already = names_of_wrappers(model), {id(t) for t in adapters.values()}

    def renamed(key: str) -> str:
        layer, of_lora, part = key.partition(".lora_")
        return wrappers.get(layer, layer) + of_lora + part

    whole = {name: t for name, t in named.items() if id(t) not in named_already}
    for name in whole:
        if ".lora_" in name or ".modules_to_save." in name:
            raise ValueError(
                f"{name} is trained, and is not part of the active adapter {active!r}; "
                "choose one with model.set_adapter(NAME) before training"
            )
    found = {renamed(key): t for key, t in adapters.items()} | whole
    return {name_in_whole(model, key): t for key, t in found.items()}


def name_in_whole(model: nn.Module, name: str) -> str:
    """A name in an adapter folder, as the wrapper of a language model has it; others stay."""
    wrapper = wrapper_of(model)
    if not wrapper:
        return name
    return _PREFIX + wrapper.outer(name.removeprefix(_PREFIX))


def config_in_whole(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """An adapter's configuration as it is saved, in place: for the wrapper that its language model was
    taken out of, if there is one.

    What is named there is in the language model alone: the towers have layers of the same names.
    """
    wrapper, causal = wrapper_of(model), base_model(model)
    if not isinstance(config, LoraConfig):  # another method of PEFT
        return config
    outer = wrapper.outer if wrapper else str
    adapted = {name for name, m in causal.named_modules() if isinstance(m, LoraLayer)}
    config.rank_pattern = _saved_pattern(config.rank_pattern, adapted, outer)
    config.alpha_pattern = _saved_pattern(config.alpha_pattern, adapted, outer)
    if not wrapper:
        return config
    if isinstance(config.target_modules, str) or config.exclude_modules:
        config.target_modules = adapted
    config.target_modules = {outer(name) for name in config.target_modules or ()}
    config.exclude_modules = wrapper.towers
    if config.target_parameters:
        config.target_parameters = [outer(name) for name in config.target_parameters]
    if ends := config.modules_to_save:
        config.modules_to_save = [
            outer(name)
            for name, m in causal.named_modules(remove_duplicate=False)
            if name.endswith(tuple(ends)) and any(True for _ in m.parameters())
        ]
    return config


def _saved_pattern(
    pattern: dict[str, float], adapted: set[str], outer: Callable[[str], str]
) -> dict[str, float]:
    """Ranks or alphas that mean the same in an adapter folder, whose file has their keys sorted.

    PEFT takes the first key that fits a layer. Where sorting, or the names in a wrapper, would make that
    another one, each layer is named.
    """
    found = {
        name: pattern[key] for name in adapted if (key := get_pattern_key(pattern, name)) in pattern
    }
    saved = {outer(key): value for key, value in sorted(pattern.items())}
    if all(saved.get(get_pattern_key(saved, outer(n))) == found.get(n) for n in adapted):
        return saved
    return {outer(name): value for name, value in sorted(found.items())}


def saved_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """What a folder of the active adapter holds: all that is trained, and the frozen rest of the adapter."""
    named, active = dict(model.named_parameters()), model.active_adapter
    marks = {name: torch.empty(0) for name in named}
    chosen = get_peft_model_state_dict(model, marks, active, save_embedding_layers=False)
    of_adapter = {id(mark) for mark in chosen.values()}
    ends = [f".{end}." for end in model.peft_config[active].modules_to_save or ()]

    def is_whole(name: str) -> bool:
        """Whether it is of `modules_to_save`, in no wrapper of PEFT: `chosen` has what wrappers train."""
        wrapped = ".original_module." in name or ".modules_to_save." in name
        return not wrapped and any(end in name for end in ends)

    return {
        name: p
        for name, p in named.items()
        if p.requires_grad or id(marks[name]) in of_adapter or is_whole(name)
    }


def saved_names(model: nn.Module) -> dict[str, str]:
    """For each parameter of `saved_parameters` the name that PEFT saves it under."""
    marks = {name: torch.empty(0) for name in saved_parameters(model)}
    key_of = {id(mark): key for key, mark in peft_names(model, marks).items()}
    return {name: key_of[id(mark)] for name, mark in marks.items()}


def saved_name(name: str) -> str:
    """A trained parameter's name in an adapter folder."""
    if "lora_magnitude_vector" in name:
        return name.removesuffix(".default.weight")
    return name.replace(".default.", ".")
