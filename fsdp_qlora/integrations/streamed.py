"""A model that knows its files: adapted on the meta device, sharded, then filled by rows.

Other trainers make adapters by themselves and move models about; nothing of that needs memory here,
for no weight exists before each rank streams its own rows into its shards.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..dist import local_rows
from ..loading import load_weights, materialize, meta_model, read_config
from ..loading.key_mapping import match_names
from ..loading.model_folder import checkpoint_folder
from ..loading.prequantized import layers_to_quantize, open_weights, quantization_of
from ..loading.stream import check_complete, checkpoint_key, load_buffers
from ..loading.weight_files import Checkpoint
from ..lora_init import init_adapters
from ..model.blocks import base_model
from ..model.wrappers import wrapper_of
from ..quantization.quantize import quantize_linears
from ..sharding import OnHost, apply_sharding, is_sharded, make_mesh, parameter_device
from .peft import register_with_peft


def streamed_model(
    model_name: str,
    quant: str = "nf4",
    dtype: torch.dtype | None = None,
    auto_class: type = AutoModelForCausalLM,
    **settings,
) -> PreTrainedModel:
    """A model on the meta device that knows its files; a trainer of this module fills its shards.

    Linear layers are quantized to `quant`, or left as they are with "none". dtype: of all other
    weights; None is the checkpoint's. `settings` replace those of config.json (num_labels=1, say); a
    head that the files lack is freshly initialised. Adapters may be added, by plain PEFT too. Raises
    ValueError, as runs do, for files that are not those of config.json or of another format than `quant`.
    """
    register_with_peft()
    config = read_config(model_name)
    for name, value in settings.items():
        setattr(config, name, value)
    dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
    model = meta_model(config, dtype, auto_class=auto_class)
    if wrapper_of(model):
        raise ValueError(
            f"--model_name {model_name}: {config.model_type} has a language model inside, beside parts for "
            "other than text; other trainers would save it under other names: train it with "
            "`fsdp-qlora train`, or give a model for text alone"
        )
    model.config._name_or_path = model_name
    files = open_weights(checkpoint_folder(model_name), quantization_of(config), model_name)
    files = match_names(model, files)
    check_complete(model, files, but=_head_tensors(model))
    load_buffers(model, files)
    if quant != "none":
        names = layers_to_quantize(files, quant)
        quantize_linears(model, quant, skip=("lm_head", *_heads(model)), names=names)
    model.weight_files = files
    return model


def shard_and_load(
    model: nn.Module,
    device: torch.device,
    *,
    sharding_strategy: str = "full_shard",
    shard_group_size: int = -1,
    seed: int = 0,
    on_host: OnHost | None = None,
    **settings,
) -> nn.Module:
    """Shard a model in place, fill it if `streamed_model` made it, and return it; on every rank.

    New adapters have values that `seed` gives them, equal under every sharding. `settings` are
    `apply_sharding`'s. A model that exists is moved to `device` under ddp.
    """
    files, on_host = _files_of(model), on_host or OnHost()
    mesh = make_mesh(sharding_strategy, device, shard_group_size)
    apply_sharding(model, sharding_strategy, mesh, on_host=on_host, **settings)
    if files is None:
        return model if is_sharded(model) else model.to(device)
    materialize(model, device, parameter_device(model, device, on_host))
    load_weights(model, files, device, but=_head_tensors(model))
    _initialise_heads(model, seed)
    if hasattr(model, "peft_config"):
        init_adapters(model, seed, device)
    return model


def _files_of(model: nn.Module) -> Checkpoint | None:
    """What fills a model of `streamed_model`, also within a PeftModel; None for a model that exists."""
    if not any(p.is_meta for p in model.parameters()):
        return None
    files = getattr(base_model(model), "weight_files", None)
    if files is None:
        raise ValueError(
            "the model is on the meta device, and nothing says which files fill it; make it with "
            "streamed_model(NAME)"
        )
    return files


def _heads(model: nn.Module) -> list[str]:
    """Names of classification heads, which no language model's files have."""
    base = base_model(model)
    return [name for name in ("score", "classifier") if hasattr(base, name)]


def _head_tensors(model: nn.Module) -> set[str]:
    return {f"{name}.{leaf}" for name in _heads(model) for leaf in ("weight", "bias")}


def _initialise_heads(model: nn.Module, seed: int):
    """Normal values of the model's own spread, equal under every sharding; biases are 0."""
    spread = getattr(model.config, "initializer_range", 0.02)
    for name, parameter in model.named_parameters():
        key = checkpoint_key(name)
        if key.split(".")[0] not in _heads(model):
            continue
        generator = torch.Generator().manual_seed(seed)
        whole = torch.empty(parameter.shape).normal_(0, spread, generator=generator)
        local, start, stop = local_rows(parameter)
        with torch.no_grad():
            local.copy_(whole[start:stop] if name.endswith("weight") else 0 * whole[start:stop])
