"""What the first machine of a run reads at the start and writes into a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from ..adapters import trainable_parameters
from ..catalog.arch import ModelShape
from ..checkpoint.tensors import optimizer_rows
from ..estimate.weights import all_trained, optimizer_bytes
from ..loading.stream import rank_pieces
from ..plan import Plan

_OF_ADAPTER = 2  # adapter_model.safetensors and adapter_config.json
_OF_RUN = 2  # manifest.json and run.json


@dataclass(frozen=True)
class Files:
    """Of one machine, the one with rank 0; bytes are those of tensors, and of all its ranks."""

    read_bytes: float  # of the base
    checkpoint_files: int
    checkpoint_bytes: float


def machine_files(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    value_bytes: int,
    zeros: Collection[str] = (),
) -> Files:
    """As the model is sharded and the optimizer has stepped; a value of the base has so many bytes.

    zeros: names of weights that are not in the base.
    """
    read = sum((piece.stop - piece.start) * piece.width for piece in rank_pieces(model, zeros))
    states = sum(rows.tensor.nbytes for rows in optimizer_rows(model, optimizer).values())
    whole = sum(p.numel() * p.element_size() for p in trainable_parameters(model).values())
    return _files(plan, read * value_bytes, states, whole)


def estimated_files(shape: ModelShape, plan: Plan, value_bytes: int) -> Files:
    """The closed form of `machine_files`; the outputs of Llama-Pro's new blocks begin as zeros."""
    ends = [[*part.values()][-1:] for part in (shape.attention_linears(), shape.mlp_linears())]
    zeros = shape.new_blocks * sum(out * wide for end in ends for out, wide in end)
    read = (shape.total_params() - zeros) * value_bytes / plan.sharding.shard_ranks
    return _files(plan, read, optimizer_bytes(shape, plan), all_trained(shape, plan, 1))


def _files(plan: Plan, read: float, states: float, whole: float) -> Files:
    """From one rank's read and optimizer states, and all trained weights.

    Of several copies of the weights, ranks of the first write the states.
    """
    gpus = plan.sharding.node_gpus
    writers = min(gpus, plan.sharding.shard_ranks)
    weights = writers if plan.adapter.is_full else _OF_ADAPTER
    share = min(1.0, gpus / plan.sharding.shard_ranks) if plan.adapter.is_full else 1.0
    return Files(gpus * read, gpus + weights + _OF_RUN, writers * states + share * whole)
