"""An accelerate loop on this engine: the model is sharded first, and prepare leaves it as it is.

torchrun --nproc_per_node 2 examples/accelerate_loop.py MODEL
"""

import sys

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model

import fsdp_qlora as fq
from fsdp_qlora.integrations.streamed import shard_and_load, streamed_model


def main(folder: str, *, steps: int = 4) -> list[float]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = get_peft_model(streamed_model(folder, "nf4"), lora)
    shard_and_load(model, accelerator.device, sharding_strategy="full_shard")
    optimizer = torch.optim.AdamW(fq.trainable_parameters(model).values(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    tokens = torch.randint(0, model.config.vocab_size, (2, 64), generator=generator)
    tokens, losses = tokens.to(accelerator.device), []
    for _ in range(2 * steps):
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print("losses", losses)
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
