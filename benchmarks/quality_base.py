"""A small base for quality.py, made on the spot where the demo's model can't be had.

    python benchmarks/quality_base.py .cache/base
    python benchmarks/quality.py --model_name .cache/base --results quality.jsonl

A Llama of 28 million weights, with a tokenizer of 8,192 tokens, learns the Python sources of the
installed torch and transformers packages: text that is wherever this project runs. The tasks of
quality.py, questions for SQL and the standard library, are new to it.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from fsdp_qlora.optim import build_optimizer, build_scheduler

PACKAGES = ("torch", "transformers")
VOCABULARY, LR = 8192, 1e-3
TOKENIZER_BYTES = 10_000_000  # of text that the tokenizer is made from
END = "<|endoftext|>"


def sources(most_bytes: int) -> list[str]:
    """Source files of the packages in a random order, up to so many bytes."""
    specs = [importlib.util.find_spec(name) for name in PACKAGES]
    files = sorted(f for spec in specs for f in Path(spec.origin).parent.rglob("*.py"))
    random.Random(0).shuffle(files)
    texts, size = [], 0
    for file in files:
        if size > most_bytes:
            break
        texts.append(file.read_text(errors="replace"))
        size += len(texts[-1])
    return texts


def made_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of the first texts."""
    some, size = [], 0
    for text in texts:
        if size > TOKENIZER_BYTES:
            break
        some.append(text)
        size += len(text)
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(some, vocab_size=VOCABULARY, special_tokens=[END], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token=END, pad_token=END)


def tokens_of(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """All texts one after the other, each with an end."""
    found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in found for token in [*ids, tokenizer.eos_token_id]])


def new_model(vocabulary: int, layers: int, width: int):
    """Random weights; widths of 512 and more are those that every format takes."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 128,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        ),
        dtype=torch.float32,
    )


def learn(
    model, tokens: torch.Tensor, steps: int, rows_per_step: int, length: int, device: torch.device
):
    """Train on random windows of the text, in bf16 products on a GPU."""
    model.to(device).train()
    optimizer = build_optimizer(model, "adamw", LR, 0.1)
    scheduler = build_scheduler(optimizer, "cosine", steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        starts = torch.randint(0, len(tokens) - length, (rows_per_step,), generator=generator)
        rows = torch.stack([tokens[s : s + length] for s in starts.tolist()]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step in (1, steps) or not step % 100:
            print(f"step {step}/{steps}  loss {loss.item():.4f}", flush=True)


def make_base(
    folder: Path,
    width: int,
    layers: int,
    steps: int,
    rows: int = 32,
    length: int = 512,
    megabytes: int = 50,
):
    """Write tokenizer and trained weights into a folder; rows and length are those of a step."""
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts = sources(megabytes * 10**6)
    tokenizer = made_tokenizer(texts)
    tokens = tokens_of(texts, tokenizer)
    print(
        f"{len(texts):,} files, {len(tokens):,} tokens, {time.perf_counter() - started:.0f} s",
        flush=True,
    )
    model = new_model(len(tokenizer), layers, width)
    learn(model, tokens, steps, rows, length, device)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} weights, {time.perf_counter() - started:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000, help="of 32 rows of 512 tokens")
    parser.add_argument("--hidden_size", type=int, default=512, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=50, help="of source text")
    options = parser.parse_args()
    make_base(
        options.folder,
        options.hidden_size,
        options.layers,
        options.steps,
        megabytes=options.megabytes,
    )


if __name__ == "__main__":
    main()
