"""What a run prints about itself before its first step."""
from __future__ import annotations

from collections import Counter

from torch import nn

from ..adapters import adapter_counts, trainable_parameters
from ..config import BatchPlan, RunConfig
from ..config.settings import counted
from ..derived import attention
from ..dist import print_main, ranks_from_env
from .graphs import uses_graphs
from .step import compute_device


def describe(model: nn.Module, config: RunConfig, batches: BatchPlan, total_steps: int | None,
             seconds: float):
    """Print every derived value once."""
    trained = sum(p.numel() for p in trainable_parameters(model).values())
    counts = adapter_counts(model)
    if counts: print_main("adapted layers: " + ", ".join(f"{k} x{n}" for k, n in counts.items()))
    whole = Counter(name.rsplit(".", 2)[-2] for name in trainable_parameters(model)
                    if counts and ".lora_" not in name)
    if whole: print_main("trained whole: " + ", ".join(f"{k} x{n}" for k, n in whole.items()))
    print_main(f"trained weights: {trained:,}; model ready in {seconds:.1f} s")
    print_main(dtypes_line(model, config))
    implementation, reason = attention(config, model.config, compute_device(model))
    print_main(f"attention: {implementation} ({reason})")
    if uses_graphs(config, model, compute_device(model)):
        print_main("micro-batches of a shape seen before are replayed from CUDA graphs")
    print_main(steps_line(config, batches, total_steps, ranks_from_env().world_size))
    if config.verbose: print_main(model)


def steps_line(config: RunConfig, batches: BatchPlan, steps: int | None, ranks: int) -> str:
    """How many steps of how many rows; None is until a stream ends."""
    count = "steps until the stream ends" if steps is None else counted(steps, "step")
    unit = "bin" if config.packing else "row"
    return (f"{count}, of {counted(batches.rows_per_step, 'row')}: micro-batch "
            f"{counted(batches.micro_batch_size, unit)} x accumulation {batches.accumulation} x "
            f"{counted(ranks, 'rank')}")


def first_step_line(seconds: float) -> str:
    """How long a run's first step took, and what part of it torch compiled for."""
    from torch._dynamo.utils import calculate_time_spent
    compiling = calculate_time_spent().get("total_wall_time", 0.0)
    what = f", {compiling:.1f} of them compiling or reading torch's compile cache" if compiling else ""
    return f"first step: {seconds:.1f} s{what}"


def dtypes_line(model: nn.Module, config: RunConfig) -> str:
    """Which dtypes weights are stored, multiplied and trained in."""
    stored = {trained: ", ".join(sorted({str(p.dtype).removeprefix("torch.")
                                         for p in model.parameters() if p.requires_grad == trained}))
              for trained in (True, False)}
    packed = f" ({config.quant} bytes in bfloat16)" if config.quant != "none" else ""
    products = config.product_dtype if config.compute_dtype == "auto" else config.compute_dtype
    if not stored[False]: return f"dtypes: trained {stored[True]}, products in {products}"
    return (f"dtypes: frozen {stored[False]}{packed}, trained {stored[True]}, products of frozen "
            f"weights in {products}")
