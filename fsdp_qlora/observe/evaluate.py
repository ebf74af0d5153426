"""The loss on rows that are not trained on.

It is the sum of the losses of all trained tokens over their number, each row once: the same for any
number of ranks and any batch size. The forward is the one that training runs, root first, so that
FSDP gathers what it needs and the loss is taken in chunks; every rank runs as many.

Shapes: B rows of a micro-batch, T tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..config import AUTO
from ..data import StepLoader, StepSampler, Subset, TokenizedDataset, on_device
from ..data.collate import PadTo
from ..dist import all_reduce, ranks_from_env, sum_over_ranks
from ..memory.chunked_cross_entropy import take_right_tokens
from ..sharding import kept_between_forwards
from .metrics import EvalMetrics

_MICRO_BATCHES_TOGETHER = 16  # rows of so many are sorted by length, which leaves little padding


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    dataset: TokenizedDataset | Subset,
    device: torch.device,
    *,
    batch_size: int = 1,
    pad_token_id: int = 0,
    packing: bool = False,
    pad_to: PadTo = None,
    ranks_per_row: int = 1,
    agree: Callable[[], object] | None = None,
) -> tuple[float, int]:
    """Loss per trained token of `dataset` in nats, over all ranks, and the number of these tokens.

    Where its rows have weights, it is the mean weighted by them.
    Every rank must call it, with the same dataset. batch_size: rows per rank and forward, or bins.
    packing: as the model was built. pad_to: as in `collate`. ranks_per_row: as
        the model was built (model/sequence_parallel.py). agree: called before each
        forward, on every rank; may raise.
    """
    total, tokens, weight = torch.zeros((), dtype=torch.float64, device=device), 0, 0.0
    take_right_tokens(model)  # those of training
    rank, shares = ranks_from_env().share_of_rows(ranks_per_row)
    sampler = StepSampler(
        len(dataset), batch_size * shares * _MICRO_BATCHES_TOGETHER, shuffle=False
    )
    loader = StepLoader(
        dataset,
        sampler,
        rank,
        shares,
        batch_size,
        pad_token_id=pad_token_id,
        packing=packing,
        pad_to=pad_to,
        pad_to_multiple_of=ranks_per_row,
        pin_memory=device.type == "cuda",
    )
    with evaluating(model):
        for step in loader:
            tokens += step.num_trained_tokens
            weight += step.num_trained_tokens * step.mean_weight
            for batch in step.micro_batches:
                if agree:
                    agree()
                batch = on_device(batch, device)
                loss = model(**batch, num_items_in_batch=1, use_cache=False).loss  # a sum
                total += loss * step.mean_weight
    all_reduce(total)
    return total.item() / (weight or 1), tokens


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off, as it was before at the end; gathered weights are freed, for no backward comes."""
    was_training = model.training
    model.eval()
    try:
        with kept_between_forwards(model):
            yield
    finally:
        model.train(was_training)


def perplexity(loss: float) -> float:
    """e to the loss per token; infinite where that is beyond a float."""
    return math.exp(loss) if loss < 700 else math.inf


class Evaluator:
    """Evaluates a model every so many steps, and knows the best loss so far.

    patience: evaluations without a lower loss that are too many; 0 is any number.
    batching: what `held_out_loss` takes.
    """

    def __init__(
        self,
        dataset: TokenizedDataset | Subset,
        device: torch.device,
        *,
        every: int = AUTO,
        patience: int = 0,
        **batching,
    ):
        self.dataset, self.device, self.every, self.batching = dataset, device, every, batching
        self.patience = patience
        self.best: EvalMetrics | None = None
        self.last: EvalMetrics | None = None

    def is_due(self, step: int, is_last: bool = False) -> bool:
        """Whether to evaluate after optimizer step `step`, from 1; at the end once in any case."""
        if is_last:
            return self.last is None or self.last.step != step
        return self.every != AUTO and step % self.every == 0

    def is_out_of_patience(self) -> bool:
        """Whether the last evaluations were no better than one before them; also after a resume."""
        if not (self.patience and self.last):
            return False
        best = self.best.step if self.best else 0  # of a loss that is no number there is none
        return self.last.step - best >= self.patience * self.every

    def run(
        self, model: nn.Module, step: int, agree: Callable[[], object] | None = None
    ) -> EvalMetrics:
        """Evaluate after `step`; every rank must call it. `agree` as in `held_out_loss`."""
        started = time.perf_counter()
        loss, tokens = held_out_loss(model, self.dataset, self.device, agree=agree, **self.batching)
        right = take_right_tokens(model)
        is_best = loss < (self.best.eval_loss if self.best else math.inf)  # NaN never is
        self.last = EvalMetrics(
            step, loss, perplexity(loss), tokens, is_best, time.perf_counter() - started
        )
        if right is not None:
            self.last.token_accuracy = sum_over_ranks(int(right))[0] / max(tokens, 1)
        if is_best:
            self.best = self.last
        return self.last
