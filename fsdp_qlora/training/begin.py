"""The record of a run's start: settings, machine, data and prediction, for its report."""
from __future__ import annotations

import torch
from torch import nn

from ..adapters import trainable_parameters
from ..config import BatchPlan, RunConfig
from ..data import Source, Subset, TokenizedDataset
from ..dist import ranks_from_env
from ..observe.metrics import StartRecord
from ..observe.pace import dollars_per_hour, predicted
from ..observe.runlog import now


def start_record(config: RunConfig, record: dict, run_id: str, model: nn.Module, batches: BatchPlan,
                 data: dict, device: torch.device, **about) -> StartRecord:
    """All that is known before the next step; `record` is what is kept beside the weights.

    about: step, total_steps and load_seconds.
    """
    return StartRecord(
        time=now(), run_id=run_id, settings=record, ranks=ranks_from_env().world_size,
        rows_per_step=batches.rows_per_step, micro_batch=batches.micro_batch_size,
        accumulation=batches.accumulation,
        trained_weights=sum(p.numel() for p in trainable_parameters(model).values()), data=data,
        estimate=predicted(config, model, device),
        dollars_per_hour=dollars_per_hour(config, device), **about)


def about_data(dataset: TokenizedDataset | Subset | Source,
               held_out: TokenizedDataset | Subset | None) -> dict:
    """The data report, unless it is of a stream, and how many rows are trained on and held out."""
    found = {} if held_out is None else dict(rows_held_out=len(held_out))
    if isinstance(dataset, Source): return found
    return found | dict(rows_trained=len(dataset), report=dataset.report.to_dict())
