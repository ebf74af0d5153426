"""How docs/own_script.md uses the library, for a type checker: never run (tests/test_types.py)."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

import fsdp_qlora as fq
from fsdp_qlora.catalog.machine import MachineOptions, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.choices import FormatName, PolicyName, StrategyName


def own_loop(
    folder: str,
    batches: list[dict[str, torch.Tensor]],
    rows: fq.TokenizedDataset,
    quant: FormatName = "nf4",
    policy: PolicyName = "recompute_all",
    strategy: StrategyName = "full_shard",
) -> float:
    device = fq.rank_device("auto")
    with fq.process_group(device):
        model = fq.meta_model(fq.read_config(folder), torch.bfloat16)
        fq.quantize_linears(model, quant, absmax_dtype="int8")
        model = fq.apply_adapters(model, fq.lora_config(rank=16, alpha=32, use_dora=True))
        fq.apply_activation_policy(fq.apply_chunked_cross_entropy(model), policy)
        units: list[str] = fq.apply_sharding(
            model, strategy, fq.make_mesh(strategy, device), on_host=fq.OnHost()
        )
        fq.materialize(model, device, device)
        fq.load_weights(model, fq.Checkpoint(folder), device)
        fq.init_adapters(model, seed=0)
        optimizer = fq.build_optimizer(model, "adamw_8bit", lr=1e-4)
        schedule = fq.build_scheduler(optimizer, "cosine", total_steps=len(units))
        fq.set_gradient_sync(model, True)
        result = fq.train_step(model, optimizer, batches, max_grad_norm=1.0)
        schedule.step()
        loss, tokens = fq.held_out_loss(model, rows, device)
        weights = [fq.full_tensor(p) for p in fq.trainable_parameters(model).values()]
        local, start, stop = fq.local_rows(weights[0])
        fq.save_adapter(model, "adapter")
        fq.load_adapter(model, "adapter")
        fq.save_trained(model, Path("adapter"))
        return loss + tokens + result.loss + local.numel() + start + stop


def in_one_call(folder: str, rows: fq.TokenizedDataset, tokenizer: PreTrainedTokenizerBase) -> None:
    config = fq.RunConfig(model_name=folder, sharding_strategy="full_shard", lora_rank=8)
    batches = fq.plan_batches(config, fq.ranks_from_env().world_size)
    print(batches.accumulation, fq.STRATEGIES["ddp"].summary)
    metrics = fq.train(config, rows, fq.rank_device("cpu"), tokenizer)
    print(metrics[-1].loss)


def loaded_by_one_call(folder: str) -> torch.nn.Module:
    device = fq.rank_device("auto")
    model = fq.meta_model(fq.read_config(folder), torch.bfloat16)
    model = fq.load_quantized(model, folder, "hqq4", device=device)
    layers = [m for m in model.modules() if isinstance(m, fq.QuantLinear)]
    print(layers[0].in_features)
    streamed = fq.streamed_model(folder, "none", num_labels=1)
    fq.shard_and_load(streamed, device, sharding_strategy="ddp", wrap_policy="block")
    return fq.dequantize_linears(model)


def built(config: fq.RunConfig) -> torch.nn.Module:
    shape = model_shape("llama-3.1-8b")
    plan: fq.Plan = fq.resolve(config, shape, machine_from_options(MachineOptions()))
    return fq.build_model(config, fq.rank_device("auto"), plan=plan)


def afterwards(folder: Path) -> str:
    merged: Path = fq.merge_adapter(
        "base", folder, "merged", merge_base="dequantized", dtype="bf16"
    )
    fq.convert_adapter("weights.safetensors", "adapter", "base", lora_alpha=16)
    print(fq.check_adapter_folder(merged))
    return fq.push_folder(merged, "someone/name")
