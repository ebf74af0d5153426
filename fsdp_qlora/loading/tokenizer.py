"""A model's tokenizer, the tokens that it gains, and the vocabulary's rows that stand for them.

A new token begins as the mean of all others, at both ends, as transformers' `resize_token_embeddings`
has it but for noise of 1e-9 of their variance. A vocabulary that has rows to spare keeps its size.
https://nlp.stanford.edu/~johnhew/vocab-expansion.html

Shapes: V rows of the vocabulary in the files, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from ..hub import asked_hub
from .model_folder import looks_local, not_at_hand, pinned, read_config
from .stream import expected_shapes
from .weight_files import Checkpoint, FileSpan, first_line


def load_tokenizer(
    model_name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    added_tokens: list[str] | tuple = (),
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name, with more tokens. ValueError names --model_name."""
    # A missing folder is said in the same words everywhere.
    read_config(model_name, revision, trust_remote_code)
    with asked_hub(not looks_local(model_name)) as unreachable:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                model_name, **pinned(revision, trust_remote_code)
            )
        except Exception as error:  # tokenizers' own are plain exceptions
            if unreachable:
                raise not_at_hand(model_name, unreachable) from error
            raise ValueError(
                f"--model_name {model_name}: no tokenizer there ({first_line(error)}); "
                "copy the tokenizer files of the model into it"
            ) from error
    known = len(tokenizer)
    tokenizer.add_tokens(list(added_tokens))
    if added_tokens and len(tokenizer) == known:
        raise ValueError(
            f"--added_tokens {','.join(added_tokens)}: the tokenizer of {model_name} has "
            "them all already; leave the flag out"
        )
    return tokenizer


def grow_vocabulary(settings: PretrainedConfig, tokenizer: PreTrainedTokenizerBase):
    """Let a model that is built from `settings` have a row for every token, in place."""
    text = settings.get_text_config()
    text.vocab_size = max(text.vocab_size, len(tokenizer))


@dataclass(frozen=True)
class _Grown:
    """A tensor (V, D) with more rows than its file has, which are the mean of those there."""

    stored: FileSpan
    total: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.total, *self.stored.shape[1:]

    @property
    def numbers(self) -> tuple[FileSpan, ...]:
        return (self.stored,)

    def spans(self, start: int, stop: int) -> list[FileSpan]:
        there = self.stored.shape[0]
        return [self.stored if stop > there else self.stored.rows(start, stop)]

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        (found,), there = tensors, self.stored.shape[0]
        if stop <= there:
            return found
        mean = found.mean(0, dtype=torch.float32).to(found.dtype)
        return torch.cat([found[start:there], mean.expand(stop - max(start, there), *mean.shape)])


def with_new_rows(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Let a checkpoint have the rows that a model's embedding and head have gained, in place."""
    ends = {id(end) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    names = [
        f"{name}.{leaf}"
        for name, m in model.named_modules()
        if id(m) in ends
        for leaf, _ in m.named_parameters(recurse=False)
    ]
    for name, shape in expected_shapes(model).items():
        stored = checkpoint.stored.get(name)
        if name in names and stored and stored.shape[0] < shape[0]:
            checkpoint.made[name] = _Grown(stored, shape[0])
    return checkpoint
