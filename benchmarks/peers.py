"""Other ways to run the rows of `speed_rows.py`, measured beside ours on the same machine.

    python benchmarks/peers.py 8b_qlora 8b_lora --results benchmarks/results/peers_h100_2026-11-28.jsonl
    torchrun --nproc_per_node 2 benchmarks/peers.py 8b_qlora_full_shard --peers accelerate

    hf          transformers, PEFT and bitsandbytes, gradient checkpointing
    hf_liger    the same with Liger's kernels (pip install liger-kernel)
    accelerate  the same under accelerate's FSDP2 with the settings of TRL's fsdp2.yaml and SFTTrainer;
                the loop is the one here, since TRL itself needs a data set
    accelerate_liger    both

Weights are random and made on the device, so no checkpoint is needed; adapters are bfloat16, as TRL
keeps them on a quantized base. The optimizer is torch's fused AdamW, or bitsandbytes' AdamW8bit where
the row's is 8-bit.
"""

from __future__ import annotations

import argparse
import gc
import time
from importlib.metadata import PackageNotFoundError, version

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, init_empty_weights
from peft import LoraConfig, get_peft_model
from speed_rows import CASES, chosen, config_folder
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

from fsdp_qlora.bench.measure import (
    StepTimer,
    describe_run,
    random_batches,
    record_memory,
    record_time,
    synchronize,
)
from fsdp_qlora.bench.row import BenchRow, append_row
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import print_main, process_group, rank_device, ranks_from_env
from fsdp_qlora.observe.peak_memory import PeakMemory
from fsdp_qlora.run_plan import plan_run

PEERS = {
    "hf": ("transformers", "peft", "bitsandbytes"),
    "hf_liger": ("transformers", "peft", "bitsandbytes", "liger-kernel"),
    "accelerate": ("transformers", "peft", "bitsandbytes", "accelerate"),
    "accelerate_liger": ("transformers", "peft", "bitsandbytes", "accelerate", "liger-kernel"),
}


def base_model(config: RunConfig, device: torch.device) -> nn.Module:
    """The transformers model with random weights on `device`, 4-bit linears if the row's are."""
    settings = AutoConfig.from_pretrained(config.model_name)
    settings.use_cache = False
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            settings, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if config.quant != "none":
        form = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=config.quant,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=torch.bfloat16,
        )
        model = replace_with_bnb_linear(model, ["lm_head"], form)
        model.is_loaded_in_4bit = True  # PEFT asks
    for module in model.modules():
        fill(module, device)
    return model.to(device)


def fill(module: nn.Module, device: torch.device):
    """Give a module's own parameters random values on the device, quantized where they are to be."""
    from bitsandbytes.nn import Params4bit

    for name, p in list(module.named_parameters(recurse=False)):
        value = torch.empty(p.shape, dtype=torch.bfloat16, device=device)
        value = value.fill_(1) if value.dim() == 1 else value.normal_(0, 0.02)
        if isinstance(p, Params4bit):
            new = Params4bit(
                value,
                requires_grad=False,
                quant_type=p.quant_type,
                compress_statistics=p.compress_statistics,
                blocksize=p.blocksize,
                quant_storage=torch.bfloat16,
                module=module,
            ).to(device)
        else:
            new = nn.Parameter(value)
        setattr(module, name, new)


def peer_model(config: RunConfig, device: torch.device, liger: bool) -> nn.Module:
    """The model as its users train it: Liger's kernels, LoRA, gradient checkpointing."""
    model = base_model(config, device)
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    if config.adapter != "none":
        model = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                target_modules=config.target_modules,
            ),
        )
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.to(torch.bfloat16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    return model.train()


def peer_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    """What the row's optimizer is for these users."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(trained, lr=config.lr, weight_decay=config.wd)
    return torch.optim.AdamW(trained, config.lr, weight_decay=config.wd, fused=True)


def sharded_by_accelerate(model: nn.Module, optimizer, device: torch.device):
    """Model, optimizer and backward under accelerate's FSDP2, as TRL's fsdp2.yaml sets it."""
    block = type(
        next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer"))
    ).__name__
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, cpu=device.type == "cpu")
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def measure(row: BenchRow, peer: str, config: RunConfig, options, device: torch.device):
    """Build the peer, time its steps, and fill the row."""
    torch.manual_seed(config.seed)
    started = time.perf_counter()
    model = peer_model(config, device, liger="liger" in peer)
    optimizer, backward = peer_optimizer(model, config), lambda loss: loss.backward()
    if peer.startswith("accelerate"):
        model, optimizer, backward = sharded_by_accelerate(model, optimizer, device)
    synchronize(device)
    row.load_seconds = time.perf_counter() - started
    batches = [
        {name: t.to(device) for name, t in batch.items()}
        for batch in random_batches(config, row_vocabulary(config), row.gradient_accumulation_steps)
    ]
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            timer = StepTimer(device)
        for batch in batches:
            loss = model(**batch).loss / len(batches)
            backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            row.loss_first = len(batches) * loss.item()
        if step >= options.warmup:
            timer.step_done()
    row.loss_last = len(batches) * loss.item()
    record_time(row, timer.seconds())


def row_vocabulary(config: RunConfig) -> int:
    """Tokens that random rows are drawn from."""
    return AutoConfig.from_pretrained(config.model_name).vocab_size


def peer_row(name: str, peer: str, config: RunConfig, device: torch.device) -> BenchRow:
    """A row of `describe_run` with what is the peer's own."""
    layers = AutoConfig.from_pretrained(config.model_name).num_hidden_layers
    plan, ranks = plan_run(config, device), ranks_from_env().world_size
    row = describe_run(config, plan, f"{name} on {ranks}", layers, device)
    row.peer = f"{peer}: " + ", ".join(f"{p} {installed(p)}" for p in PEERS[peer])
    row.activation_policy, row.compile, row.attention_backend = "recompute_all", False, "sdpa"
    row.compute_dtype, row.activation_offload = "bf16", False
    if row.adapter_dtype:
        row.adapter_dtype = row.optimizer_state_dtype = "bf16"
    if not peer.startswith("accelerate"):
        row.sharding_strategy = "ddp"
    return row


def installed(package: str) -> str:
    """A package's version; unknown for files that were only unpacked."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def run_peer(name: str, peer: str, folder: str, options, **changes) -> BenchRow:
    """Measure one row under one peer; rank 0 prints and keeps it."""
    config = CASES[name].config(folder, **changes)
    device = rank_device(config.device)
    row = peer_row(name, peer, config, device)
    with process_group(device, config.timeout_minutes):
        try:
            with PeakMemory(device) as peaks:
                measure(row, peer, config, options, device)
            record_memory(row, device, peaks)
        except torch.OutOfMemoryError as error:
            row.status = "oom"
            print_main(str(error).splitlines()[0])
    speed = (
        ""
        if row.status != "ok"
        else (
            f": {row.seconds_per_step:.3f} s/step  {row.tokens_per_second_per_gpu:,.0f} tok/s per GPU  "
            f"peak {row.peak_allocated_gib or 0:.2f} GiB  loss {row.loss_first:.4f} -> {row.loss_last:.4f}"
        )
    )
    print_main(f"{row.name}, {row.peer}: {row.status}{speed}")
    if options.results and ranks_from_env().is_main:
        append_row(row, options.results)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="names or patterns of speed_rows.py")
    parser.add_argument(
        "--peers", default="hf,hf_liger", help="comma-separated: " + ", ".join(PEERS)
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--layers", type=int, help="cut the model, to see that a row runs")
    parser.add_argument("--results")
    options = parser.parse_args()
    names = [
        n
        for n in chosen(options.rows, ranks_from_env().world_size)
        if CASES[n].settings.get("compute_dtype") != "fp8"
    ]  # these peers have no fp8
    for name in names:
        for peer in options.peers.split(","):
            try:
                run_peer(name, peer, config_folder(CASES[name].model, options.layers), options)
            except Exception as error:  # the other peers are still wanted
                if ranks_from_env().world_size > 1:
                    raise
                print(f"{name}, {peer}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
