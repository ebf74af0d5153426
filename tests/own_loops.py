"""A user's own loop over random tokens, as tests of saved and resumed states run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def losses_of_steps(
    model, optimizer, numbers: Iterable[int], rank: int, backward: Callable, scheduler=None
) -> list[float]:
    """The losses of steps of these numbers, each of which has its own rows on each rank."""
    losses = []
    for number in numbers:
        generator = torch.Generator().manual_seed(100 * number + rank)
        tokens = torch.randint(0, 300, (2, 16), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        backward(loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
