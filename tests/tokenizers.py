"""A tiny chat tokenizer, so that train.py can run on a tiny model."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import save_tiny

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 256 + len(SPECIAL)


def save_tokenizer(folder) -> PreTrainedTokenizerFast:
    """A byte-level ChatML tokenizer of VOCAB_SIZE tokens, saved beside a model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return fast


def save_chat_model(folder, **settings) -> str:
    """A tiny random model with its tokenizer, as train.py takes it."""
    save_tiny(folder, **dict(vocab_size=VOCAB_SIZE) | settings)
    save_tokenizer(folder)
    return str(folder)
