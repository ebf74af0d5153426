"""A run: the model built, trained step by step, evaluated and saved."""
from __future__ import annotations

import math
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from .adapters import adapter_counts, trainable_parameters
from .build import attention, build_model
from .config import BatchPlan, RunConfig, plan_batches
from .data import (
    Source,
    StepLoader,
    StepSampler,
    StreamLoader,
    StreamSampler,
    Subset,
    TokenizedDataset,
    choose_pad_token_id,
)
from .dist import gather_over_ranks, print_main, ranks_from_env
from .evaluate import Evaluator
from .export import save_trained
from .metrics import RunLog, StepMetrics, plot_loss
from .optim import build_optimizer, build_scheduler
from .settings import AUTO
from .step import compute_device, seed_everything, train_step
from .steplog import LaggedLog


def train(config: RunConfig, dataset: TokenizedDataset | Subset | Source, device: torch.device,
          tokenizer, held_out: TokenizedDataset | Subset | None = None) -> list[StepMetrics]:
    """Build the model, train it on tokenized rows or a stream, save what was trained.

    Needs a process group. `held_out` rows are evaluated on as --eval_every says. Returns the metrics
    of every step.
    """
    ranks = ranks_from_env()
    batches = plan_batches(config, ranks.world_size)
    seed_everything(config.seed, ranks.rank, config.deterministic)
    started = time.perf_counter()
    model = build_model(config, device)
    pad_token_id = choose_pad_token_id(tokenizer, model.config.vocab_size)
    loader = build_loader(config, dataset, batches, tokenizer, model.config.vocab_size, device)
    if held_out is not None: held_out.check_vocab_size(model.config.vocab_size)
    evaluator = None if held_out is None else Evaluator(
        held_out, device, every=config.eval_every, batch_size=batches.micro_batch_size,
        pad_token_id=pad_token_id, packing=config.packing)
    total_steps = loader.sampler.total_steps
    describe(model, config, batches, total_steps, time.perf_counter() - started)
    optimizer = build_optimizer(model, config.optimizer, config.lr, config.wd)
    scheduler = build_scheduler(optimizer, config.lr_scheduler, total_steps or 0,
                                config.warmup_share,
                                None if config.lr_warmup_steps == AUTO else config.lr_warmup_steps)
    max_norm = config.grad_norm if config.apply_gradient_clipping else None
    with RunLog(config.output_dir, config.log_to, total_steps, ranks.is_main) as log:
        lagged = LaggedLog(log, device)
        for step in loader:
            lr = scheduler.get_last_lr()[0]
            result = train_step(model, optimizer, step.micro_batches, max_grad_norm=max_norm,
                                no_sync=config.no_sync)
            scheduler.step()
            lagged.add(step.index + 1, lr, result)
            if evaluator and evaluator.is_due(step.index + 1):
                lagged.flush()
                evaluate(evaluator, model, config, log, tokenizer)
                lagged.restart_clock()
        lagged.flush()
        if evaluator and log.steps and evaluator.is_due(log.steps[-1].step, is_last=True):
            evaluate(evaluator, model, config, log, tokenizer)
    if isinstance(loader, StreamLoader): print_main(loader.full_report().format_report())
    finish(model, config, log, tokenizer)
    return log.steps


def build_loader(config: RunConfig, dataset: TokenizedDataset | Subset | Source, batches: BatchPlan,
                 tokenizer, vocab_size: int, device: torch.device) -> StepLoader | StreamLoader:
    """This rank's batches of each step. Raises ValueError for a token beyond the vocabulary."""
    ranks = ranks_from_env()
    order = dict(seed=config.seed, epochs=config.num_epochs, max_steps=config.max_steps)
    share = ranks.rank, ranks.world_size, batches.micro_batch_size
    batching = dict(pad_token_id=choose_pad_token_id(tokenizer, vocab_size),
                    packing=config.packing, pin_memory=device.type == "cuda")
    if isinstance(dataset, Source):
        sampler = StreamSampler(dataset, batches.rows_per_step, **order,
                                shuffle_buffer=config.shuffle_buffer)
        return StreamLoader(sampler, tokenizer, *share, context_length=config.context_length,
                            train_on=config.train_on, vocab_size=vocab_size,
                            gather=gather_over_ranks, **batching)
    dataset.check_vocab_size(vocab_size)
    return StepLoader(dataset, StepSampler(len(dataset), batches.rows_per_step, **order), *share,
                      **batching)


def evaluate(evaluator: Evaluator, model: nn.Module, config: RunConfig, log: RunLog, tokenizer):
    """Loss on held-out rows; the weights with the lowest so far are kept beside the last ones."""
    metrics = evaluator.run(model, log.steps[-1].step)
    log.log_evaluation(metrics)
    if metrics.is_best and config.save_model:
        save_trained(model, weights_folder(config, "-best"), tokenizer, asdict(config))


def weights_folder(config: RunConfig, suffix: str = "") -> Path:
    """Where trained weights go: adapter or model, and the suffix."""
    kind = "model" if config.adapter == "none" else "adapter"
    return Path(config.output_dir) / f"{kind}{suffix}"


def describe(model: nn.Module, config: RunConfig, batches: BatchPlan, total_steps: int | None,
             seconds: float):
    """Print every derived value once."""
    trained = sum(p.numel() for p in trainable_parameters(model).values())
    counts = adapter_counts(model)
    if counts: print_main("adapted layers: " + ", ".join(f"{k} x{n}" for k, n in counts.items()))
    print_main(f"trained weights: {trained:,}; model ready in {seconds:.1f} s")
    print_main(dtypes_line(model, config))
    implementation, reason = attention(config, model.config, compute_device(model))
    print_main(f"attention: {implementation} ({reason})")
    unit = "bins" if config.packing else "rows"
    steps = "steps until the stream ends" if total_steps is None else f"{total_steps} steps"
    print_main(f"{steps}, of {batches.rows_per_step} rows: micro-batch "
               f"{batches.micro_batch_size} {unit} x accumulation {batches.accumulation} x "
               f"{ranks_from_env().world_size} ranks")
    if config.verbose: print_main(model)


def dtypes_line(model: nn.Module, config: RunConfig) -> str:
    """Which dtypes weights are stored, multiplied and trained in."""
    stored = {trained: ", ".join(sorted({str(p.dtype).removeprefix("torch.")
                                         for p in model.parameters() if p.requires_grad == trained}))
              for trained in (True, False)}
    packed = f" ({config.quant} bytes in bfloat16)" if config.quant != "none" else ""
    products = config.precision if config.compute_dtype == "auto" else config.compute_dtype
    frozen = f"frozen {stored[False]}{packed}, " if stored[False] else ""
    return f"dtypes: {frozen}trained {stored[True]}, products of frozen weights in {products}"


def finish(model: nn.Module, config: RunConfig, log: RunLog, tokenizer):
    """Save what was trained and draw the loss. Raises ValueError, and saves nothing, after a NaN."""
    if log.steps and not math.isfinite(log.steps[-1].loss + log.steps[-1].grad_norm):
        raise ValueError(f"the loss or gradient of step {log.steps[-1].step} is not a number, so "
                         f"nothing is saved; try a --lr below {config.lr:g}, or clip gradients")
    if config.save_model:
        folder = save_trained(model, weights_folder(config), tokenizer, asdict(config))
        print_main(f"saved the {folder.name} in {folder}")
    if not ranks_from_env().is_main or not log.steps: return
    print(f"loss: first step {log.steps[0].loss:.4f}, last step {log.steps[-1].loss:.4f}")
    for best in [e for e in log.evaluations if e.is_best][-1:]:
        print(f"held-out loss: lowest {best.eval_loss:.4f} after step {best.step}"
              + (f", kept in {weights_folder(config, '-best')}" if config.save_model else ""))
    picture = Path(config.output_dir) / "loss.png"
    if plot_loss(log.steps, picture, Path(config.model_name).name, log.evaluations):
        print(f"loss picture: {picture}")
