"""`train --dry_run`: all that is known before the first step, for people; nothing is trained or written.

Settings as they are resolved, memory and time by the estimate (or the plan, where something is left
to it), the data report, and the first batch as text. Weights are not read; a model on the hub is
asked for its config and tokenizer alone.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from ..bench.auto import machine_here as planning_machine
from ..build import planned_model
from ..catalog.arch import ModelShape
from ..catalog.machine import Machine, MachineOptions, machine_from_options
from ..catalog.shapes import shape_from_config
from ..checkpoint import checkpoints_of
from ..checkpoint.content import content_of
from ..checkpoint.identity import with_batch_of
from ..checkpoint.resume import check_base_stays, chosen, resumable
from ..config import AUTO, RunConfig
from ..config.flags import given_settings
from ..config.recipe import as_recipe
from ..config.run import with_bins_of
from ..config.settings import changed_settings
from ..config.without_effect import batch_above_data, warnings_of
from ..data import RowLengths, StepLoader, choose_pad_token_id, preview, step_sampler
from ..data.collate import IGNORE
from ..dist import Ranks, launched, print_main, rank_device, ranks_from_env
from ..estimate import estimate, packing_line
from ..estimate import report as estimate_report
from ..lifecycle.launcher import world_size
from ..loading import read_config
from ..loading.prequantized import check_kind, quantization_of
from ..loading.tokenizer import grow_vocabulary
from ..observe.trackers import check_trackers
from ..plan_draft import draft_plan, with_learning_rate
from ..planner import free_settings, propose
from ..planner import report as plan_report
from ..preflight.checks import check_device, check_folders, check_layout, check_rows
from ..preflight.precision import precision_line
from ..preflight.run_data import RunData, load_data, run_tokenizer
from ..preflight.sampled_lengths import lengths_of
from ..training.describe import bins_line, fill_line, rate_line, steps_line, warn_of_warmup
from ..training.trainer import padded_widths

_SHOWN_ROWS = 2  # of the first batch, if --preview does not say


def dry_run(config: RunConfig, argv: list[str]):
    """Print what `train` with these arguments would do. Raises ValueError for what it would refuse."""
    device = rank_device(config.device)
    check_device(config, device)
    check_folders(config)
    check_trackers(config)
    folder = chosen(config, checkpoints_of(config.output_dir), keep=True)
    ranks = ranks_from_env().world_size if launched() else world_size(config)
    for warning in warnings_of(config):
        print_main(f"warning: {warning}")
    print_main(
        "all settings, as a recipe:"
        if config.verbose
        else "settings that differ from their default, as a recipe (--verbose: all):"
    )
    settings = asdict(config) if config.verbose else changed_settings(config)
    print_main(as_recipe(_as_typed(settings)) + "\n")
    model_settings = read_config(config.model_name, **config.source)
    check_kind(quantization_of(model_settings), config.model_name)
    if Path(config.model_name).is_dir():
        model, _ = planned_model(config, device)  # its files and target modules
        nodes = ranks_from_env().nodes
        check_layout(
            config, model, Ranks(world_size=ranks, local_world_size=ranks // nodes), device
        )
    data = load_data(
        replace(config, data_cache=None, preview=0), tokenizer := run_tokenizer(config)
    )
    if not config.is_auto:
        config = _resumed(config, data, tokenizer, folder, ranks)
    was_auto, accumulation = config.is_auto, config.gradient_accumulation_steps
    config = predict(config, argv, model_settings, device, ranks, lengths_of(config, data))
    config = replace(config, gradient_accumulation_steps=accumulation)  # of all rows, not a sample
    if was_auto:
        config = _resumed(config, data, tokenizer, folder, ranks)
    decided = with_bins_of(config, data.rows.mean_length, ranks)
    if config.new_tokens:
        grow_vocabulary(model_settings, tokenizer)
    check_rows(config, data, model_settings)
    if line := precision_line(config, device):
        print_main(line)
    if decided is not config:
        print_main(bins_line(decided, data.rows.mean_length, ranks))
    _show_batches(decided, data, tokenizer, model_settings.get_text_config(), ranks, device)
    print_main("dry run: nothing was trained or written")


def _resumed(
    config: RunConfig, data: RunData, tokenizer, folder: Path | None, ranks: int
) -> RunConfig:
    """The settings with the size of a step of the run that goes on from a checkpoint, and says so.

    Raises ValueError for a checkpoint of another run. The base of a hub name is not read, nor compared.
    """
    if not folder:
        check_base_stays(config)
        return config
    is_here = config.random_weights or Path(config.model_name).is_dir()
    content = content_of(config, data.train, data.held_out, tokenizer) if is_here else None
    found = resumable(config, data.train, content, folder, ranks)
    if not found.run:
        check_base_stays(config)
        print_main(
            f"the run in {config.output_dir} has ended: its files are moved, and it starts over"
        )
        return config
    print_main(f"resumes from {folder}: after step {found.step}")
    return with_batch_of(found.run, config, ranks)


def _as_typed(settings: dict) -> dict:
    """Settings with the word for what is left to the plan."""
    return {
        name: "auto" if name in ("batch_size", "activation_budget_gib") and value == AUTO else value
        for name, value in settings.items()
    }


def predict(
    config: RunConfig,
    argv: list[str],
    settings: PretrainedConfig,
    device: torch.device,
    ranks: int,
    rows: RowLengths,
) -> RunConfig:
    """Print the estimate, or the plan where settings are left to it; the settings then.

    A model that can be trained and not estimated is said.
    """
    try:
        shape = shape_from_config(settings.to_dict(), config.model_name)
        machine = planning_machine(config) if config.is_auto else machine_here(device, ranks)
        config, text = predicted(config, given_settings(argv), shape, machine, rows)
        print_main(f"\n{text}\n")
        return config
    except ValueError as error:
        print_main(f"\nno prediction: {error}\n")
        config_by_rows = replace(config, batch_size=max(1, config.batch_size))
        if line := packing_line(rows, config_by_rows, ranks, device.type == "cuda"):
            print_main(line)
        return replace(config, batch_size=1) if config.batch_size == AUTO else config


def predicted(
    config: RunConfig, given: set[str], shape: ModelShape, machine: Machine, rows: RowLengths
) -> tuple[RunConfig, str]:
    """The settings after planning, and the answer as text."""
    free = free_settings(config, given, rows=rows)
    if not free:
        return config, estimate_report(estimate(shape, machine, config, rows), rows=rows)
    plan = propose(shape, machine, config, free, rows)
    return plan.choice.config if plan.choice else plan.config, plan_report(plan)


def machine_here(device: torch.device, ranks: int) -> Machine:
    """This machine, and others like it under torchrun. Raises ValueError without a known GPU."""
    if device.type != "cuda":
        raise ValueError(
            "no GPU here; `fsdp-qlora estimate` with the same settings and --gpu NAME predicts "
            "memory and time"
        )
    nodes = ranks_from_env().nodes if launched() else 1
    return machine_from_options(MachineOptions(gpus=ranks // nodes, nodes=nodes))


def _show_batches(
    config: RunConfig,
    data: RunData,
    tokenizer,
    model_settings: PretrainedConfig,
    ranks: int,
    device: torch.device,
):
    """Print how the data is cut into steps, and the first batch with its trained tokens marked."""
    plan = draft_plan(config, ranks, on_gpu=device.type == "cuda")
    plan = with_learning_rate(plan, model_settings.hidden_size)
    rows, batches = data.rows, plan.batch
    pad = choose_pad_token_id(tokenizer, model_settings.vocab_size)
    sampler = step_sampler(
        rows,
        batches.per_step,
        batches.unit,
        seed=config.seed,
        shuffle=data.stream is None,
        epochs=config.num_epochs,
        max_steps=config.max_steps,
    )
    loader = StepLoader(
        rows,
        sampler,
        0,
        ranks,
        batches.micro_batch_size,
        pad_token_id=pad,
        packing=config.packing,
        pad_to=padded_widths(config, plan),
    )
    steps = None if data.stream else sampler.total_steps
    print_main(rate_line(config, plan))
    print_main(steps_line(config, batches, steps, ranks))
    if config.packing and not data.stream:
        print_main(fill_line(config, loader, ranks))
    for warning in batch_above_data(batches, None if data.stream else len(rows)):
        print_main(f"warning: {warning}")
    warn_of_warmup(config, plan, steps)
    step = loader.step(0)
    batch = step.micro_batches[0]
    first = (
        "the first rows of the stream (a run shuffles them)" if data.stream else "the first batch"
    )
    print_main(
        f"{first} on rank 0, one of {len(step.micro_batches)} in its first step: "
        f"{' x '.join(map(str, batch['input_ids'].shape))} tokens with padding"
    )
    print_main(preview(_batch_rows(batch, pad), tokenizer, config.preview or _SHOWN_ROWS))


def _batch_rows(batch: dict, pad_token_id: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids, labels) of each row or bin of a batch, without the padding at its end."""
    found = []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        own = ((ids != pad_token_id) | (labels != IGNORE)).nonzero()
        end = int(own.max()) + 1 if len(own) else 0
        found.append((ids[:end], labels[:end]))
    return found
