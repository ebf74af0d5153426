"""Refuse what a run can't do before any work is done: its device, folders, layout and rows.

Each rank checks alone, so every rank ends with the same line and none waits for another.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from ..catalog.families import positions_in
from ..config import RunConfig, block_policies
from ..data import reads_from
from ..dist import Ranks, resolve_shard_group_size
from ..experts import check_router_balance
from ..export import weights_folder
from ..memory.tiled_mlp import check_mlps
from ..model.blocks import base_model, decoder_blocks
from ..model.row_mixers import check_kernels
from ..model.sequence_parallel import check_sequence_parallel
from ..writable import check_folder
from .run_data import RunData


def check_device(config: RunConfig, device: torch.device):
    """Refuse a precision that the device does not have."""
    if config.product_dtype != "bf16" or device.type != "cuda":
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"--precision {config.precision}: {torch.cuda.get_device_name(device)} does not support "
            "bf16; use --precision fp16_autocast or fp32"
        )


def check_folders(config: RunConfig, size: int = 0):
    """Refuse folders that can't be written to, or not `size` bytes of weights, before any work."""
    check_folder("output_dir", weights_folder(config), size, "the result", given=config.output_dir)
    for flag in (
        "data_cache",
        "quantized_cache",
        *(["profiling_output"] if config.profile else []),
    ):
        if getattr(config, flag):
            check_folder(flag, getattr(config, flag))
    _check_apart(config)


def _check_apart(config: RunConfig):
    """Refuse an --output_dir whose files a later run, which resumes this one, would read as rows."""
    for flag, split in (
        ("dataset", config.dataset_split),
        ("eval_dataset", config.eval_split or "train"),
    ):
        data = getattr(config, flag)
        if data and reads_from(data, split, config.output_dir):
            raise ValueError(
                f"--output_dir {config.output_dir}: a run that resumes would read its files there as rows "
                f"of --{flag} {data}; give another folder"
            )


def check_layout(config: RunConfig, model: nn.Module, ranks: Ranks, device: torch.device):
    """Refuse what these blocks, or these ranks, can't be cut up by, what no router is there for, and blocks
    that the device's kernels compute wrongly.

    Before an earlier run makes room for this one; `build_model` would come too late.
    """
    if config.activation_budget_gib is None:
        block_policies(config.activation_policy, len(decoder_blocks(model)))
    check_kernels(model, device)
    check_mlps(model, config.mlp_tiles)
    check_sequence_parallel(model, config.sequence_parallel, ranks.world_size)
    if config.router_aux_loss_coef:
        check_router_balance(base_model(model), config.router_aux_loss_coef)
    if config.strategy.is_hybrid:
        resolve_shard_group_size(config.shard_group_size, ranks, config.sharding_strategy)


def check_rows(config: RunConfig, data: RunData, settings: PretrainedConfig):
    """Refuse rows longer than the model's positions, which it was never trained at, and tokens that it
    does not embed. settings: the model's, grown by what --added_tokens adds.
    """
    positions = positions_in(settings)
    found = [rows for rows in (data.rows, data.held_out) if rows is not None]
    longest = max(int(rows.lengths.max(initial=0)) for rows in found)
    if positions and longest > positions:
        raise ValueError(
            f"--context_length {config.context_length}: the data have rows of {longest} tokens, but "
            f"the model has {positions} positions; use --context_length {positions} to truncate "
            "longer rows"
        )
    for rows in found:
        rows.check_vocab_size(settings.get_text_config().vocab_size)
