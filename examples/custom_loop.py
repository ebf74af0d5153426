"""A training loop of your own on this project's pieces: QLoRA of any Llama, Mistral or Qwen model.

    torchrun --nproc_per_node 2 examples/custom_loop.py MODEL_FOLDER [STRATEGY]

Measured with Llama-3.1-8B on 2 H100s, full_shard, 2x2048 tokens a GPU: docs/performance.md.
"""

import sys

import torch

import fsdp_qlora as fq
from fsdp_qlora.choices import StrategyName


def main(folder: str, strategy: StrategyName = "full_shard", *, steps: int = 10):
    device = fq.rank_device("auto")
    with fq.process_group(device):
        # The model, step by step; fq.build_model(fq.RunConfig(model_name=folder), device) does all.
        model = fq.meta_model(fq.read_config(folder), torch.bfloat16)
        checkpoint = fq.Checkpoint(folder)
        fq.quantize_linears(model, "nf4")
        model = fq.apply_adapters(model, fq.lora_config(rank=16, alpha=32))
        fq.apply_activation_policy(model, "recompute_all")
        units = fq.apply_sharding(model, strategy, fq.make_mesh(strategy, device))
        fq.materialize(model, device, device)
        fq.load_weights(model, checkpoint, device)
        fq.init_adapters(model, seed=0)

        # Plain PyTorch from here on.
        optimizer = torch.optim.AdamW(fq.trainable_parameters(model).values(), lr=1e-3)
        rank = fq.ranks_from_env().rank
        tokens = torch.randint(
            0, model.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(rank)
        ).to(device)
        for step in range(steps):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"step {step + 1}  loss {loss.item():.4f}  ({len(units)} units)")
        fq.save_trained(model, "custom_loop_output")


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
