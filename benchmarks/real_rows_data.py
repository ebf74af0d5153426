"""Rows of three kinds, made with a seed, and a tokenizer for them: what `real_rows.py` trains on.

    a   instructions of about 250 tokens, whose answers are two fifths of them
    b   chats of several turns, log-normal between 50 and 8,000 tokens
    c   documents, log-normal up to 32,000 tokens

Words are those of the demo's questions and answers, and so are the merges of the tokenizer; sizes are
what a real tokenizer and real rows would give, and the texts mean nothing. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

DEMO = Path(__file__).parents[1] / "fsdp_qlora/demo/text_to_sql_train.jsonl"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END, PAD, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = 2048
TURN = 5  # tokens of the template around a message
LONGEST_TURN = 400


@dataclass(frozen=True)
class Kind:
    """Rows of one kind: how long they are, and what a row of so many tokens is."""

    context_length: int  # of a bin, or the longest row
    lengths: Callable[[np.random.Generator, int], np.ndarray]
    row: Callable[[Writer, int], dict]


class Writer:
    """Writes text of a wanted number of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int):
        self.rng = np.random.default_rng(seed)
        words = sorted({word for text in demo_texts() for word in text.split()})
        ids = tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
        self.words, self.costs = np.array(words), np.array([len(i) for i in ids])

    def text(self, tokens: int) -> str:
        """Words of about so many tokens, at least one."""
        chosen = self.rng.integers(
            len(self.words), size=max(tokens, 1)
        )  # a word is at least a token
        count = np.searchsorted(self.costs[chosen].cumsum(), tokens, side="right")
        return " ".join(self.words[chosen[: max(count, 1)]])

    def turn(self, role: str, tokens: int) -> dict:
        """A message that is so long with what the template puts around it."""
        return dict(role=role, content=self.text(tokens - TURN))


def instruction(writer: Writer, tokens: int) -> dict:
    """A question and its answer."""
    answer = int(0.4 * tokens)
    return dict(messages=[writer.turn("user", tokens - answer), writer.turn("assistant", answer)])


def chat(writer: Writer, tokens: int) -> dict:
    """Questions, each with an answer that is twice as long."""
    pairs = -(-tokens // LONGEST_TURN)
    return dict(
        messages=[
            writer.turn(role, tokens * part // (3 * pairs))
            for _ in range(pairs)
            for role, part in (("user", 1), ("assistant", 2))
        ]
    )


def document(writer: Writer, tokens: int) -> dict:
    """Plain text, all of which is trained."""
    return dict(text=writer.text(tokens))


KINDS = {
    "a": Kind(4096, lambda rng, n: rng.normal(250, 70, n).clip(80, 600), instruction),
    "b": Kind(8192, lambda rng, n: rng.lognormal(np.log(630), 1.1, n).clip(50, 8000), chat),
    "c": Kind(32768, lambda rng, n: rng.lognormal(np.log(6000), 1.0, n).clip(500, 32000), document),
}


def demo_texts() -> Iterator[str]:
    """What is said in the demo's rows."""
    for line in DEMO.read_text().splitlines():
        for message in json.loads(line)["messages"]:
            yield message["content"]


def save_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer with a chat template, saved into a model's folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        demo_texts(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[END, PAD, START_OF_TURN, END_OF_TURN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        additional_special_tokens=[START_OF_TURN, END],
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return fast


def write_rows(
    name: str,
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    shrink: int = 1,
    seed: int = 42,
):
    """JSON lines of a kind, at least `tokens` in all; lengths are those of the kind over `shrink`."""
    kind, writer, left = KINDS[name], Writer(tokenizer, seed), tokens
    with open(path, "w") as file:
        while left > 0:
            for length in kind.lengths(writer.rng, 64).astype(int) // shrink:
                file.write(json.dumps(kind.row(writer, int(length))) + "\n")
                left -= length
