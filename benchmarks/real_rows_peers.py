"""One run of `real_rows.py` through another trainer: the same tokens, adapters and bins.

    trl       TRL's SFTTrainer with best-fit packing, Liger's kernels and, where it is installed,
              FlashAttention 4 (pip install trl liger-kernel flash-attn-4)
    unsloth   Unsloth's SFTTrainer with its packing (pip install unsloth)

Both are QLoRA in NF4 with bfloat16 products and torch's fused AdamW. Rows come tokenised, with the
places that are trained, from `TokenizedDataset.save`. Steps go into metrics.jsonl as those of a run do;
seconds are the GPU's, and padding is not counted as tokens.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch.nn.attention import varlen

from fsdp_qlora.observe.device_timer import mark, seconds_between

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VERSIONED = (
    "trl",
    "unsloth",
    "liger-kernel",
    "flash-attn-4",
    "datasets",
    "accelerate",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "triton",
)


# ---- the peers ----------------------------------------------------------------------------------


def trl_trainer(options):
    """TRL's trainer around a transformers model, and its name."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from transformers.utils import is_flash_attn_4_available
    from trl import SFTConfig, SFTTrainer

    attention = "flash_attention_4" if is_flash_attn_4_available() else "sdpa"
    form = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(
        options.model_name,
        dtype=torch.bfloat16,
        quantization_config=form,
        attn_implementation=attention,
        device_map={"": 0} if torch.cuda.is_available() else "cpu",
    )
    model.config.use_cache = False
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=TARGETS,
    )
    trainer = SFTTrainer(
        model,
        SFTConfig(
            use_liger_kernel=torch.cuda.is_available(),
            gradient_checkpointing=options.gradient_checkpointing,
            **arguments(options),
        ),
        train_dataset=rows_of(options.tokens),
        peft_config=lora,
        processing_class=AutoTokenizer.from_pretrained(options.model_name),
    )
    return trainer, f"TRL {version('trl')} + Liger {installed('liger-kernel')}, {attention}"


def unsloth_trainer(options):
    """Unsloth's model in the trainer that it patches, and its name."""
    takes_grouped_heads(varlen)
    from unsloth import FastLanguageModel  # patches what is imported after it
    from trl import SFTConfig, SFTTrainer  # isort: skip

    model, tokenizer = FastLanguageModel.from_pretrained(
        options.model_name,
        max_seq_length=options.context_length,
        dtype=torch.bfloat16,
        load_in_4bit=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=TARGETS,
        bias="none",
        max_seq_length=options.context_length,
        use_gradient_checkpointing="unsloth" if options.gradient_checkpointing else False,
    )
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**arguments(options)),
        processing_class=tokenizer,
        train_dataset=rows_of(options.tokens),
    )
    return trainer, f"Unsloth {version('unsloth')}"


PEERS = {"trl": trl_trainer, "unsloth": unsloth_trainer}


def takes_grouped_heads(module):
    """Let torch 2.11's variable-length attention take the flag `enable_gqa`, which 2.12 adds.

    It takes grouped heads without it, and Unsloth takes slower ways where the flag is missing.
    """
    attend = module.varlen_attn
    parameters = inspect.signature(attend).parameters
    if "enable_gqa" in parameters:
        return

    def varlen_attn(*args, enable_gqa: bool = False, **more):
        return attend(*args, **more)

    flag = inspect.Parameter("enable_gqa", inspect.Parameter.KEYWORD_ONLY, default=False)
    varlen_attn.__signature__ = inspect.Signature([*parameters.values(), flag])
    module.varlen_attn = varlen_attn


def arguments(options) -> dict:
    """What both trainers are told."""
    return dict(
        output_dir=options.output_dir,
        max_length=options.context_length,
        packing=True,
        per_device_train_batch_size=options.batch_size,
        max_steps=options.max_steps,
        gradient_accumulation_steps=options.gradient_accumulation_steps,
        learning_rate=options.lr,
        optim="adamw_torch_fused",
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=42,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
    )


def rows_of(tokens: str):
    """Rows of a `TokenizedDataset` as these trainers take them: ids, and labels of trained places."""
    from datasets import Dataset

    saved = load_file(tokens)
    columns = dict(
        input_ids=saved["input_ids"], labels=np.where(saved["trained"], saved["input_ids"], -100)
    )
    return Dataset.from_dict(
        {
            name: [row.tolist() for row in np.split(values, saved["offsets"][1:-1])]
            for name, values in columns.items()
        }
    )


# ---- what is measured ---------------------------------------------------------------------------


class StepLog:
    """Writes the steps of a trainer: each when the next but one begins, so that nothing waits for it.

    Counts and losses stay on the device until then. Padding is told by its token, which no row holds.
    """

    def __init__(self, path: Path, device: torch.device, pad: int, micro_batches: int):
        self.file, self.device, self.pad, self.size = open(path, "w"), device, pad, micro_batches
        self.notes, self.ended, self.number = [], deque(), 0

    def watch(self, trainer):
        """Note each micro-batch of a trainer."""
        train = trainer.training_step

        def training_step(model, inputs, *more, **named):
            if len(self.notes) == self.size or not self.ended:
                self.begin()
            ids = inputs["input_ids"]
            own = (ids != self.pad).sum()
            self.notes.append((ids.numel(), own, train(model, inputs, *more, **named).detach()))
            return self.notes[-1][-1]

        trainer.training_step = training_step

    def begin(self):
        """A step begins, and the one before has ended."""
        self.ended.append((mark(self.device), self.notes))
        self.notes = []
        if len(self.ended) > 2:
            self.write_first()

    def end(self):
        """Write what is left of whole steps."""
        if len(self.notes) == self.size:
            self.begin()
        while len(self.ended) > 1:
            self.write_first()
        self.file.close()

    def write_first(self):
        """The first step that is not written: from its own mark to the next one's."""
        (began, _), (ended, notes) = self.ended.popleft(), self.ended[0]
        self.number += 1
        self.keep(
            kind="step",
            step=self.number,
            seconds=seconds_between(began, ended),
            tokens=sum(int(own) for _, own, _ in notes),
            padded_tokens=sum(count for count, _, _ in notes),
            loss=sum(float(loss) for *_, loss in notes),
            peak_allocated_gib=peak_gib(),
        )

    def keep(self, **record):
        """One line of the file."""
        print(json.dumps(record), file=self.file, flush=True)


def run(options):
    """Train, and write the steps."""
    folder, size = Path(options.output_dir), options.gradient_accumulation_steps
    folder.mkdir(parents=True, exist_ok=True)
    limit_memory(options.memory_gib)
    trainer, name = PEERS[options.peer](options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log = StepLog(folder / "metrics.jsonl", device, trainer.processing_class.pad_token_id, size)
    log.keep(
        kind="start",
        step=0,
        peer=name,
        accumulation=size,
        versions={package: installed(package) for package in VERSIONED},
    )
    log.watch(trainer)
    try:
        trainer.train()
    finally:
        log.end()


def limit_memory(gib: float):
    """Let torch take no more of a larger card."""
    if not torch.cuda.is_available():
        return
    whole = torch.cuda.get_device_properties(0).total_memory / 2**30
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib / whole))


def peak_gib() -> float:
    """The most that torch had allocated."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def installed(package: str) -> str | None:
    """A package's version; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    for name in ("model_name", "tokens", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    for name, value in dict(
        batch_size=1,
        gradient_accumulation_steps=1,
        context_length=4096,
        max_steps=20,
        lora_rank=64,
        lora_alpha=16,
    ).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in dict(lora_dropout=0.0, lr=1e-4, memory_gib=80.0).items():
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--gradient_checkpointing", type=lambda v: v == "true", default=True)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
