"""Real tokens per second with packed and with padded rows, in one run on one GPU.

    python benchmarks/packing.py --results benchmarks/results/packing_h100_2026-11-27.jsonl

Rows are as long as those of instruction data: log-normal with a mean near 350 tokens, cut at the
context of 2048. The model has the 8B shape and random weights, and the learning rate is 0, so every
case must give the same losses, which are printed. Three ways to make the same optimizer steps:

    padded         micro-batches as rows come, padded to their longest
    padded sorted  rows of a step sorted by length first, as this project does
    packed         bins of the context length
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from fsdp_qlora.bench.measure import describe_run, record_memory, synchronize
from fsdp_qlora.bench.row import BenchRow, append_row
from fsdp_qlora.build import build_model
from fsdp_qlora.catalog.known_models import known_config, known_name
from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import DataReport, StepLoader, StepSampler, TokenizedDataset, collate
from fsdp_qlora.dist import process_group, rank_device
from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.run_plan import plan_run
from fsdp_qlora.training.step import train_step

MEAN, SIGMA = 350, 1.0  # of log-normal lengths, before the cut


def random_dataset(rows: int, context_length: int, vocab: int, seed: int = 0) -> TokenizedDataset:
    """Rows of random tokens, all but the first of each trained."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, rows).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths.clip(8, context_length))])
    trained = np.ones(offsets[-1], dtype=bool)
    trained[offsets[:-1]] = False
    tokens = rng.integers(0, vocab, offsets[-1], dtype=np.int32)
    return TokenizedDataset(tokens, trained, offsets, DataReport(context_length))


def steps_of_batches(case: str, dataset: TokenizedDataset, options, config: RunConfig):
    """For each optimizer step, its micro-batches and its number of real tokens."""
    sampler = StepSampler(len(dataset), options.rows_per_step, seed=config.seed)
    width = dict(pad_to=config.context_length) if config.packing else dict(pad_to_multiple_of=64)
    loader = StepLoader(
        dataset,
        sampler,
        micro_batch_size=config.batch_size,
        pad_token_id=0,
        packing=config.packing,
        pin_memory=config.device == "cuda",
        **width,
    )
    for step in loader:
        if case == "padded":
            examples = [dataset[row] for row in sampler.rows(step.index)]
            step.micro_batches = [
                collate(examples[i : i + config.batch_size], 0, **width)
                for i in range(0, len(examples), config.batch_size)
            ]
        yield step.micro_batches, step.num_tokens


def measure(
    row: BenchRow, case: str, model, config: RunConfig, options, device: torch.device
) -> float:
    """Run the steps of one case and fill its row; returns the share of tokens that are no padding.

    Tokens per second are the real ones of all measured steps by their time.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    optimizer = build_optimizer(model, config.optimizer, config.lr, config.wd)
    rows = options.rows_per_step * (options.warmup + options.steps)
    dataset = random_dataset(rows, config.context_length, model.config.vocab_size)
    seconds, real, computed, losses = [], 0, 0, []
    for index, (batches, tokens) in enumerate(steps_of_batches(case, dataset, options, config)):
        synchronize(device)
        started = time.perf_counter()
        result = train_step(model, optimizer, batches)
        synchronize(device)
        losses.append(result.loss)
        if index < options.warmup:
            continue
        seconds.append(time.perf_counter() - started)
        real, computed = real + tokens, computed + result.tokens
    row.attention_backend, row.steps_measured = model.config._attn_implementation, len(seconds)
    row.gradient_accumulation_steps, row.seconds_per_step = len(batches), statistics.median(seconds)
    row.tokens_per_second_per_gpu = real / sum(seconds)
    row.loss_first, row.loss_last = losses[0], losses[-1]
    record_memory(row, device)
    return real / computed


def measure_cases(options, device: torch.device) -> list[tuple[BenchRow, float | None]]:
    """A row, and the share of real among computed tokens, of each case; out of memory is a row."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        layers = write_config(options, Path(folder))
        for packing, cases in ((False, ("padded", "padded sorted")), (True, ("packed",))):
            config = RunConfig(
                model_name=folder,
                random_weights=True,
                packing=packing,
                lr=0.0,
                lora_dropout=0.0,
                gradient_accumulation_steps=1,
                batch_size=options.bins if packing else options.rows,
                context_length=options.context_length,
                device=options.device,
                activation_policy=options.activation_policy,
            )
            plan = plan_run(config, device)
            model = build_model(config, device, plan=plan)
            for case in cases:
                row = describe_run(config, plan, case, layers, device)
                row.model, real = known_name(options.model), None
                try:
                    real = measure(row, case, model, config, options, device)
                except torch.OutOfMemoryError as error:
                    row.status = "oom"
                    print(str(error).splitlines()[0])
                rows.append((row, real))
                if options.results:
                    append_row(row, options.results)
            del model
            gc.collect()  # it holds itself, through its replaced forwards
    return rows


def write_config(options, folder: Path) -> int:
    """config.json of the model, cut to --layers, in `folder`; returns its number of layers."""
    settings = known_config(options.model)
    if options.layers:
        settings["num_hidden_layers"] = options.layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config.save_pretrained(folder)
    return config.num_hidden_layers


def print_table(rows: list[tuple[BenchRow, float | None]]):
    """The cases side by side; speed is relative to the first."""
    print(
        f"{'case':<15}{'attention':<11}{'micro':>6}{'real':>7}{'s/step':>9}{'real tok/s':>12}"
        f"{'speed':>8}{'GiB':>8}  loss of first and last step"
    )
    first = rows[0][0].tokens_per_second_per_gpu
    for row, real in rows:
        if row.status != "ok":
            print(f"{row.name:<15}{row.status}")
            continue
        speed = f"{row.tokens_per_second_per_gpu / first:.2f}x" if first else "-"
        print(
            f"{row.name:<15}{row.attention_backend:<11}{row.batch_size:>6}{real:>7.0%}"
            f"{row.seconds_per_step:>9.3f}{row.tokens_per_second_per_gpu:>12,.0f}{speed:>8}"
            f"{row.peak_allocated_gib or 0:>8.1f}  {row.loss_first:.4f} {row.loss_last:.4f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--layers", type=int, help="cut the model to so many blocks")
    parser.add_argument("--context_length", type=int, default=2048)
    parser.add_argument("--rows_per_step", type=int, default=96)
    parser.add_argument("--rows", type=int, default=8, help="rows of a padded micro-batch")
    parser.add_argument("--bins", type=int, default=4, help="bins of a packed micro-batch")
    parser.add_argument("--activation_policy", default="recompute_all")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", help="JSON-lines file the rows are appended to")
    options = parser.parse_args()
    device = rank_device(options.device)
    with process_group(device):
        print_table(measure_cases(options, device))


if __name__ == "__main__":
    main()
