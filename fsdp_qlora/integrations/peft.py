"""`QuantLinear` for plain PEFT: get_peft_model, PeftModel.from_pretrained and "all-linear" know it.

PEFT asks a configuration, not a registry, which layer adapts a module of a type of its own
(`LoraConfig._register_custom_module`). Trainers such as TRL's make the adapters by themselves, so the
question is answered for every LoRA configuration that meets a quantized layer.
"""

from __future__ import annotations

from functools import cache, wraps

import torch
from peft import peft_model
from peft.tuners import tuners_utils
from peft.tuners.lora import LoraConfig, LoraModel
from torch import nn

from ..adapters import LoraLinear
from ..adapters.targets import resolve_targets
from ..quantization.quantize import QuantLinear


@cache
def register_with_peft() -> None:
    """Have plain PEFT adapt `QuantLinear` from now on, in this process. Once is enough.

    LoRA options that these layers don't compute raise ValueError when the adapter is made.
    """
    _wrap_new_module()
    _wrap_all_linear()
    _wrap_loading()


def _wrap_new_module():
    made = LoraModel._create_new_module

    @wraps(made)
    def create(lora_config: LoraConfig, adapter_name: str, target: nn.Module, **kwargs):
        if isinstance(target, QuantLinear) and not lora_config._custom_modules:
            lora_config._register_custom_module({QuantLinear: LoraLinear})
        return made(lora_config, adapter_name, target, **kwargs)

    LoraModel._create_new_module = staticmethod(create)


def _wrap_all_linear():
    included = tuners_utils._maybe_include_all_linear_layers

    @wraps(included)
    def include(peft_config, model: nn.Module):
        wanted = getattr(peft_config, "target_modules", None)
        if wanted == "all-linear" and any(isinstance(m, QuantLinear) for m in model.modules()):
            peft_config.target_modules = resolve_targets(model, wanted)
            return peft_config
        return included(peft_config, model)

    tuners_utils._maybe_include_all_linear_layers = include


def _wrap_loading():
    """Let an adapter that is loaded over a model without weights have its values; PEFT drops them there."""
    load = peft_model.set_peft_model_state_dict

    @wraps(load)
    def load_values(model: nn.Module, state: dict, adapter_name: str = "default", **kwargs):
        empty = {
            n: p for n, p in model.named_parameters() if p.is_meta and f".{adapter_name}." in n
        }
        for name, p in empty.items():
            _put(model, name, nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad))
        result = load(model, state, adapter_name, **kwargs)
        for name in empty.keys() & set(result.missing_keys):
            _put(model, name, empty[name])
        return result

    peft_model.set_peft_model_state_dict = load_values


def _put(model: nn.Module, name: str, parameter: nn.Parameter):
    """Put another parameter in the place of one."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)
