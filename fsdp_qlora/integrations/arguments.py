"""Arguments of other trainers that a sharded model cannot follow: one line for each, before weights are read.

A trainer would take most of them without a word, or fail amid its first step on one rank's error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from peft import PeftConfig
from torch import nn

from ..dist import from_main
from ..quantization.quantize import QuantLinear
from ..writable import fault_of

# Of transformers' names: those whose states are sharded as their weights are.
EIGHT_BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")  # ours, by bitsandbytes' names
_SHARDED = ("adamw_torch", "adamw_torch_fused", *EIGHT_BIT, "sgd", "adagrad", "rmsprop")
_OF_WHOLE_WEIGHTS = ("IA3", "OFT", "LOHA", "LOKR", "LN_TUNING", "FOURIERFT")  # methods of PEFT
_OF_CHECKPOINTING = {"use_reentrant"}  # the values are the same either way


class _Refused(NamedTuple):
    """An argument, why it can't be followed, what to do instead, and which values are meant."""

    name: str
    why: str
    remedy: str = "leave it out"
    values: Callable[[Any], Any] = bool


_SHARDS_BY_ITSELF = "this trainer shards the model by itself"
_CASTS = "it would cast packed weights and adapters for good"
_OF_ARGUMENTS = (
    _Refused("fsdp", _SHARDS_BY_ITSELF, "leave it out and give sharding_strategy"),
    _Refused("deepspeed", _SHARDS_BY_ITSELF, "leave it out and give sharding_strategy"),
    _Refused("parallelism_config", _SHARDS_BY_ITSELF, "leave it out and give sharding_strategy"),
    _Refused(
        "torch_compile", "each block is compiled by itself", "give compile=True to the trainer"
    ),
    _Refused(
        "use_liger_kernel",
        "its kernels take the place of layers that are sharded or adapted here",
        "leave it out; compile=True of the trainer fuses kernels",
    ),
    _Refused(
        "activation_offloading",
        "it would keep copies of gathered weights too",
        "leave it out and give use_activation_cpu_offload=True to the trainer",
    ),
    _Refused(
        "gradient_checkpointing_kwargs",
        "blocks are recomputed by this project's policies",
        "leave it out and give activation_policy and use_activation_cpu_offload to the trainer",
        lambda given: set(given or ()) - _OF_CHECKPOINTING,
    ),
    _Refused(
        "use_vllm",
        "vLLM can't be given weights that are sharded or in packed formats",
        "leave it out, and the model generates by itself",
    ),
    _Refused(
        "use_transformers_continuous_batching",
        "it has attention of its own, and casts all weights",
        "leave it out, and the model generates by itself",
    ),
    _Refused("bf16_full_eval", _CASTS, "leave it out and give bf16=True"),
    _Refused("fp16_full_eval", _CASTS, "leave it out and give bf16=True"),
)
_OF_STREAMED = (  # of a model whose weights are read by shards, later, and not by from_pretrained
    _Refused(
        "model_init_kwargs",
        "nothing of it would come to a model whose weights are streamed",
        "leave it out, or give the trainer streamed_model(NAME, quant, dtype)",
    ),
    _Refused(
        "precompute_ref_log_probs",
        "they would be computed before the weights are read",
        "leave it out: the reference is the model with its adapters off",
    ),
)
_OF_SHARDS = (
    _Refused(
        "sync_ref_model",
        "weights that are sharded can't be mixed into the reference's",
        'leave it out, or give sharding_strategy="ddp"',
    ),
    _Refused(
        "optim",
        "its states can't be sharded",
        f'use {", ".join(_SHARDED)}, or sharding_strategy="ddp"',
        lambda name: str(getattr(name, "value", name)) not in _SHARDED,
    ),
)


def check_given(given: dict[str, Any]):
    """Refuse a trainer's own parameters that would make another model than the one that is sharded."""
    if given.get("model_init") is not None:
        raise ValueError(
            "model_init: the model that it makes at the start of train() would not be sharded; give the "
            "trainer a model, and make one trainer for each try"
        )
    if given.get("quantization_config") is not None:
        raise ValueError(
            "quantization_config: weights are quantized as they are streamed; leave it out and give quant, "
            'such as quant="nf4"'
        )


def check_arguments(args, model: nn.Module, shards: bool):
    """Refuse what would wrap, cast or replace the model beside this engine, or would be ignored.

    shards: the model's weights will be split over ranks, if there are several. Raises ValueError on
    every rank.
    """
    if not dist.is_initialized():
        raise ValueError(
            "the trainer needs a process group, on one GPU too; start the script with torchrun "
            "--nproc_per_node and the number of GPUs"
        )
    if fault := from_main(lambda: fault_of(Path(args.output_dir))):
        raise ValueError(f"output_dir={args.output_dir!r}: {fault}; give another folder")
    streamed = any(p.is_meta for p in model.parameters())
    shards = shards and dist.get_world_size() > 1
    rows = (*_OF_ARGUMENTS, *_OF_STREAMED * streamed, *_OF_SHARDS * shards)
    for name, why, remedy, refuses in rows:
        if refuses(value := getattr(args, name, None)):
            raise ValueError(f"{name}={getattr(value, 'value', value)!r}: {why}; {remedy}")


def check_method(config: PeftConfig, model: str | Path | nn.Module):
    """Refuse a method of PEFT that would fail amid training, or at its save, on sharded or packed weights.

    model: a name stands for one whose weights are streamed.
    """
    kind = config.peft_type.value
    if kind == "LORA":
        return
    if kind not in _OF_WHOLE_WEIGHTS:
        raise ValueError(
            f"peft_config: {kind} is not computed here; give LoraConfig, or to a model of from_pretrained "
            f"one of {', '.join(_OF_WHOLE_WEIGHTS)}"
        )
    if not isinstance(model, nn.Module) or any(
        isinstance(m, QuantLinear) or any(p.is_meta for p in m.parameters(recurse=False))
        for m in model.modules()
    ):
        raise ValueError(
            f"peft_config: {kind} needs weights that exist and are not quantized; give the trainer a model "
            "of from_pretrained, or LoraConfig"
        )


def check_copied(model: nn.Module):
    """Refuse an adapter over a model without weights, where the trainer copies it as the reference."""
    if hasattr(model, "peft_config") and any(p.is_meta for p in model.parameters()):
        raise ValueError(
            "model: the trainer copies its adapter as the reference before weights are read; give the "
            "model's name and peft_config for a new adapter, or load the model by from_pretrained to train "
            "one further"
        )


def check_trained(model: nn.Module):
    """Refuse to train embeddings and norms alone, for whoever forgot the adapter of a quantized model."""
    packed = [m for m in model.modules() if isinstance(m, QuantLinear)]
    if packed and not hasattr(model, "peft_config"):
        raise ValueError(
            f"quant={packed[0].quant_type!r}: quantized layers are trained through an adapter, and there "
            'is none; give peft_config=LoraConfig(target_modules="all-linear"), or quant="none" to train '
            "all weights"
        )


def check_accelerator(accelerator):
    """Refuse what accelerate was asked for beside the arguments, by `accelerate launch` or its variables."""
    kind = accelerator.distributed_type.value
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"accelerate is configured for {kind}, and this trainer shards the model by itself; start the "
            "script with torchrun, or take it out of accelerate's configuration"
        )
    backend = accelerator.state.dynamo_plugin.backend.value
    if backend.lower() != "no":
        raise ValueError(
            f"accelerate is configured to compile with {backend}; take it out of its configuration and give "
            "compile=True to the trainer, which compiles blocks"
        )
