"""A model before it has weights: its modules on the meta device, and room for this rank's shards."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from ..experts import apply_stacked_experts
from ..memory.pinned_memory import empty_on_host
from ..model.conv1d import apply_plain_linears
from ..model.delta_nets import apply_delta_rule
from ..model.on_meta import parameters_on_meta
from ..model.state_space_mixers import apply_state_space_scan
from ..model.wrappers import wrapper_around, wrapper_class
from ..sharding import refuse_to_train, watch_gradients
from .model_folder import pinned_code
from .weight_files import first_line, reason_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def meta_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    auto_class: Any = AutoModelForCausalLM,
) -> nn.Module:
    """The model with its parameters on the meta device and its buffers real.

    attn_implementation: None is transformers' choice for this model.

    Buffers such as rotary frequencies are in no checkpoint: they are computed here, once, and
    survive `materialize`. Of a model with a language model inside it is that one alone, which
    `wrapper_of` tells the names of the whole. Raises ValueError if the attention kernel is unknown or
    not installed, or the configuration makes no model.
    """
    if getattr(config, "quantization_config", None):  # that of the files, not of this model
        config = copy.deepcopy(config)
        del config.quantization_config
    wrapper = wrapper_around(config) if _is_wrapper(config, auto_class) else None

    def made(attention: str | None) -> nn.Module:
        how: dict = dict(dtype=dtype, attn_implementation=attention)
        if wrapper:
            return wrapper.language_model(**how)
        with parameters_on_meta():
            return auto_class.from_config(config, **how, **pinned_code(revision, trust_remote_code))

    try:
        model = made(attn_implementation)
    except Exception as error:  # a config.json may say anything
        if attn_implementation in (None, "eager") or not _is_made(made, "eager"):
            raise ValueError(
                f"--model_name {config._name_or_path}: no model that continues text can be "
                f"made of its config.json: {reason_of(error)}; look at that file, or give "
                "another model"
            ) from error
        other = "eager" if attn_implementation == "sdpa" else "sdpa"
        raise ValueError(
            f"--attn_implementation {attn_implementation}: {first_line(error)}; leave it "
            f"out, or use {other}"
        ) from error
    model.config.use_cache = False
    model.tie_weights()
    apply_stacked_experts(apply_plain_linears(model))
    apply_delta_rule(model)
    apply_state_space_scan(model)
    _keep_in_fp32(model)
    return model.train()


def _is_made(made: Callable[[str], nn.Module], attention: str) -> bool:
    """Whether a model can be made with this attention."""
    try:
        made(attention)
    except Exception:  # noqa: BLE001  a config.json may say anything
        return False
    return True


def _is_wrapper(config: PretrainedConfig, auto_class: Any) -> bool:
    """Whether a config.json has a language model inside. ValueError for a class that can't be made of it."""
    found = bool(wrapper_class(config))
    if found and auto_class is not AutoModelForCausalLM:
        raise ValueError(
            f"--model_name {config._name_or_path}: {config.model_type} has a language model "
            f"inside, beside parts for other than text, and no {auto_class.__name__} can be "
            "made of it here; give a model for text alone"
        )
    return found


def _keep_in_fp32(model: nn.Module):
    """Store in fp32 what the model's code says must be, such as some routers, in place."""
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if any(re.search(rf"(^|\.){re.escape(kept)}($|\.)", name) for kept in names):
            tensor.data = tensor.data.float()


def materialize(
    model: nn.Module,
    device: torch.device,
    parameter_device: torch.device | Callable[[nn.Parameter], torch.device],
) -> None:
    """Give meta parameters uninitialised storage, move buffers to `device`.

    `parameter_device` is a device, or a function that gives each parameter its own. What is on the
    host of a GPU is one region of page-locked memory; raises OSError if the system can't lock so much.
    """
    place = parameter_device if callable(parameter_device) else lambda _: parameter_device
    meta = [p for p in model.parameters() if p.is_meta]
    on_host = [p for p in meta if place(p).type == "cpu"]
    made = dict(zip(on_host, empty_on_host(on_host, pinned=device.type == "cuda"), strict=True))
    for p in meta:
        if p not in made:
            made[p] = torch.empty_like(p, device=place(p))
    made = {p: nn.Parameter(t, p.requires_grad) for p, t in made.items()}
    for module in model.modules():  # a shared parameter stays one
        for name, p in module._parameters.items():
            if p is not None and p in made:
                module._parameters[name] = made[p]
            elif p is not None:
                p.data = p.data.to(place(p))
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = b.to(device)
    refuse_to_train(meta)
    watch_gradients(model)
