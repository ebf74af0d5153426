"""What steps are measured on: random tokens, or the first steps of the run that is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn

from ..config import RunConfig, plan_batches
from ..config.run import with_bins_of
from ..data import RowLengths, Step, collate_packed
from ..dist import all_reduce, ranks_from_env
from ..plan import Plan
from ..preflight.run_data import RunData, read_data, run_tokenizer
from ..preflight.sampled_lengths import lengths_of
from ..training.trainer import build_loader, longest_row


def random_batches(config: RunConfig, vocab: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Full rows of random tokens, pinned; of its own on each rank (or group), the same in every step."""
    ranks = ranks_from_env()
    generator = torch.Generator().manual_seed(
        config.seed + ranks.share_of_rows(config.sequence_parallel)[0]
    )
    shape = (plan_batches(config, ranks.world_size).micro_batch_size, config.context_length)
    pinned = dict(pin_memory=torch.cuda.is_available())
    tokens = [torch.randint(0, vocab, shape, generator=generator, **pinned) for _ in range(count)]
    if config.packing:
        return [collate_packed([[(row, row)] for row in t], 0) for t in tokens]
    return [dict(input_ids=t, labels=t) for t in tokens]


@dataclass(frozen=True)
class RunRows:
    """The rows of a run, with its tokenizer, and the batches that it makes of them."""

    config: RunConfig
    tokenizer: object
    data: RunData

    @classmethod
    def read(cls, config: RunConfig) -> RunRows:
        """Read, tokenize and hold out as the run does. Raises its errors."""
        tokenizer = run_tokenizer(config)
        return cls(config, tokenizer, read_data(config, tokenizer))

    @cached_property
    def lengths(self) -> RowLengths | None:
        """For the estimates; None where a stream begins with rows that are all dropped."""
        return lengths_of(self.config, self.data) if len(self.data.rows) else None

    @property
    def planned(self) -> RunConfig:
        """The run's settings with its longest row, as the run itself plans with them."""
        longest = longest_row(self.config, self.data.train, self.data.held_out)
        config = with_bins_of(self.config, self.data.rows.mean_length, ranks_from_env().world_size)
        return replace(config, context_length=longest)

    def first_steps(
        self, plan: Plan, model: nn.Module, device: torch.device, count: int
    ) -> list[Step]:
        """What this rank computes in the run's first steps."""
        loader = build_loader(self.config, plan, self.data.train, self.tokenizer, model, device)
        return list(islice(loader, count))


def part_of(step: Step, at_most: int) -> Step:
    """At most so many micro-batches of a step, spread evenly over all: the longest come first."""
    count = len(step.micro_batches)
    taken = range(count)
    if at_most < count:
        taken = [int((i + 0.5) * count / at_most) for i in range(at_most)]
    return replace(
        step,
        micro_batches=[step.micro_batches[i] for i in taken],
        micro_batch_tokens=[step.micro_batch_tokens[i] for i in taken],
    )


def tokens_computed(steps: list[Step], ranks_per_row: int) -> float:
    """Tokens of steps, without padding; the mean of all ranks."""
    own = sum(sum(step.micro_batch_tokens) for step in steps)
    tokens = torch.tensor(float(own), dtype=torch.float64)
    all_reduce(tokens)
    return tokens.item() / dist.get_world_size() / ranks_per_row
