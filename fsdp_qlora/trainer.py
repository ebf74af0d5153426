"""One optimizer step, and the run made of them.

The loss of a step is the sum over its trained tokens, on all ranks and in all micro-batches,
divided by their number, which is counted before the first backward. So a step's gradient does not
depend on how its rows are cut up.

Shapes: B rows of a micro-batch, T tokens.
"""
from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
    num_trained_tokens,
    on_device,
)
from .dist import gather_over_ranks, print_main, ranks_from_env, sum_over_ranks
from .evaluate import Evaluator
from .export import save_trained
from .metrics import RunLog, StepMetrics, plot_loss
from .optim import build_optimizer, build_scheduler
from .sharding import is_sharded, set_gradient_sync


@dataclass
class StepResult:
    """What one optimizer step gave, over all ranks.

    Loss and norm stay on the device until they are read, which waits for it.
    """
    loss_and_norm: Tensor  # (2,)
    trained_tokens: int
    tokens: int
    stepped: bool = True  # False if no token was trained: the weights are unchanged

    @property
    def loss(self) -> float:
        """Sum of the trained tokens' losses divided by their number."""
        return self.loss_and_norm[0].item()

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients before clipping."""
        return self.loss_and_norm[1].item()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[dict], *,
               max_grad_norm: float | None = None, no_sync: bool = False) -> StepResult:
    """Forward and backward of every micro-batch, then one optimizer step.

    Each micro-batch is a dict of input_ids and labels (B, T), and what else the model takes; every
    rank must bring the same number of them. Gradients are averaged over ranks, so the sum of losses
    is divided by the tokens per rank.
    """
    trained, tokens = sum_over_ranks(sum(num_trained_tokens(b) for b in micro_batches),
                                     sum(b["input_ids"].numel() for b in micro_batches))
    if not trained: return StepResult(torch.zeros(2), 0, tokens, stepped=False)
    device = compute_device(model)
    loss_sum = torch.zeros((), device=device)
    for i, batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        set_gradient_sync(model, last or is_sharded(model) and not no_sync)
        batch = on_device(batch, device)
        loss = model(**batch, num_items_in_batch=trained / dist.get_world_size()).loss
        loss.backward()
        loss_sum += loss.detach()
    norm = clip_gradients(model, max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss_sum)
    loss_and_norm = torch.stack([loss_sum / dist.get_world_size(), norm.to(loss_sum)])
    return StepResult(loss_and_norm, trained, tokens)


def compute_device(model: nn.Module) -> torch.device:
    """Where the forward runs; under CPU offload the parameters are elsewhere."""
    buffer = next(model.buffers(), None)
    return buffer.device if buffer is not None else next(model.parameters()).device


def clip_gradients(model: nn.Module, max_norm: float | None) -> Tensor:
    """Norm of all gradients over all ranks; gradients are scaled down to `max_norm` if given."""
    parameters = list(trainable_parameters(model).values())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor): norm = norm.full_tensor()
    if max_norm is not None: torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def seed_everything(seed: int, rank: int, deterministic: bool = False):
    """Seed dropout and shuffling; ranks differ, or all would drop the same places."""
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    if deterministic: torch.use_deterministic_algorithms(True)


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
                                config.warmup_share)
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


class LaggedLog:
    """Logs each step when the next one is under way; on the CPU, where a step is done at once, then.

    Reading a loss waits for the GPU. Reading it a step late leaves the host free to queue work ahead,
    so the GPU never waits for the host between steps.
    """

    def __init__(self, log: RunLog, device: torch.device):
        self.log, self.device, self.pending = log, device, None
        self.restart_clock()

    def restart_clock(self):
        """Count the next step's seconds from now."""
        self.read = time.perf_counter()

    def add(self, number: int, lr: float, result: StepResult):
        """Take a step that was queued, and log the one before it."""
        self.flush()
        self.pending = number, lr, result
        if self.device.type == "cpu": self.flush()

    def flush(self):
        """Log the step that is waiting, if there is one."""
        if self.pending is None: return
        number, lr, result = self.pending
        result.loss_and_norm = result.loss_and_norm.cpu()  # waits until the step is done
        started, self.read = self.read, time.perf_counter()
        self.log.log(step_metrics(number, lr, result, self.read - started, self.device))
        self.pending = None


def step_metrics(number: int, lr: float, result: StepResult, seconds: float, device: torch.device
                 ) -> StepMetrics:
    """A step's result with its time and memory."""
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    return StepMetrics(step=number, loss=result.loss, lr=lr, grad_norm=result.grad_norm,
                       trained_tokens=result.trained_tokens, tokens=result.tokens, seconds=seconds,
                       tokens_per_second=result.tokens / seconds, peak_allocated_gib=peak)


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
