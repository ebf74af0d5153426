"""A run: found or begun, trained step by step, evaluated, checkpointed and saved."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..build import build_model
from ..catalog.families import positions_in
from ..checkpoint import (
    Boundary,
    CheckpointWriter,
    Found,
    RunState,
    check_same_on_every_rank,
    checkpoints_of,
    content_of,
    find_run,
    is_other,
    mark_finished,
    per_step,
    saved_adapter,
    settle,
)
from ..config import RunConfig
from ..config.run import with_bins_of
from ..config.settings import AUTO, parts_of
from ..data import (
    RowLengths,
    Source,
    StepLoader,
    StreamBinSampler,
    StreamLoader,
    StreamSampler,
    Subset,
    TokenizedDataset,
    choose_pad_token_id,
    row_lengths,
    step_sampler,
)
from ..data.collate import PadTo
from ..data.lengths import longest_row as longest_of
from ..data.loader import run_widths
from ..dist import from_main, gather_over_ranks, open_rank_store, print_main, ranks_from_env
from ..export import save_trained, weights_folder
from ..lifecycle.signals import StopSignals
from ..observe.evaluate import Evaluator
from ..observe.loss_plot import plot_loss
from ..observe.metrics import DataRecord, StartRecord, StepMetrics
from ..observe.runlog import RunLog
from ..observe.samples import Answerer, choose_prompts
from ..observe.sinks import Sink, terminal
from ..observe.startup import part_ended, startup_seconds
from ..observe.throughput import Pace
from ..observe.trackers import open_trackers
from ..optim import build_optimizer, build_scheduler
from ..plan import Plan
from ..redact import redact_all
from ..run_plan import plan_run
from .describe import (
    about_data,
    bins_line,
    compilations_line,
    describe,
    record_beside_weights,
    start_record,
)
from .loop import Training
from .loss_scaler import LossScaler
from .step import seed_everything


def train(
    config: RunConfig,
    dataset: TokenizedDataset | Subset | Source,
    device: torch.device,
    tokenizer: PreTrainedTokenizerBase,
    held_out: TokenizedDataset | Subset | None = None,
    signals: StopSignals | None = None,
    first_rows: TokenizedDataset | Subset | None = None,
) -> list[StepMetrics]:
    """Build the model, train it on tokenized rows or a stream, save what was trained.

    Needs the group of `process_group`. Resumes from a checkpoint as --resume says. `held_out` rows are
    evaluated on as --eval_every says; `signals` may ask for a stop. `first_rows` of a stream decide how
    many bins a step has, where no setting does. Returns the metrics of every step. Raises ValueError for a
    loss that is not a number and for another process group, OSError for a disk or memory fault,
    StopRequested when it was stopped and has saved.
    """
    open_rank_store()  # raises before the model is built
    content = content_of(config, dataset, held_out, tokenizer)
    check_same_on_every_rank(config, content)
    found = find_run(config, dataset, content)
    config = _with_bins(found.settings(config), first_rows if first_rows is not None else dataset)
    run_id = found.run["run_id"] if found.run else from_main(lambda: uuid.uuid4().hex)
    with open_trackers(config, run_id, found.step) as trackers:
        return _train_found(
            config, found, run_id, dataset, device, tokenizer, held_out, signals, trackers
        )


def _train_found(
    config: RunConfig,
    found: Found,
    run_id: str,
    dataset: TokenizedDataset | Subset | Source,
    device: torch.device,
    tokenizer,
    held_out: TokenizedDataset | Subset | None,
    signals: StopSignals | None,
    trackers: list[Sink],
) -> list[StepMetrics]:
    """`train` from where the run was found."""
    part_ended("meeting the other ranks")
    seed_everything(config.seed, ranks_from_env().rank, config.deterministic)
    started = time.perf_counter()
    longest = longest_row(config, dataset, held_out)
    plan = plan_run(replace(config, context_length=longest), device)
    model = built(config, plan, device, found)
    from_main(lambda: settle(found, config, model.weights_hash))
    found.content["weights"] = model.weights_hash
    loader = build_loader(config, plan, dataset, tokenizer, model, device)
    loaded, total_steps = time.perf_counter() - started, loader.sampler.total_steps
    part_ended("model")
    describe(model, config, plan, loader, loaded)
    state = _build_state(config, plan, model, loader, tokenizer, held_out, device)
    boundary = _restored(state, found) if found.folder else state.boundary(0)
    answerer = _build_answerer(config, tokenizer, held_out, model.config, device)
    record = record_beside_weights(config, found.content["data"], device)
    start = start_record(
        config,
        plan,
        record,
        run_id,
        model,
        about_data(dataset, held_out),
        device,
        _lengths(config, dataset),
        step=boundary.step,
        total_steps=total_steps,
        load_seconds=loaded,
        startup_seconds=startup_seconds(),
    )
    with _run_log(config, start, trackers, found) as log:
        log.record(start)
        writer = CheckpointWriter(
            checkpoints_of(config.output_dir),
            state,
            config,
            _facts_of(config, plan, found, run_id),
            found.disks,
            found.folder,
        )
        Training(
            config, plan, tokenizer, loader, state, boundary, log, writer, record, signals, answerer
        ).run()
        log.end_steps()
        if line := compilations_line([s for s in log.steps if s.step > boundary.step]):
            print_main(line)
        if isinstance(loader, StreamLoader):
            _report_on_stream(loader, log)
        finish(model, config, log, tokenizer, record)
    return log.steps


def _with_bins(config: RunConfig, dataset: TokenizedDataset | Subset | Source) -> RunConfig:
    """The settings with the bins of a step, where the lengths of the rows decide them; says so."""
    if isinstance(dataset, Source):
        return config
    mean_length, ranks = dataset.mean_length, ranks_from_env().world_size
    decided = with_bins_of(config, mean_length, ranks)
    if decided is not config:
        print_main(bins_line(decided, mean_length, ranks))
    return decided


def longest_row(
    config: RunConfig,
    dataset: TokenizedDataset | Subset | Source,
    held_out: TokenizedDataset | Subset | None,
) -> int:
    """Tokens that a row of a batch can have, which memory is planned for: --context_length at most.

    Bins are always of that many, and of a stream no more is known.
    """
    if config.packing or isinstance(dataset, Source):
        return config.context_length
    found = [rows.lengths for rows in (dataset, held_out) if rows is not None]
    return longest_of(found, config.context_length)


def _lengths(config: RunConfig, dataset: TokenizedDataset | Subset | Source) -> RowLengths | None:
    """Lengths of the rows that are trained on; those of a stream are not known."""
    if isinstance(dataset, Source):
        return None
    return row_lengths(dataset.lengths, config.context_length, len(dataset), config.seed)


def built(config: RunConfig, plan: Plan, device: torch.device, found: Found) -> nn.Module:
    """The model as it is before the first step; the base may depend on the adapter that was found."""
    if not found.folder or config.init_lora_weights == "default":
        return build_model(config, device, plan=plan)
    with found.disks.at_hand(found.folder):
        return build_model(config, device, saved_adapter(found.folder), plan)


def build_loader(
    config: RunConfig,
    plan: Plan,
    dataset: TokenizedDataset | Subset | Source,
    tokenizer,
    model: nn.Module,
    device: torch.device,
) -> StepLoader | StreamLoader:
    """This rank's batches of each step. Raises ValueError for a token beyond the vocabulary."""
    ranks, batches = ranks_from_env(), plan.batch
    vocab_size = model.config.vocab_size
    order = dict(seed=config.seed, epochs=config.num_epochs, max_steps=config.max_steps)
    share = *ranks.share_of_rows(batches.ranks_per_row), batches.micro_batch_size
    batching = dict(
        pad_token_id=choose_pad_token_id(tokenizer, vocab_size),
        packing=config.packing,
        pad_to_multiple_of=batches.ranks_per_row,
        pin_memory=device.type == "cuda",
        mark_tokens=bool(config.router_aux_loss_coef),
    )
    batching["pad_to"] = padded_widths(config, plan)
    if isinstance(dataset, Source):
        order["shuffle_buffer"] = config.shuffle_buffer
        sampler = (
            StreamSampler(dataset, batches.per_step, **order)
            if batches.unit == "row"
            else StreamBinSampler(dataset, config.context_length, batches.per_step, **order)
        )
        return StreamLoader(
            sampler,
            tokenizer,
            *share,
            context_length=config.context_length,
            train_on=config.train_on,
            vocab_size=vocab_size,
            gather=lambda value: gather_over_ranks(value)[:: batches.ranks_per_row],
            **batching,
        )
    dataset.check_vocab_size(vocab_size)
    sampler = step_sampler(dataset, batches.per_step, batches.unit, **order)
    return StepLoader(dataset, sampler, *share, **batching)


def padded_widths(config: RunConfig, plan: Plan) -> PadTo:
    """T of a run's batches."""
    return run_widths(config.context_length, plan.loop.compile, one=config.has_full_bins)


def _build_state(
    config: RunConfig,
    plan: Plan,
    model: nn.Module,
    loader: StepLoader | StreamLoader,
    tokenizer,
    held_out: TokenizedDataset | Subset | None,
    device: torch.device,
) -> RunState:
    """Optimizer, schedule and evaluator around a model, as they are at the beginning."""
    optimizer = build_optimizer(
        model, config.optimizer, plan.optimizer.lr, config.wd, config.loraplus_lr_ratio
    )
    scheduler = build_scheduler(
        optimizer,
        config.schedule,
        loader.sampler.total_steps or 0,
        config.warmup_share,
        None if config.lr_warmup_steps == AUTO else config.lr_warmup_steps,
    )
    evaluator = None
    if held_out is not None:
        held_out.check_vocab_size(model.config.vocab_size)
        evaluator = Evaluator(
            held_out,
            device,
            every=config.eval_every,
            patience=config.early_stopping_patience,
            packing=config.packing,
            batch_size=plan.batch.micro_batch_size,
            pad_to=padded_widths(config, plan),
            pad_token_id=choose_pad_token_id(tokenizer, model.config.vocab_size),
            ranks_per_row=plan.batch.ranks_per_row,
        )
    scaler = LossScaler(device) if config.scales_loss else None
    return RunState(model, optimizer, scheduler, loader.sampler, evaluator, device, scaler)


def _restored(state: RunState, found: Found) -> Boundary:
    """Bring back what was found, on every machine."""
    with found.disks.at_hand(found.folder):
        boundary = state.restore(found.folder)
    if state.evaluator and is_other("held_out", found.run["content"], found.content):
        print_main("the held-out rows have changed, so earlier losses do not count as the best")
        state.evaluator.best = state.evaluator.last = None
    return boundary


def _build_answerer(
    config: RunConfig,
    tokenizer,
    held_out: TokenizedDataset | Subset | None,
    settings: PretrainedConfig,
    device: torch.device,
) -> Answerer | None:
    """What answers the prompts of --samples and --sample_prompts."""
    prompts = choose_prompts(config, tokenizer, held_out)
    if not prompts:
        return None
    return Answerer(
        prompts,
        tokenizer,
        device,
        config.sample_tokens,
        packing=config.packing,
        positions=positions_in(settings),
        pad_token_id=choose_pad_token_id(tokenizer, settings.vocab_size),
    )


def _run_log(config: RunConfig, start: StartRecord, trackers: list[Sink], found: Found) -> RunLog:
    """Where the records of a run go."""
    shown = terminal(parts_of(config.log_to), start.total_steps, start.step)
    pace = Pace(start.total_steps, start.dollars_per_hour, found.metrics)
    return RunLog(
        config.output_dir,
        ranks_from_env().is_main,
        terminal=shown,
        trackers=trackers,
        every=config.log_every,
        pace=pace,
        earlier=found.metrics,
    )


def _facts_of(config: RunConfig, plan: Plan, found: Found, run_id: str) -> dict:
    """What run.json says beside the state; `run_id` stays the same for as long as a run is resumed."""
    return {
        "run_id": run_id,
        "config": redact_all(asdict(config)),
        "plan": asdict(plan),
        "content": found.content,
        "world_size": ranks_from_env().world_size,
    } | per_step(plan.batch)


def _report_on_stream(loader: StreamLoader, log: RunLog):
    """What happened to the rows of a stream is known when all have been read."""
    report = loader.full_report()
    print_main(report.format_report())
    log.record(DataRecord(log.last_step(), dict(report=report.to_dict())))


def finish(model: nn.Module, config: RunConfig, log: RunLog, tokenizer, record: dict):
    """Save what was trained and draw the loss. Raises ValueError, and saves nothing, after a NaN."""
    if log.steps and not (log.steps[-1].is_finite or log.steps[-1].overflowed):
        raise ValueError(
            f"the loss or gradient of step {log.steps[-1].step} is not finite, so nothing is saved; "
            f"lower --lr below {max(step.lr for step in log.steps):g}, or clip gradients"
        )
    if config.save_model:
        folder = save_trained(model, weights_folder(config), tokenizer, record)
        print_main(f"saved the {folder.name} in {folder}")
    if not ranks_from_env().is_main or not log.steps:
        return
    mark_finished(checkpoints_of(config.output_dir), log.steps[-1].step)
    print(f"loss: first step {log.steps[0].loss:.4f}, last step {log.steps[-1].loss:.4f}")
    for best in [e for e in log.evaluations if e.is_best][-1:]:
        print(
            f"held-out loss: lowest {best.eval_loss:.4f} after step {best.step}"
            + (f", saved in {weights_folder(config, '-best')}" if config.save_model else "")
        )
    picture = Path(config.output_dir) / "loss.png"
    try:
        if plot_loss(log.steps, picture, Path(config.model_name).name, log.evaluations):
            print(f"loss plot: {picture}")
    except OSError as error:
        print(f"warning: could not write the loss plot {picture}: {error.strerror or error}")
