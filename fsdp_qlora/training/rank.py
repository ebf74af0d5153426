"""What each rank of a run does: prepare without the others, then train with them.

All that can be found wrong is found before the ranks meet, so that none waits for one that has ended.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from ..build import planned_model
from ..config import RunConfig
from ..config.without_effect import warnings_of
from ..dist import print_main, process_group, rank_device, ranks_from_env
from ..estimate import packing_line
from ..export import trained_bytes
from ..lifecycle.lock import sole_run_in
from ..lifecycle.signals import StopSignals
from ..observe.startup import part_ended
from ..observe.trackers import check_trackers
from ..plan_draft import draft_plan
from ..preflight.checks import (
    check_device,
    check_folders,
    check_layout,
    check_rows,
)
from ..preflight.precision import precision_line
from ..preflight.run_data import RunData, load_data, run_tokenizer
from ..preflight.sampled_lengths import lengths_of
from .cuda_graphs import check_graphs
from .trainer import train


def train_rank(config: RunConfig, signals: StopSignals | None = None):
    """Check, tokenize and plan the model on this rank alone, then meet the others and train.

    signals: what may ask for a stop. Raises ValueError or OSError for a mistake, before any step.
    """
    part_ended("imports")
    check_trackers(config)
    device = rank_device(config.device)
    check_device(config, device)
    is_main = ranks_from_env().is_main
    if is_main:
        check_folders(config)
    for warning in warnings_of(config):
        print_main(f"warning: {warning}")
    tokenizer = run_tokenizer(config)
    data = load_data(config, tokenizer)
    part_ended("data")
    if is_main:
        _propose_packing(config, data, device)
    model, _ = planned_model(config, device)  # a wrong one is found before ranks wait
    check_layout(config, model, ranks_from_env(), device)
    check_graphs(config, draft_plan(config, ranks_from_env().world_size), model, device)
    check_rows(config, data, model.config)
    if line := precision_line(config, device):
        print_main(line)
    if is_main:
        check_folders(config, trained_bytes(model) * (1 + config.changes_base))
    part_ended("checks")
    with (
        sole_run_in(config.output_dir) if is_main else nullcontext(),
        process_group(device, config.timeout_minutes),
    ):
        train(config, data.train, device, tokenizer, data.held_out, signals, data.rows)


def _propose_packing(config: RunConfig, data: RunData, device: torch.device):
    """Print what --packing true would give, where much is lost without; of a stream by its first rows."""
    if not len(data.rows):  # a stream's first ones may all be dropped
        return
    rows, world_size = lengths_of(config, data), ranks_from_env().world_size
    if line := packing_line(rows, config, world_size, on_gpu=device.type == "cuda"):
        print(line)
