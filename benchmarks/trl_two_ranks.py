"""DPO and GRPO through TRL on this engine, sharded by full_shard: one row each.

    torchrun --nproc_per_node 2 benchmarks/trl_two_ranks.py /dev/shm/llama-8b-8 --layers 8 --minutes 3

The folder is filled with random weights of the model's width if it is not there. DPO's tokens are those of
chosen and rejected rows; GRPO's are those of prompts and of the answers that the sharded model generates
for them, and its seconds are generation, scoring and the step together. Whatever isn't done after
`--minutes` is stopped, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from dpo_8b import (
    LIBRARIES,
    WARM_UP,
    adapter,
    common_arguments,
    figures,
    fill,
    number_tokenizer,
    row_lengths,
    rows,
    step_watch,
)

from fsdp_qlora.dist import broadcast_by_main, ranks_from_env

TASKS = ("dpo", "grpo")


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B", help="whose shape to fill")
    parser.add_argument("--layers", type=int, help="cut the model to so many")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--batch_size", type=int, default=4, help="rows, or answers, of a rank")
    parser.add_argument("--length", type=int, default=1024, help="tokens of DPO's rows")
    parser.add_argument("--answer", type=int, default=64, help="most tokens of GRPO's answers")
    parser.add_argument("--steps", type=int, default=4, help="that are measured")
    parser.add_argument("--lora_rank", type=int, default=64)
    parser.add_argument("--strategy", default="full_shard")
    parser.add_argument("--minutes", type=float, default=3, help="for everything")
    return parser.parse_args(arguments)


def few_words(completions: list[str], **_) -> list[float]:
    """A reward without a model: answers of few different words are better."""
    return [-float(len(set(text.split()))) for text in completions]


def trainer_of(task: str, options: argparse.Namespace, **given):
    """TRL's trainer of a task, on this engine."""
    import trl
    from datasets import Dataset

    from fsdp_qlora.integrations.trl import DPOTrainer, GRPOTrainer

    common = common_arguments(options)
    data = rows(row_lengths(options), len(given["processing_class"]))
    if task == "dpo":
        args = trl.DPOConfig(**common, max_length=options.length)
        return DPOTrainer(
            str(options.folder), args=args, train_dataset=Dataset.from_list(data), **given
        )
    args = trl.GRPOConfig(
        **common, num_generations=options.batch_size, max_completion_length=options.answer
    )
    prompts = Dataset.from_list([dict(prompt=row["prompt"]) for row in data])
    return GRPOTrainer(
        str(options.folder), args=args, train_dataset=prompts, reward_funcs=few_words, **given
    )


def measure(task: str, options: argparse.Namespace) -> dict:
    """Train one task on every rank; the tokens of all ranks and the largest rank's memory."""
    watch, began = step_watch(), time.monotonic()
    trainer = trainer_of(
        task,
        options,
        processing_class=number_tokenizer(options.folder),
        peft_config=adapter(options),
        sharding_strategy=options.strategy,
        quant="nf4",
        callbacks=[watch],
    )
    prompt = options.length // 4
    tokens = 2 * options.length if task == "dpo" else prompt + options.answer
    found = figures(trainer, watch, tokens * options.batch_size * dist.get_world_size())
    for key in [key for key in found if key.endswith("_gib")]:
        largest = torch.tensor(found[key], device=trainer.args.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        found[key] = largest.item()
    return dict(found, seconds=time.monotonic() - began)


def row_of(task: str, options: argparse.Namespace, found: dict) -> dict:
    config = json.loads((options.folder / "config.json").read_text())
    return dict(
        name=f"{task}_two_ranks",
        model=options.model,
        num_hidden_layers=config["num_hidden_layers"],
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        gpus=ranks_from_env().world_size,
        sharding_strategy=options.strategy,
        quant="nf4",
        batch_size=options.batch_size,
        context_length=options.length,
        warm_up_steps=WARM_UP,
        **found,
        versions={name: version(name) for name in LIBRARIES},
        date=str(date.today()),
    )


def stop_late(minutes: float) -> threading.Timer:
    """End this process, whatever it waits for."""

    def stop():
        print(f"stopped after {minutes:g} minutes", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(60 * minutes, stop)
    timer.daemon = True
    timer.start()
    return timer


def main(arguments: list[str]):
    options, rank = options_of(arguments), ranks_from_env().rank
    late = stop_late(options.minutes)
    broadcast_by_main(lambda: str(fill(options.folder, options.model, options.layers)))
    for task in options.tasks:
        found = measure(task, options)
        if rank == 0:
            line = json.dumps(row_of(task, options, found))
            print(line, flush=True)
            if options.results:
                with open(options.results, "a") as file:
                    file.write(line + "\n")
    late.cancel()


if __name__ == "__main__":
    main(sys.argv[1:])
    dist.destroy_process_group()
