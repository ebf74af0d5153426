"""A Lightning Fabric loop on this engine: QLoRA, sharded over the GPUs.

torchrun --nproc_per_node 2 examples/fabric.py MODEL
"""

import sys
from typing import Any

import torch
from lightning.fabric import Fabric
from peft import LoraConfig, get_peft_model

import fsdp_qlora as fq
from fsdp_qlora.integrations.fabric import ShardedStrategy
from fsdp_qlora.integrations.streamed import streamed_model


def main(folder: str, devices: int = 2, *, steps: int = 4) -> list[float]:
    fabric = Fabric(accelerator="auto", devices=devices, strategy=ShardedStrategy("full_shard"))
    fabric.launch()
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = fabric.setup_module(get_peft_model(streamed_model(folder, "nf4"), lora))
    weights = fq.trainable_parameters(model.module).values()
    # Any: Fabric's return type is an optimizer or a tuple of them.
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(weights, lr=1e-3))
    generator = torch.Generator().manual_seed(fabric.global_rank)
    tokens = torch.randint(0, model.config.vocab_size, (2, 64), generator=generator)
    tokens, losses = tokens.to(fabric.device), []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    fabric.print("losses", losses)
    return losses


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
