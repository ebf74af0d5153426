"""Tiny models and rows, and the one-process references that sharded training must equal."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from fsdp_qlora.lora_init import initial_a

CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED_CONFIGS = {"phi3": Phi3Config}  # q, k, v in one layer: other names of targets
SEED, RANK, LR, CLIP = 7, 4, 1e-3, 1.0


def save_tiny(folder: str | Path, family: str = "llama", **settings) -> str:
    """A random 2-layer model in transformers' format; sizes are whole quantization blocks."""
    defaults = dict(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    config = (CONFIGS | FUSED_CONFIGS)[family](**defaults | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Norms and biases start at 1 and 0; move them so that a lost one is seen.
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
    model.save_pretrained(folder)
    return str(folder)


def tiny_rows(steps: int, rows_per_step: int, seed: int = 3) -> list[list[tuple[list, list]]]:
    """For each step, rows (input_ids, labels) of unequal length with untrained starts."""
    generator = torch.Generator().manual_seed(seed)

    def row():
        length = int(torch.randint(6, 20, (1,), generator=generator))
        prompt = int(torch.randint(1, length - 2, (1,), generator=generator))
        ids = torch.randint(0, 97, (length,), generator=generator).tolist()
        return ids, [-100] * prompt + ids[prompt:]

    return [[row() for _ in range(rows_per_step)] for _ in range(steps)]


def padded_batch(rows) -> dict[str, torch.Tensor]:
    """Rows as right-padded input_ids, attention_mask and labels (B, T)."""
    width = max(len(ids) for ids, _ in rows)
    pad = lambda xs, value: xs + [value] * (width - len(xs))  # noqa: E731
    return dict(
        input_ids=torch.tensor([pad(i, 0) for i, _ in rows]),
        attention_mask=torch.tensor([pad([1] * len(i), 0) for i, _ in rows]),
        labels=torch.tensor([pad(t, -100) for _, t in rows]),
    )


def reference_model(
    folder: str,
    train_type: str,
    dtype=torch.float32,
    targets=TARGETS,
    quantization: BitsAndBytesConfig | None = None,
):
    """The model as plain transformers, bitsandbytes and PEFT make it, in one process.

    train_type: that of the run, or "dora" for DoRA on plain weights.
    """
    if train_type in ("qlora", "bnb_dora") and quantization is None:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=quantization
    )
    if train_type == "full":
        return model.train()
    return with_lora(model, targets, use_dora="dora" in train_type)


def with_lora(model, targets, **more):
    """A model under PEFT whose adapters have the values that a run of SEED gives them."""
    model = get_peft_model(
        model,
        LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=8, target_modules=targets, **more),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_A." in name:
                p.copy_(initial_a(name, SEED, p.shape))
    return model.train()


def reference_run(
    model, steps, added=lambda batch: 0.0
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final trained weights of plain training on whole steps.

    added: what the loss of a step's rows is more than their cross-entropy.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), LR, weight_decay=0.1)
    losses, norms = [], []
    for rows in steps:
        batch = padded_batch(rows)
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        loss = loss / (batch["labels"][:, 1:] != -100).sum() + added(batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {n: p.detach().clone() for n, p in trained.items()}


def cut_rows(rank: int, parts: int):
    """`dist.local_rows` as rank `rank` of `parts` sees it: its rows, as `fully_shard` cuts them."""

    def rows(p: torch.Tensor):
        size = -(-p.shape[0] // parts)
        start, stop = min(rank * size, p.shape[0]), min((rank + 1) * size, p.shape[0])
        return p.data[start:stop], start, stop

    return rows
