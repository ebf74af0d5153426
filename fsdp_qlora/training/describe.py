"""What a run says of itself before its first step: what it prints, and the record of its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from ..adapters import adapter_counts, trainable_parameters
from ..build import attention
from ..checkpoint import per_step
from ..config import AUTO, BatchPlan, RunConfig, plan_batches
from ..config.settings import counted
from ..config.without_effect import batch_above_data
from ..data import Source, StepLoader, StreamLoader, Subset, TokenizedDataset
from ..dist import print_main, ranks_from_env
from ..estimate import Rows
from ..experts import StackedExperts, adaptable_stacks, names_of_wrappers
from ..export.card import run_record
from ..observe.metrics import StartRecord, StepMetrics
from ..observe.runlog import now
from ..observe.startup import startup_seconds
from ..observe.throughput import dollars_per_hour, predicted
from ..plan import Plan
from ..quantization.quantize import short_blocks
from .cuda_graphs import uses_graphs
from .step import compute_device

_WELL_FILLED = 0.8  # of the places of bins


def describe(
    model: nn.Module,
    config: RunConfig,
    plan: Plan,
    loader: StepLoader | StreamLoader,
    seconds: float,
):
    """Print every derived value once."""
    total_steps, ranks = loader.sampler.total_steps, ranks_from_env().world_size
    trained = sum(p.numel() for p in trainable_parameters(model).values())
    counts = adapter_counts(model)
    if counts:
        print_main("adapted layers: " + ", ".join(f"{k} x{n}" for k, n in counts.items()))
    if left := getattr(model, "left_out", None):
        print_main("not adapted: " + ", ".join(f"{k} ({why})" for k, why in left.items()))
    mixtures = [m for m in model.modules() if isinstance(m, StackedExperts)]
    if counts and mixtures and not names_of_wrappers(model):
        how = "; --lora_target_parameters experts adapts them too"
        print_main(
            f"not adapted: the {mixtures[0].num_experts} experts in each of {len(mixtures)} blocks"
            + (how if adaptable_stacks(model) else ", which PEFT can't adapt")
        )
    whole = Counter(
        name.rsplit(".", 2)[-2]
        for name in trainable_parameters(model)
        if counts and ".lora_" not in name
    )
    if whole:
        print_main("trained in full: " + ", ".join(f"{k} x{n}" for k, n in whole.items()))
    print_main(f"trained weights: {trained:,}; model ready in {seconds:.1f} s")
    print_main(_dtypes_line(model, config))
    implementation, reason = attention(config, model.config, compute_device(model))
    print_main(f"attention: {implementation} ({reason})")
    if (
        plan.gathers_inside_blocks
        and compute_device(model).type == "cuda"
        and not plan.loop.compile
    ):
        print_main(
            f"blocks are not compiled: --wrap_policy {config.wrap_policy} gathers parts of them"
        )
    if uses_graphs(plan, model, compute_device(model)):
        print_main("CUDA graphs replay micro-batches whose shape was seen before")
    print_main(rate_line(config, plan))
    print_main(steps_line(config, plan.batch, total_steps, ranks))
    if config.packing and isinstance(loader, StepLoader):
        print_main(fill_line(config, loader, ranks))
    rows = len(loader.dataset) if isinstance(loader, StepLoader) else None  # of a stream, not known
    if short := short_blocks(model):
        names = ", ".join(f"{name} ({inputs} inputs)" for name, inputs in short.items())
        print_main(
            f"warning: the inputs of {names} are not whole blocks of 64, so bitsandbytes' 4-bit weights "
            "differ from these; serve the adapter on a 16-bit base, or merge it"
        )
    for warning in batch_above_data(plan.batch, rows):
        print_main(f"warning: {warning}")
    warn_of_warmup(config, plan, total_steps)
    if config.verbose:
        print_main(model)


def warn_of_warmup(config: RunConfig, plan: Plan, total_steps: int | None):
    """Say it where a run ends before its rate reaches the peak."""
    if _ends_in_warmup(config, total_steps):
        print_main(
            f"warning: --lr_warmup_steps {config.lr_warmup_steps}: the run ends before the warmup "
            f"reaches --lr {plan.optimizer.lr:g}; give fewer than its {counted(total_steps or 0, 'step')}"
        )


def rate_line(config: RunConfig, plan: Plan) -> str:
    """The learning rate over the run, and what bounds its steps."""
    whence = " (from the model's width)" if config.lr is None else ""
    warmup = config.schedule != "constant" and config.lr_warmup_steps == AUTO
    over = f" after a warmup of {config.warmup_share:.0%} of all steps" if warmup else ""
    clipped = f", gradients clipped to a norm of {config.grad_norm:g}"
    return (
        f"learning rate {plan.optimizer.lr:g}{whence}, {config.schedule}{over}"
        f"{clipped if config.apply_gradient_clipping else ''}"
    )


def bins_line(config: RunConfig, mean_length: float, ranks: int) -> str:
    """How many bins a step has by the lengths of the rows, and about how many of these."""
    batches = plan_batches(config, ranks)
    rows = batches.per_step * config.context_length / max(mean_length, 1)
    return (
        f"a step has {counted(batches.per_step, 'bin')}, about {rows:,.0f} rows of {mean_length:,.0f} "
        "tokens; --gradient_accumulation_steps sets another number"
    )


def steps_line(config: RunConfig, batches: BatchPlan, steps: int | None, ranks: int) -> str:
    """How many steps of how many rows; None is until a stream ends."""
    count = "steps until the stream ends" if steps is None else counted(steps, "step")
    unit = "bin" if config.packing else "row"
    full = f" of {config.context_length:,} tokens" if batches.unit == "bin" else ""
    shared = batches.ranks_per_row
    who = counted(ranks, "rank")
    if shared > 1:
        who = f"{counted(ranks // shared, 'group')} of {shared} ranks that share rows"
    return (
        f"{count}, of {counted(batches.per_step, batches.unit)}{full}: micro-batch "
        f"{counted(batches.micro_batch_size, unit)} x accumulation {batches.accumulation} x "
        f"{who}"
    )


def fill_line(config: RunConfig, loader: StepLoader, ranks: int) -> str:
    """How full the bins are, and what would fill them where a step has too few rows for that."""
    share, rows, dataset = loader.bin_fill(), config.global_batch_size, loader.dataset
    line = f"bins are {share:.0%} full"
    if share >= _WELL_FILLED or config.has_full_bins:
        return line
    places = config.batch_size * ranks * config.context_length  # of a micro-batch on every rank
    rows_of_one = max(1, round(places * len(dataset) / max(int(dataset.lengths.sum()), 1)))
    enough = -(-rows // rows_of_one) * rows_of_one
    line += f": {counted(rows, 'row')} per step do not fill them"
    if enough >= len(dataset):
        return f"{line}; leave out --global_batch_size"
    return f"{line}; leave out --global_batch_size or raise it to about {enough}"


def _ends_in_warmup(config: RunConfig, steps: int | None) -> bool:
    """Whether the run is over before its peak learning rate."""
    return steps is not None and config.lr_warmup_steps >= steps


def first_step_line(seconds: float, compiling: float) -> str:
    """How long a run's first step took, what part of it torch compiled for, and what came before."""
    what = (
        f", {compiling:.1f} of that compiling or reading torch's compile cache" if compiling else ""
    )
    before = ", ".join(f"{part} {took:.1f} s" for part, took in startup_seconds().items())
    return f"first step: {seconds:.1f} s{what}" + (f"; before it: {before}" if before else "")


def compilations_line(steps: Sequence[StepMetrics]) -> str:
    """How often torch compiled in these steps of a process, and when last; empty if never."""
    counts = [step.compilations for step in steps]
    if not counts or not counts[-1]:
        return ""
    last = next(step.step for step in steps if step.compilations == counts[-1])
    return f"torch compiled {counted(counts[-1], 'graph')}, the last by step {last}"


def _dtypes_line(model: nn.Module, config: RunConfig) -> str:
    """Which dtypes weights are stored, multiplied and trained in."""
    stored = {
        trained: ", ".join(
            sorted(
                {
                    str(p.dtype).removeprefix("torch.")
                    for p in model.parameters()
                    if p.requires_grad == trained
                }
            )
        )
        for trained in (True, False)
    }
    packed = f" ({config.quant} bytes in bfloat16)" if config.quant != "none" else ""
    products = config.product_dtype if config.compute_dtype == "auto" else config.compute_dtype
    if not stored[False]:
        return f"dtypes: trained {stored[True]}, matmuls in {products}"
    return (
        f"dtypes: frozen {stored[False]}{packed}, trained {stored[True]}, matmuls of frozen "
        f"weights in {products}"
    )


# ---- as records --------------------------------------------------------------------------------


def record_beside_weights(config: RunConfig, data: dict, device: torch.device) -> dict:
    """What is kept beside the trained weights; `data` says what they were trained on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return run_record(config, data, name, ranks_from_env().world_size)


def start_record(
    config: RunConfig,
    plan: Plan,
    record: dict,
    run_id: str,
    model: nn.Module,
    data: dict,
    device: torch.device,
    rows: Rows | None = None,
    **about,
) -> StartRecord:
    """All that is known before the next step; `record` is what is kept beside the weights.

    rows: lengths of the data, for the estimate; None where they are not known.
    about: step, total_steps, load_seconds and startup_seconds.
    """
    return StartRecord(
        **per_step(plan.batch),
        time=now(),
        run_id=run_id,
        settings=record,
        ranks=ranks_from_env().world_size,
        micro_batch=plan.batch.micro_batch_size,
        accumulation=plan.batch.accumulation,
        trained_weights=sum(p.numel() for p in trainable_parameters(model).values()),
        data=data,
        estimate=predicted(config, plan, model, device, rows),
        dollars_per_hour=dollars_per_hour(config, device),
        **about,
    )


def about_data(
    dataset: TokenizedDataset | Subset | Source, held_out: TokenizedDataset | Subset | None
) -> dict:
    """The data report, unless it is of a stream, and how many rows are trained on and held out."""
    found = {} if held_out is None else dict(rows_held_out=len(held_out))
    if isinstance(dataset, Source):
        return found
    return found | dict(rows_trained=len(dataset), report=dataset.report.to_dict())
