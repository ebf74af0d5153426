"""What a model answers as it learns: greedy answers to a few prompts, before, during and after training.

Every rank answers its share of the prompts, and all run as many forwards, root first, as for the
held-out loss: so it works on a sharded model, on all ranks together. No keys and values are kept, for
the model is built for training: each token runs the whole row again. Rows stand in a block of one
width, so that compiled blocks see one shape; what is not yet written is on the right, where causal
attention does not look.

Shapes: B prompts of a rank, T tokens of the longest prompt and answer, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..config import RunConfig
from ..data import Subset, TokenizedDataset, encode_prompt, on_device, stop_token_ids
from ..data.collate import IGNORE, collate
from ..data.packing import collate_packed
from ..dist import gather_over_ranks, ranks_from_env, sum_over_ranks
from ..redact import redact_all
from .evaluate import evaluating
from .metrics import SampleRecord

_WIDTH = 64  # rows are as wide as a multiple of it


@dataclass(frozen=True)
class _Prompt:
    """What is asked, and the answer that the data have for it."""

    ids: list[int]
    reference: list[int]


@torch.no_grad()
def _greedy_answers(
    model: nn.Module,
    prompts: Sequence[list[int]],
    device: torch.device,
    *,
    max_new_tokens: int,
    stops: Sequence[int],
    pad_token_id: int = 0,
    packing: bool = False,
    positions: int | None = None,
    agree: Callable[..., list[int]] | None = None,
) -> list[list[int]]:
    """The most likely next tokens of each prompt until a token of `stops`, which is left out.

    Every rank must call it, with the same prompts. packing: as the model was built. positions: tokens of
    a row that the model takes, at which answers end too. agree: sums counts over ranks before each
    forward; may raise.
    """
    ranks = ranks_from_env()
    longest = max(map(len, prompts)) + max_new_tokens
    width = -(-longest // _WIDTH) * _WIDTH
    if positions:
        width = min(width, positions)
    mine = list(prompts[ranks.rank :: ranks.world_size])
    rows = torch.full(
        (max(1, len(mine)), width), pad_token_id
    )  # (B, T); a rank without one joins in
    ends = [len(ids) for ids in mine] or [1]
    for row, ids in zip(rows, mine, strict=False):
        row[: len(ids)] = torch.tensor(ids)
    starts, is_open = list(ends), [True] * len(mine) or [False]
    with evaluating(model):
        for _ in range(max_new_tokens):
            if not (agree or sum_over_ranks)(sum(is_open))[0]:
                break
            for i, token in enumerate(
                _next_tokens(model, rows, ends, device, pad_token_id, packing)
            ):
                if not is_open[i]:
                    continue
                is_open[i] = token not in stops
                if is_open[i]:
                    rows[i, ends[i]] = token
                ends[i] += is_open[i]
                is_open[i] &= ends[i] < width
    found = [row[start:end].tolist() for row, start, end in zip(rows, starts, ends, strict=True)]
    by_rank = gather_over_ranks(found)
    return [by_rank[i % ranks.world_size][i // ranks.world_size] for i in range(len(prompts))]


def _next_tokens(
    model: nn.Module,
    rows: Tensor,
    ends: list[int],
    device: torch.device,
    pad_token_id: int,
    packing: bool,
) -> list[int]:
    """The most likely token after the first `ends[i]` of each row (B, T)."""
    examples = [(row, torch.full_like(row, IGNORE)) for row in rows]
    batch = (
        collate_packed([[example] for example in examples], pad_token_id)
        if packing
        else collate(examples, pad_token_id)
    )
    batch.pop("labels")
    last = torch.tensor(ends, device=device) - 1
    logits = model(**on_device(batch, device), use_cache=False, logits_to_keep=last).logits
    each = torch.arange(len(rows), device=device)
    # (B, B, V): each row at every row's place; a model without logits_to_keep gives (B, T, V).
    at = last if logits.shape[1] == rows.shape[1] else each
    return logits[each, at].argmax(-1).tolist()


class Answerer:
    """Answers the same prompts whenever it is asked."""

    def __init__(
        self,
        prompts: list[_Prompt],
        tokenizer,
        device: torch.device,
        max_new_tokens: int,
        **batching,
    ):
        self.prompts, self.tokenizer, self.device = prompts, tokenizer, device
        self.max_new_tokens, self.batching = max_new_tokens, batching
        self.last_step = -1

    def run(
        self, model: nn.Module, step: int, agree: Callable[..., list[int]] | None = None
    ) -> SampleRecord:
        """The answers after `step` optimizer steps; every rank must call it."""
        started = time.perf_counter()
        answers = _greedy_answers(
            model,
            [p.ids for p in self.prompts],
            self.device,
            agree=agree,
            max_new_tokens=self.max_new_tokens,
            stops=stop_token_ids(self.tokenizer),
            **self.batching,
        )
        self.last_step = step
        texts = [
            dict(
                prompt=self.text(p.ids), answer=self.text(answer), reference=self.text(p.reference)
            )
            for p, answer in zip(self.prompts, answers, strict=True)
        ]
        return SampleRecord(step, redact_all(texts), time.perf_counter() - started)

    def text(self, ids: list[int]) -> str:
        """Tokens as people read them."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()


# ---- prompts -----------------------------------------------------------------------------------


def choose_prompts(
    config: RunConfig, tokenizer, held_out: TokenizedDataset | Subset | None
) -> list[_Prompt]:
    """The prompts of --sample_prompts, or of --samples held-out rows; none if neither is given.

    Raises ValueError naming the flag if there are none to take.
    """
    if config.sample_prompts:
        lines = _prompt_lines(config.sample_prompts)[: config.samples or None]
        return [
            _Prompt(encode_prompt([{"role": "user", "content": line}], tokenizer), [])
            for line in lines
        ]
    if not config.samples or held_out is None:
        return []
    found = []
    for row in range(len(held_out)):
        if (prompt := _prompt_of(*held_out[row])) is None:
            continue
        found.append(prompt)
        if len(found) == config.samples:
            return found
    if found:
        return found
    raise ValueError(
        f"--samples {config.samples}: no held-out row has a prompt before its first "
        "trained token; give --sample_prompts FILE"
    )


def _prompt_lines(path: str) -> list[str]:
    """The prompts in a text file, one a line. Raises ValueError naming --sample_prompts."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ValueError(
            f"--sample_prompts {path}: {reason}; give a text file with one prompt per line"
        ) from None
    if not any(lines):
        raise ValueError(f"--sample_prompts {path}: it is empty; write one prompt per line")
    return [line for line in lines if line]


def _prompt_of(ids: Tensor, labels: Tensor) -> _Prompt | None:
    """What stands before a row's first trained tokens, and these; None if nothing does."""
    trained = (labels != IGNORE).nonzero().flatten().tolist()
    if not trained or trained[0] < 2:
        return None
    first = trained[0]
    end = next((i for i in range(first, len(ids)) if labels[i] == IGNORE), len(ids))
    return _Prompt(ids[:first].tolist(), ids[first:end].tolist())
