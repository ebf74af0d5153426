"""Shapes, settings and tiny models that the tests of estimates share."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.adapters import apply_adapters, lora_config
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.known_models import known_config
from fsdp_qlora.catalog.shapes import model_shape, shape_from_config
from fsdp_qlora.experts import apply_stacked_experts
from fsdp_qlora.loading import materialize
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.model.blocks import decoder_blocks
from fsdp_qlora.plan import Plan
from fsdp_qlora.quantization.quantize import quantize_linears

LLAMA_8B, LLAMA_70B = model_shape("meta-llama/Llama-3.1-8B"), model_shape("llama-2-70b")
H100 = find_gpu("h100")
# What benchmarks/results has, unless a row says otherwise: 8B on one GPU, 8192 tokens a row.
PRODUCT = Plan().change(lora_dropout=0.0, compile=True, strategy="ddp", context_length=8192)
# The trial's runs, before this code existed (the design's table): bf16 adapters.
TRIAL = PRODUCT.change(strategy="full_shard", adapter_dtype="bf16", micro_batch_size=2)
TRIAL_HALF = dict(activation_policy="recompute_all:16,keep_all:16")

SMALL = Plan().change(micro_batch_size=2, context_length=64, lora_rank=8, lora_dropout=0.0)
TINY = dict(
    vocab_size=97,
    hidden_size=128,
    intermediate_size=448,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
)


def tiny(known: str, plan: Plan):
    """A small model of a known one's family, transformed as `plan` says, and its shape."""
    config = known_config(known) | TINY
    if "num_experts" in config:
        config |= dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192)
    if config["model_type"] == "phi3":
        config["head_dim"] = 16  # transformers ignores head_dim
    return built(AutoConfig.for_model(**config, pad_token_id=0, use_cache=False), plan)


def built(config, plan: Plan):
    """A random model of a configuration, transformed as `plan` says, and its shape."""
    model = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.bfloat16,
        attn_implementation=plan.model.attention,
    )
    shape = shape_from_config(config.to_dict())
    apply_stacked_experts(model)
    if plan.quantization.quant != "none":
        quantize_linears(model, plan.quantization.quant)
    if not plan.adapter.is_full:
        targets = (
            list(plan.adapter.targets)
            if isinstance(plan.adapter.targets, tuple)
            else plan.adapter.targets
        )
        model = apply_adapters(
            model,
            lora_config(
                rank=plan.adapter.lora_rank,
                dropout=plan.adapter.lora_dropout,
                target_modules=targets,
                target_parameters=list(plan.adapter.expert_targets) or None,
                bias=plan.adapter.bias,
                use_dora=plan.adapter.adapter == "dora",
                rank_pattern=dict(plan.adapter.rank_pattern),
            ),
        )
    materialize(model, torch.device("cpu"), torch.device("cpu"))  # PEFT left adapters on meta
    apply_activation_policy(model, plan.memory.policies(shape))
    if plan.loop.compile:
        for block in decoder_blocks(model):
            block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    return model.train(), shape
