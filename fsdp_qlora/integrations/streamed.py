"""A model that knows its files: adapted on the meta device, sharded, then filled by rows.

Other trainers make adapters by themselves and move models about; nothing of that needs memory here,
for no weight exists before each rank streams its own rows into its shards.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ..adapters import keep_fp8_weights
from ..choices import FormatName, StrategyName, strategy_named
from ..dist import local_rows, rank_device
from ..loading import load_weights, materialize, meta_model, read_config
from ..loading.key_mapping import match_names
from ..loading.model_folder import checkpoint_folder
from ..loading.prequantized import layers_to_quantize, open_weights, quantization_of
from ..loading.stream import check_complete, checkpoint_key, load_buffers
from ..loading.tokenizer import with_new_rows
from ..loading.weight_files import Checkpoint
from ..lora_init import init_adapters
from ..model.blocks import base_model
from ..model.padding_free import apply_padding_free
from ..model.wrappers import wrapper_of
from ..quantization.formats import STORAGE_DTYPE
from ..quantization.quantize import QuantLinear, quantize_linears
from ..sharding import OnHost, apply_sharding, is_sharded, make_mesh, parameter_device
from .accelerate import register_with_accelerate
from .arguments import check_method
from .peft import register_with_peft


def streamed_model(
    model_name: str,
    quant: FormatName | Literal["none"] = "nf4",
    dtype: torch.dtype | None = None,
    auto_class: type = AutoModelForCausalLM,
    **settings: Any,
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
    model = cast(PreTrainedModel, meta_model(config, dtype, auto_class=auto_class))
    if wrapper_of(model):
        raise ValueError(
            f"--model_name {model_name}: {config.model_type} has a language model inside, beside parts for "
            "other than text; other trainers would save it under other names: train it with "
            "`fsdp-qlora train`, or give a model for text alone"
        )
    model.config._name_or_path = model_name
    model.weight_files = _matching_files(model, model_name)
    model.resize_token_embeddings = partial(_resized, model)
    if quant != "none":
        _quantize(model, model.weight_files, quant)
    return model


def load_quantized(
    model: nn.Module,
    folder: str | Path,
    quant: FormatName | Literal["none"] = "nf4",
    *,
    device: torch.device | None = None,
    seed: int = 0,
    on_host: OnHost | None = None,
) -> nn.Module:
    """Fill a model on the meta device from a checkpoint, each rank its own rows, and return it.

    folder: of safetensors, or a hub name. quant: the format of linear layers, or "none"; a model that is
    adapted, sharded or quantized already keeps its layers as they are. device: None is this rank's
    own. New adapters have values that `seed` gives them. on_host: as `apply_sharding` was given it.
    Raises ValueError for a model that has weights, and for files that are not the model's.
    """
    if not any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "load_quantized fills a model on the meta device, and this one has weights; make it with "
            "meta_model(config, dtype), or call quantize_linears(model)"
        )
    files = _matching_files(base_model(model), str(folder))
    if quant != "none" and not any(_is_decided(m) for m in model.modules()):
        _quantize(model, files, quant)
    return _fill(model, files, device or rank_device("auto"), on_host or OnHost(), seed)


def _resized(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Embedding:
    """transformers' call for weights that are read later: new rows are the mean of the others."""
    resize = type(model).resize_token_embeddings
    embedding = resize(model, new_num_tokens, pad_to_multiple_of, mean_resizing=False)
    with_new_rows(model, model.weight_files)
    check_complete(model, model.weight_files, but=_head_tensors(model))
    return embedding


def _is_decided(module: nn.Module) -> bool:
    return isinstance(module, (QuantLinear, BaseTunerLayer)) or is_sharded(module)


def _matching_files(model: PreTrainedModel, name: str) -> Checkpoint:
    """The files of a folder or hub name under the model's names; its buffers are filled from them."""
    files = open_weights(checkpoint_folder(name), quantization_of(read_config(name)), name)
    files = match_names(model, files)
    check_complete(model, files, but=_head_tensors(model))
    load_buffers(model, files)
    return files


def _quantize(model: nn.Module, files: Checkpoint, quant: str):
    """Make the layers that are quantized in the files, or all but heads, quantized ones."""
    names = layers_to_quantize(files, quant)
    quantize_linears(model, quant, skip=("lm_head", *_heads(model)), names=names)


def shard_and_load(
    model: nn.Module,
    device: torch.device,
    *,
    sharding_strategy: StrategyName = "full_shard",
    shard_group_size: int = -1,
    seed: int = 0,
    on_host: OnHost | None = None,
    padding_free: bool = True,
    **settings: Any,
) -> nn.Module:
    """Shard a model in place, fill it if `streamed_model` made it, and return it; on every rank.

    New adapters have values that `seed` gives them, equal under every sharding. padding_free: compute
    rows that come with an attention_mask without their padding, where that is exact. `settings` are
    `apply_sharding`'s. A model that exists is moved to `device` under ddp.
    """
    for config in getattr(model, "peft_config", {}).values():
        check_method(config, model)
    _check_packed(model)
    _check_trained_rows(model, sharding_strategy)
    files, on_host = _files_of(model), on_host or OnHost()
    if padding_free:
        apply_padding_free(model, device)
    mesh = make_mesh(sharding_strategy, device, shard_group_size)
    apply_sharding(model, sharding_strategy, mesh, on_host=on_host, **settings)
    register_with_accelerate()
    _refuse_save_pretrained(model)
    if files is None:
        model = model if is_sharded(model) else model.to(device)
    else:
        _fill(model, files, device, on_host, seed)
    keep_fp8_weights(model, forms=False)
    return model


def _check_packed(model: nn.Module):
    """Refuse quantized layers whose bytes another program has converted, as if they were numbers."""
    for name, m in model.named_modules():
        if isinstance(m, QuantLinear) and m.weight.dtype != STORAGE_DTYPE:
            raise ValueError(
                f"{name}: packed {m.quant_type} values were converted to {m.weight.dtype}, as "
                "prepare_model_for_kbit_training, model.float() and model.to(dtype) do; leave these out: "
                "adapters are trained in fp32 and weights stay as they are stored"
            )


def _check_trained_rows(model: nn.Module, sharding_strategy: str):
    """Refuse PEFT's training of some tokens' rows, which picks them out of an embedding that is whole."""
    streamed = any(p.is_meta for p in model.parameters())
    shards = strategy_named(sharding_strategy).shards and dist.get_world_size() > 1
    trains_rows = any(isinstance(m, TrainableTokensLayer) for m in model.modules())
    if trains_rows and (streamed or shards):
        raise ValueError(
            "trainable_token_indices: PEFT copies these tokens' rows out of an embedding that is whole and "
            "has weights, and TRL sets them for tokens that chat_template_path adds; leave them out, give "
            'the trainer a model of from_pretrained and sharding_strategy="ddp", or train all weights '
            "without peft_config"
        )


def _refuse_save_pretrained(model: nn.Module):
    """transformers' and PEFT's own would write a rank's shards, or fail on them."""
    if any(isinstance(p, DTensor) for p in model.parameters()):
        for part in {model, base_model(model)}:
            part.save_pretrained = _say_what_saves


def _say_what_saves(*args: Any, **kwargs: Any):
    raise ValueError(
        "save_pretrained can't write a sharded model; call save_trained(model, folder) or "
        "save_adapter(model, folder) on every rank"
    )


def _fill(
    model: nn.Module, files: Checkpoint, device: torch.device, on_host: OnHost, seed: int
) -> nn.Module:
    """Give every parameter its memory and this rank's rows; adapters that have values keep them."""
    check_complete(model, files, but=_head_tensors(model))  # it may have been changed since
    parameters = dict(model.named_parameters())
    given = {n: local_rows(p.detach())[0].clone() for n, p in parameters.items() if not p.is_meta}
    materialize(model, device, parameter_device(model, device, on_host))
    load_weights(model, files, device, but=_head_tensors(model))
    _initialise_heads(model, seed)
    if hasattr(model, "peft_config"):
        init_adapters(model, seed, device, parameters.keys() - given.keys())
    with torch.no_grad():
        for name, rows in given.items():
            local_rows(model.get_parameter(name))[0].copy_(rows)
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
