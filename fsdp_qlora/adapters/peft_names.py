"""The names that PEFT saves trained parameters under."""

from __future__ import annotations

import torch
from peft import get_peft_model_state_dict
from torch import Tensor, nn

from ..experts import names_of_wrappers


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
    return {renamed(key): t for key, t in adapters.items()} | whole


def saved_names(model: nn.Module) -> dict[str, str]:
    """For each trained parameter of a model with adapters the name that PEFT saves it under."""
    marks = {name: torch.empty(0) for name, p in model.named_parameters() if p.requires_grad}
    key_of = {id(mark): key for key, mark in peft_names(model, marks).items()}
    return {name: key_of[id(mark)] for name, mark in marks.items()}


def saved_name(name: str) -> str:
    """A trained parameter's name in an adapter folder."""
    if "lora_magnitude_vector" in name:
        return name.removesuffix(".default.weight")
    return name.replace(".default.", ".")
