"""TRL's supervised fine-tuning on this engine: QLoRA, sharded over the GPUs.

    torchrun --nproc_per_node 2 examples/trl_sft.py MODEL ROWS.jsonl OUTPUT

ROWS.jsonl: objects with "prompt" and "completion", or "messages".
"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig

from fsdp_qlora.integrations.trl import SFTTrainer


def main(model: str, rows: str, output: str):
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            output,
            max_steps=4,
            learning_rate=2e-4,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            max_length=512,
        ),
        train_dataset=load_dataset("json", data_files=rows, split="train"),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        quant="nf4",
        sharding_strategy="full_shard",
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
