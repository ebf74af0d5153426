"""Direct preference optimization of an 8B model in NF4 on one GPU: TRL on this engine, and TRL alone.

    python benchmarks/dpo_8b.py /dev/shm/llama-8b --minutes 4 --results benchmarks/results/dpo_8b_h100.jsonl

The folder is filled with random weights of the model's true shape if it is not there. Both ways train
the same adapters on the same rows with the same arguments of TRL, each in a process of its own: ours
through `integrations.trl`, theirs with PEFT and bitsandbytes. A step's tokens are those of the chosen and
the rejected rows, without padding; the reference policy's forward is part of the step. With `--lengths
mixed` rows have an eighth of `--length` tokens to all of them. Prints both, and writes JSON lines.
A way that outlasts its share of `--minutes` is stopped; it makes a row of status "timeout".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
WARM_UP, GIB = 3, 2**30  # steps that compile and fill caches, and don't count
LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate")
WAYS = {"ours": None, "peer": "trl + peft + bitsandbytes"}


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B", help="whose shape to fill")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each row")
    parser.add_argument(
        "--lengths",
        default="equal",
        choices=["equal", "mixed"],
        help="mixed: of each row drawn from --length / 8 to --length, the same for both ways",
    )
    parser.add_argument("--padded", action="store_true", help="ours only: compute the padding too")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--lora_rank", type=int, default=64)
    parser.add_argument("--activation_policy", help="ours only; as --activation_policy of train.py")
    parser.add_argument("--compile", action="store_true", help="ours only")
    parser.add_argument("--mlp_tiles", type=int, default=1, help="ours only")
    parser.add_argument("--attention_tiles", type=int, default=1, help="ours only")
    parser.add_argument(
        "--compute_dtype", default="bf16", choices=["bf16", "fp8"], help="ours only"
    )
    parser.add_argument("--use_activation_cpu_offload", action="store_true", help="ours only")
    parser.add_argument(
        "--profile", type=Path, help="folder for a table of where the time of one more step goes"
    )
    parser.add_argument("--minutes", type=float, default=10, help="for everything")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def fill(folder: Path, model: str, layers: int | None = None):
    """Random weights of a model's shape, if there are none."""
    from random_checkpoint import write
    from transformers import AutoConfig

    from fsdp_qlora.catalog.known_models import known_config

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not (folder / "config.json").exists():
        settings = known_config(model)
        if layers:
            settings["num_hidden_layers"] = layers
        write(folder, AutoConfig.for_model(settings.pop("model_type"), **settings), device)


def number_tokenizer(folder: Path):
    """A tokenizer of a model's vocabulary whose words are numbers, from 3 on, one token each.

    Not kept in the folder: AutoTokenizer would read it as the model's own kind, which splits numbers.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    special = dict(unk_token="<unk>", eos_token="</s>", pad_token="<pad>")
    numbers = map(str, range(len(special), AutoConfig.from_pretrained(folder).vocab_size))
    words = {word: i for i, word in enumerate([*special.values(), *numbers])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def row_lengths(options: argparse.Namespace, mixed: bool = False) -> list[tuple[int, int]]:
    """Tokens of the chosen and the rejected row of each pair."""
    count, most = options.batch_size * (WARM_UP + options.steps), options.length
    if not mixed:
        return [(most, most)] * count
    draw = random.Random(1)
    return [(draw.randint(most // 8, most), draw.randint(most // 8, most)) for _ in range(count)]


def rows(lengths: list[tuple[int, int]], vocab_size: int) -> list[dict]:
    """Pairs of these many tokens; a quarter of the shorter row is the prompt."""
    draw = random.Random(0)

    def text(count: int) -> str:
        return " ".join(str(draw.randrange(3, vocab_size)) for _ in range(count))

    found = []
    for chosen, rejected in lengths:
        prompt = max(1, min(chosen, rejected) // 4)
        row, rest = dict(prompt=text(prompt)), prompt + 1  # TRL adds the end
        row |= dict(chosen=" " + text(chosen - rest), rejected=" " + text(rejected - rest))
        found.append(row)
    return found


def step_watch(last: int | None = None):
    """A callback that keeps when each step ended, and resets the peak once warm; `last` is measured still."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        times = ()

        def on_step_end(self, args, state, control, **_):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                if state.global_step == WARM_UP:
                    torch.cuda.reset_peak_memory_stats()
            self.times = (*self.times, time.perf_counter())

        def seconds(self) -> list[float]:
            """Of the steps after the warm-up."""
            ends = self.times[WARM_UP - 1 : last]
            return [b - a for a, b in zip(ends, ends[1:], strict=False)]

    return Watch()


def profile_of_last_step(path: Path, last: int):
    """A callback that profiles the step of that number, and writes where its time goes."""
    from torch.profiler import profile
    from transformers import TrainerCallback

    class Profile(TrainerCallback):
        running: profile | None = None

        def on_step_begin(self, args, state, control, **_):
            if state.global_step == last - 1:
                self.running = profile()
                self.running.start()

        def on_step_end(self, args, state, control, **_):
            if self.running:
                self.running.stop()
                key = (
                    "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
                )
                averages = self.running.key_averages()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(averages.table(sort_by=key, row_limit=60, max_name_column_width=90))

    return Profile()


def common_arguments(options: argparse.Namespace) -> dict:
    """What a configuration of TRL is told whatever its trainer."""
    on_gpu = torch.cuda.is_available()
    return dict(
        output_dir=str(options.folder.with_name("trl_output")),
        per_device_train_batch_size=options.batch_size,
        max_steps=WARM_UP + options.steps,
        learning_rate=1e-4,
        gradient_checkpointing=True,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        optim="adamw_torch",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )


def adapter(options: argparse.Namespace):
    """LoRA on every linear layer of the blocks."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM", r=options.lora_rank, lora_alpha=16, target_modules="all-linear"
    )


def figures(trainer, watch, tokens_per_step: int | None) -> dict:
    """What a trainer that has trained measured; None for steps of unequal size, whose tokens it counted."""
    trainer.train()
    steps = watch.seconds()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [entry["loss"] for entry in logs]
    seconds = statistics.median(steps)
    speed = tokens_per_step and tokens_per_step / seconds
    if speed is None:
        counts = [logs[end - 1]["num_tokens"] for end in (WARM_UP, WARM_UP + len(steps))]
        speed = (counts[1] - counts[0]) / sum(steps)
    return dict(
        seconds_per_step=seconds,
        tokens_per_second=speed,
        **memory(),
        steps_measured=len(steps),
        loss_first=losses[0],
        loss_last=losses[-1],
    )


def measure(options: argparse.Namespace) -> dict:
    """Train one way in this process; what came out."""
    import trl
    from datasets import Dataset

    tokenizer, watch = number_tokenizer(options.folder), step_watch(WARM_UP + options.steps)
    given, callbacks = common_arguments(options), [watch]
    if options.profile:
        given["max_steps"] += 1
        callbacks.append(
            profile_of_last_step(options.profile / f"{options.one}.txt", given["max_steps"])
        )
    mixed = options.lengths == "mixed"
    trainer = (_ours if options.one == "ours" else _theirs)(
        options,
        args=trl.DPOConfig(**given, max_length=options.length),
        train_dataset=Dataset.from_list(rows(row_lengths(options, mixed), len(tokenizer))),
        processing_class=tokenizer,
        peft_config=adapter(options),
        callbacks=callbacks,
    )
    return figures(trainer, watch, None if mixed else 2 * options.batch_size * options.length)


def memory() -> dict:
    """The peak since it was reset, in GiB: the GPU's, or without one the host's."""
    from fsdp_qlora.observe.peak_memory import peak_resident_bytes

    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return dict(peak_allocated_gib=allocated / GIB, peak_reserved_gib=reserved / GIB)
    return dict(peak_host_gib=peak_resident_bytes() / GIB)


def _ours(options: argparse.Namespace, **given):
    from fsdp_qlora.integrations.trl import DPOTrainer

    return DPOTrainer(
        str(options.folder),
        quant="nf4",
        activation_policy=options.activation_policy,
        compile=options.compile,
        mlp_tiles=options.mlp_tiles,
        attention_tiles=options.attention_tiles,
        compute_dtype=options.compute_dtype,
        use_activation_cpu_offload=options.use_activation_cpu_offload,
        padding_free=not options.padded,
        **given,
    )


def _theirs(options: argparse.Namespace, **given):
    import trl
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    model = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=dtype, quantization_config=four_bit
    )
    return trl.DPOTrainer(model, **given)


def run_way(way: str, options: argparse.Namespace, arguments: list[str], seconds: float) -> dict:
    """One way in its own process, stopped after `seconds`; a row, whatever happens there."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    command = [sys.executable, *(command if way == "ours" else []), __file__]
    out, late = _run([*command, *arguments, "--one", way], seconds)
    found = [line for line in out.splitlines() if line.startswith('{"seconds_per_step"')]
    if not found:
        print(out[-6000:], file=sys.stderr)
    oom = "out of memory" in out
    return dict(
        name="dpo_8b",
        peer=WAYS[way],
        model=options.model,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        gpus=1,
        quant="nf4",
        batch_size=options.batch_size,
        context_length=options.length,
        lengths=options.lengths,
        padding_free=way == "ours" and not options.padded,
        lora_rank=options.lora_rank,
        activation_policy=way == "ours" and options.activation_policy or "recompute_all",
        compile=way == "ours" and options.compile,
        mlp_tiles=options.mlp_tiles if way == "ours" else 1,
        attention_tiles=options.attention_tiles if way == "ours" else 1,
        compute_dtype=options.compute_dtype if way == "ours" else "bf16",
        activation_offload=way == "ours" and options.use_activation_cpu_offload,
        **(json.loads(found[0]) if found else {}),
        status="ok" if found else "timeout" if late else "oom" if oom else "error",
        versions={name: version(name) for name in LIBRARIES},
        date=str(date.today()),
    )


def _run(command: list[str], seconds: float) -> tuple[str, bool]:
    """What a command printed, and whether it and what it started had to be stopped."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=seconds)[0], False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0], True


def main(arguments: list[str]) -> list[dict]:
    options = options_of(arguments)
    if options.one:
        print(json.dumps(measure(options)), flush=True)
        return []
    ends = time.monotonic() + 60 * options.minutes
    fill(options.folder, options.model)
    found = []
    for i, way in enumerate(options.ways):
        share = (ends - time.monotonic()) / (len(options.ways) - i)
        found.append(run_way(way, options, arguments, share))
        print(json.dumps(found[-1]), flush=True)
        if options.results:
            with open(options.results, "a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    if len(found) == 2 and all(row["status"] == "ok" for row in found):
        ours, theirs = found
        size = next(key for key in ("peak_allocated_gib", "peak_host_gib") if key in ours)
        print(
            f"ours: {ours['tokens_per_second'] / theirs['tokens_per_second']:.2f} times the tokens "
            f"per second, {ours[size] / theirs[size]:.0%} of the memory"
        )
    return found


if __name__ == "__main__":
    sys.path.append(str(ROOT))
    main(sys.argv[1:])
