"""transformers' own Trainer on this engine: QLoRA of a causal model, sharded over the GPUs.

    torchrun --nproc_per_node 2 examples/hf_trainer.py MODEL ROWS.jsonl OUTPUT

ROWS.jsonl: objects with a "text". Each rank streams its own rows of the weights, in 4 bits.
"""

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, TrainingArguments

from fsdp_qlora.integrations.transformers import ShardedTrainer


def main(model: str, rows: str, output: str):
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = load_dataset("json", data_files=rows, split="train").map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=512),
        remove_columns=["text"],
    )
    trainer = ShardedTrainer(
        model,
        TrainingArguments(
            output,
            max_steps=4,
            learning_rate=2e-4,
            logging_steps=1,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        quant="nf4",
        sharding_strategy="full_shard",
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
