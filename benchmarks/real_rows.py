"""What a user's own run gets: `train.py` on real rows, start to end, beside the bench and peers.

    python benchmarks/random_checkpoint.py meta-llama/Llama-3.1-8B /dev/shm/llama-8b
    python benchmarks/real_rows.py --model /dev/shm/llama-8b --only packed_a,padded_a,auto_a,trl_a
    python benchmarks/real_rows.py --model /dev/shm/llama-8b --only packed_a,packed_a:3
    python benchmarks/real_rows.py --tiny                       each mode in a minute on the CPU

Names are MODE_DATA, with `_fp8` behind them for fp8 products; modes are `packed`, `padded`, `auto` and
the peers' (`real_rows_peers.py`), data are the kinds of `real_rows_data.py`. `:3` takes three steps. A
name that comes again starts with the compile cache warm. Settings of a run (`--train_on all`) are added
to each command of ours; `--gpus 2 --sharding_strategy full_shard` runs each on two GPUs.

Tokens per second are those of rows and of one GPU, without padding, from step `--first` on. The
bench's are of the same settings over full rows of random tokens: as long as a bin if packed, else as
the mean row. A run that runs out of memory or time is a row too.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch
from random_checkpoint import write
from real_rows_data import KINDS, VOCABULARY, save_tokenizer, write_rows
from real_rows_figures import failure, figures, records_of, watched
from transformers import AutoTokenizer, LlamaConfig

from fsdp_qlora.bench.cell_processes import How, Job, run_jobs
from fsdp_qlora.bench.measure import commit, versions
from fsdp_qlora.bench.row import append_row
from fsdp_qlora.catalog.machine import local_gpus
from fsdp_qlora.config.settings import shown
from fsdp_qlora.data import load_dataset

ROOT = Path(__file__).parents[1]
COMMON = dict(lora_rank=64, lora_dropout=0.0, lr=1e-4)  # as the rows of speed_rows.py
BY_HAND = dict(sharding_strategy="ddp", activation_budget_gib=70)
AUTO = dict(sharding_strategy="auto", batch_size="auto")
CHOSEN = (
    "sharding_strategy",
    "activation_policy",
    "batch_size",
    "use_cpu_offload",
    "use_activation_cpu_offload",
    "keep_fp8_weights",
)  # what auto may choose
PEERS = ("trl", "unsloth")
ENOUGH = 5  # measured steps of a run that had to be stopped
KEPT = dict(gradient_checkpointing=False)  # nothing is recomputed
TINY = dict(shrink=16, steps=4, first=3, minutes=3.0, bench_steps=1)
TINY_SETTINGS = [
    "--device",
    "cpu",
    "--lora_rank",
    "4",
    "--train_type",
    "lora",
    "--precision",
    "fp32",
]


@dataclass(frozen=True)
class Run:
    """One command: its data and settings, and the tokens of a step at most."""

    data: str
    mode: str
    settings: dict
    tokens: int


def runs_of(shrink: int) -> dict[str, Run]:
    """Every run by its name; contexts are cut to 1/`shrink`."""
    found, sizes = (
        {},
        dict(a=[(4, 1), (8, 8), (2, 2)], b=[(2, 1), (4, 4), (1, 2)], c=[(1, 1), (1, 4), (1, 1)]),
    )
    for data, (packed, padded, kept) in sizes.items():
        context = KINDS[data].context_length // shrink
        longest = dict(context_length=context)
        full = packed[0] * packed[1] * context
        modes = {
            "packed": BY_HAND | longest | batches(packed) | dict(packing=True),
            "padded": BY_HAND | longest | batches(padded),
            "auto": AUTO | longest,
        }
        for peer in PEERS:
            modes |= {
                peer: longest | batches(packed),
                f"{peer}_kept": longest | batches(kept) | KEPT,
            }
        for mode, settings in modes.items():
            tokens = 2 * full if mode in ("padded", "auto") else full
            found[f"{mode}_{data}"] = Run(data, mode, settings, tokens)
            if mode.split("_")[0] in PEERS:
                continue
            found[f"{mode}_{data}_fp8"] = Run(
                data, mode, settings | dict(compute_dtype="fp8"), tokens
            )
    return found


def batches(sizes: tuple[int, int]) -> dict:
    """Rows or bins of a micro-batch, and micro-batches of a step."""
    return dict(batch_size=sizes[0], gradient_accumulation_steps=sizes[1])


@dataclass
class RealRow:
    """What one run gave. Sizes in GiB, times in seconds; `status` is ok, oom or error."""

    name: str
    data: str  # a, b or c: see real_rows_data.py
    mode: str
    model: str
    gpu: str
    settings: dict  # that were given
    versions: dict[str, str]
    commit: str
    date: str
    gpus: int = 1
    peer: str | None = None  # another tool and its version
    status: str = "ok"
    error: str | None = None
    tokens_per_second: float | None = None  # of rows and of one GPU, padding not counted
    tokens_per_second_from_5: float | None = None
    bench_tokens_per_second: float | None = (
        None  # the same settings over full rows of random tokens
    )
    ratio: float | None = None
    seconds_to_first_step: float | None = None  # from the start of the process to the step's record
    startup_seconds: dict = field(default_factory=dict)  # before the first step, by what was done
    is_repeated: bool = False  # the compile cache has what it needs
    compilations: int | None = None
    compilations_after_first: int | None = None  # while the measured steps ran
    filled_share: float | None = None  # tokens of rows / tokens computed
    tokens_per_micro_batch: float | None = None  # of rows, on one GPU
    seconds_per_step: float | None = None  # median
    first_measured_step: int | None = None
    steps_measured: int = 0
    peak_allocated_gib: float | None = None
    estimate_tokens_per_second: float | None = None  # what the run's own prediction says
    estimate_peak_gib: float | None = None
    bench_peak_allocated_gib: float | None = None
    bench_error: str | None = None
    chosen: dict = field(default_factory=dict)  # what auto chose
    loss_first: float | None = None
    loss_last: float | None = None
    log: str | None = None  # what it printed last, where it failed


# ---- the bench over the same tokens -------------------------------------------------------------


def bench_settings(run: Run, row: RealRow) -> dict:
    """The run's settings for full rows of random tokens: as long as a bin, or as the mean row."""
    settings = {
        name: value
        for name, value in (run.settings | row.chosen).items()
        if name not in ("packing", "gradient_accumulation_steps")
    }
    if (run.settings | row.chosen).get("packing"):
        return settings
    assert row.tokens_per_micro_batch
    mean = row.tokens_per_micro_batch / settings["batch_size"]
    return settings | dict(context_length=8 * max(round(mean / 8), 1))


class Bench:
    """Measures each configuration once."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.known = options, {}

    def fill(self, row: RealRow, run: Run):
        """Put the bench's figures beside those of a run."""
        argv = flags(COMMON | bench_settings(run, row)) + without(self.options.settings, "train_on")
        argv = ["--model_name", str(self.options.model), "--random_weights", *argv]
        if (key := " ".join(argv)) not in self.known:
            how = How(self.options.bench_steps, warmup=3, minutes=self.options.minutes)
            (self.known[key],) = run_jobs([Job(row.name, argv, gpus=row.gpus)], how)
        found = self.known[key]
        row.bench_tokens_per_second = found.tokens_per_second_per_gpu
        row.bench_peak_allocated_gib, row.bench_error = found.peak_allocated_gib, found.error
        if row.bench_tokens_per_second and row.tokens_per_second:
            row.ratio = row.tokens_per_second / row.bench_tokens_per_second


# ---- commands -----------------------------------------------------------------------------------


def flags(settings: dict) -> list[str]:
    """Settings as they are typed."""
    return [part for name, value in settings.items() for part in (f"--{name}", shown(value))]


def given(settings: list[str]) -> dict:
    """The flags of a command line, `--name value` each."""
    return {
        name.removeprefix("--"): value
        for name, value in zip(settings[::2], settings[1::2], strict=True)
    }


def without(settings: list[str], name: str) -> list[str]:
    """A command line without one flag and its value."""
    if f"--{name}" not in settings:
        return settings
    place = settings.index(f"--{name}")
    return settings[:place] + settings[place + 2 :]


def train_command(run: Run, rows: Path, output: Path, steps: int, options) -> list[str]:
    """The command that a user types."""
    settings = (
        COMMON
        | run.settings
        | dict(max_steps=steps, save_model=False, world_size=options.gpus, log_every=1)
    )
    return [
        sys.executable,
        str(ROOT / "train.py"),
        "--model_name",
        str(options.model),
        "--dataset",
        str(rows),
        "--output_dir",
        str(output),
        "--log_to",
        "stdout",
        *flags(settings),
        *options.settings,
    ]


def peer_command(run: Run, tokens: Path, output: Path, steps: int, options) -> list[str]:
    """The same rows, tokens and adapters through a peer."""
    settings = COMMON | run.settings | dict(max_steps=steps, memory_gib=options.memory_gib)
    return [
        sys.executable,
        str(ROOT / "benchmarks/real_rows_peers.py"),
        run.mode.split("_")[0],
        "--model_name",
        str(options.model),
        "--tokens",
        str(tokens),
        "--output_dir",
        str(output),
        *flags(settings),
    ]


def made_rows(run: Run, folder: Path, options) -> tuple[Path, Path]:
    """Rows for all steps as JSON lines, and the same rows as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    wanted = int(1.25 * run.tokens * options.steps * options.gpus)
    rows = folder / f"{run.data}-{wanted}.jsonl"
    tokens = rows.with_suffix(".safetensors")
    if not rows.exists():
        write_rows(run.data, rows, tokenizer, wanted, options.shrink)
    if run.mode.split("_")[0] in PEERS and not tokens.exists():
        load_dataset(rows, tokenizer, context_length=run.settings["context_length"]).save(tokens)
    return rows, tokens


def run_one(name: str, run: Run, steps: int, folder: Path, bench: Bench, options) -> RealRow:
    """Run one command, and the bench over the same tokens."""
    is_peer = run.mode.split("_")[0] in PEERS
    row = RealRow(
        name,
        run.data,
        run.mode,
        options.model.name,
        gpu_name(),
        run.settings if is_peer else run.settings | given(options.settings),
        versions(),
        commit(),
        date.today().isoformat(),
        options.gpus,
        peer=run.mode if is_peer else None,
    )
    rows, tokens = made_rows(run, folder, options)
    output = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=folder))
    command = (
        peer_command(run, tokens, output, steps, options)
        if is_peer
        else train_command(run, rows, output, steps, options)
    )
    log = (options.logs or output) / f"{output.name}.log"
    code, first = watched(command, log, output / "metrics.jsonl", 60 * options.minutes)
    records = records_of(output / "metrics.jsonl")
    row = replace(row, seconds_to_first_step=first, **figures(records, options.first, options.gpus))
    if code is None and row.steps_measured >= ENOUGH:
        row.error = f"stopped after {row.steps_measured} measured steps: out of time"
    elif code != 0:
        row = replace(row, **failure(code, log))
    start = next((r for r in records if r["kind"] == "start"), {})
    if is_peer:
        return replace(row, peer=start.get("peer", row.peer), versions=start.get("versions", {}))
    if run.mode == "auto" and start:
        chosen = {name: start["settings"][name] for name in (*CHOSEN, "packing")}
        row.chosen = {name: value for name, value in chosen.items() if value is not None}
    if row.tokens_per_second and options.bench_steps:
        bench.fill(row, run)
    return row


def gpu_name() -> str:
    """The GPU that is measured, or cpu; torch would take memory on it to say so."""
    try:
        return local_gpus()[0]
    except ValueError:
        return "cpu"


def tiny_model(folder: Path):
    """A random model of two small blocks."""
    write(
        folder,
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        ),
        torch.device("cpu"),
    )


# ---- all of them --------------------------------------------------------------------------------


def table(rows: list[RealRow]) -> str:
    """The rows as a table for people."""

    def number(value, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        f"{'run':<18} {'tok/s':>7} {'bench':>7} {'ratio':>6} {'1st step':>8} {'compiled':>8} "
        f"{'after':>5} {'filled':>6} {'GiB':>6} {'estimate':>8}  status"
    ]
    for r in rows:
        lines.append(
            f"{r.name:<18} {number(r.tokens_per_second, ',.0f'):>7} "
            f"{number(r.bench_tokens_per_second, ',.0f'):>7} {number(r.ratio, '.3f'):>6} "
            f"{number(r.seconds_to_first_step, '.1f'):>8} {number(r.compilations, 'd'):>8} "
            f"{number(r.compilations_after_first, 'd'):>5} {number(r.filled_share, '.1%'):>6} "
            f"{number(r.peak_allocated_gib, '.1f'):>6} "
            f"{number(r.estimate_tokens_per_second, ',.0f'):>8}  {r.status} {r.error or r.peer or ''}"
        )
    return "\n".join(lines)


def measure(names: list[str], options: argparse.Namespace) -> list[RealRow]:
    """The rows of these runs, each kept as soon as it is known."""
    runs, bench, rows = runs_of(options.shrink), Bench(options), []
    last = time.monotonic() + 60 * options.total_minutes
    with tempfile.TemporaryDirectory(prefix="real_rows_") as folder:
        for item in names:
            if time.monotonic() > last:
                print(f"not run, for --total_minutes are over: {item}", flush=True)
                continue
            name, _, steps = item.partition(":")
            row = run_one(
                name, runs[name], int(steps or options.steps), Path(folder), bench, options
            )
            row.is_repeated = name in [r.name for r in rows]
            rows.append(row)
            print("\n".join(table([row]).splitlines()[1:]), flush=True)
            if row.log:
                print(row.log, flush=True)
            if options.results:
                append_row(row, options.results)
    print(table(rows))
    return rows


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """What to run; flags that are not known here are settings of each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=Path, help="folder of a checkpoint; a tokenizer is added if it has none"
    )
    parser.add_argument(
        "--only", default="packed_a,padded_a,auto_a", help="names, separated by commas"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--first", type=int, default=10, help="the first step that counts")
    parser.add_argument("--minutes", type=float, default=4.0, help="after which a run is stopped")
    parser.add_argument(
        "--total_minutes", type=float, default=math.inf, help="no run begins after them"
    )
    parser.add_argument("--bench_steps", type=int, default=5, help="0 leaves the bench out")
    parser.add_argument("--gpus", type=int, default=1, help="of each run of ours")
    parser.add_argument("--memory_gib", type=float, default=80.0, help="that a peer may take")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by so much")
    parser.add_argument("--logs", type=Path, help="folder for what runs print")
    parser.add_argument("--results")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model and short rows, on the CPU"
    )
    options, settings = parser.parse_known_args(argv)
    if options.tiny:
        vars(options).update(TINY)
    options.settings = (TINY_SETTINGS if options.tiny else []) + settings
    if not options.model and not options.tiny:
        parser.error("--model FOLDER is needed, or --tiny")
    names = [item.partition(":")[0] for item in options.only.split(",")]
    if unknown := [name for name in names if name not in runs_of(1)]:
        parser.error(f"--only {','.join(unknown)}: there are {', '.join(runs_of(1))}")
    return options


def main(argv: list[str] | None = None) -> list[RealRow]:
    options = parsed(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # which ends what it started
    with tempfile.TemporaryDirectory(prefix="real_rows_tiny_") as folder:
        if options.tiny and not options.model:
            options.model = Path(folder) / "tiny"
            tiny_model(options.model)
        if not (options.model / "tokenizer.json").exists():
            save_tokenizer(options.model)
        if options.logs:
            options.logs.mkdir(parents=True, exist_ok=True)
        return measure(options.only.split(","), options)


if __name__ == "__main__":
    main()
