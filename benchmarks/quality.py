"""Held-out loss after fine-tuning, by format of frozen weights, DoRA and fp8: two tasks, three seeds.

    python -m fsdp_qlora.demo.smollm2     # .cache/SmolLM2-135M-Instruct, the base of every run
    python benchmarks/quality.py --results benchmarks/results/quality_h200_DATE.jsonl --jobs 12

The tasks are the demo's, text to SQL with the demo's settings, scored on four times its held-out
questions; and the Python standard library's own source, as plain text in rows of 512 tokens, scored on
modules that are not trained on. Each run is `fsdp-qlora train` without its command line, in one of
`--jobs` processes that share the GPUs, and one JSON line of the results. Lines that are there are not
run again, so a command that was cut off goes on. Blocks are not compiled: compiling takes longer than
such a run. `python scripts/quality_page.py` makes docs/quality.md of the lines.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import multiprocessing
import os
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from quality_table import VARIANTS, tables

from fsdp_qlora.bench.measure import commit, device_name, versions
from fsdp_qlora.config import RunConfig
from fsdp_qlora.demo.run import RECIPE

# One process, a short run, and nothing written but the metrics.
COMMON = dict(
    RECIPE,
    sharding_strategy="ddp",
    compile=False,
    world_size=1,
    save_model=False,
    checkpoint_minutes=0.0,
    verify_frozen_minutes=0.0,
    resume="none",
    log_to="stdout",
)
TASKS = {
    "text_to_sql": dict(batch_size=16),
    "stdlib": dict(batch_size=8, global_batch_size=8, context_length=512, train_on="all", lr=1e-3),
}
STEPS = {"text_to_sql": 93, "stdlib": 100}  # one pass over the demo's rows; 0.3 million tokens
SQL_PER_KIND = 4  # held-out questions of each kind about each world; the demo asks one
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "turtledemo",
    "ensurepip",
    "pydoc_data",
    "encodings",
}  # of the library: tests, and what is mostly tables
CHARACTERS = 1500  # of a row of the library: nearly always below 512 tokens
STDLIB_ROWS = {"train": 2400, "heldout": 128}


@dataclass(frozen=True)
class Job:
    """One line of the results; without a seed it is the loss before any training."""

    task: str
    variant: str
    seed: int | None


def all_jobs(seeds: int) -> list[Job]:
    """Seed by seed, the important variants first: a command that is cut off leaves whole seeds."""
    runs = [
        [Job(task, variant, seed) for variant in VARIANTS for task in TASKS]
        for seed in [0, None, *range(1, seeds)]
    ]
    return [job for some in runs for job in some]


def config_of(job: Job, folder: Path, **given) -> RunConfig:
    """The settings of a run; data, token caches and metrics are in `folder`."""
    name = f"{job.task} {job.variant} {job.seed}".replace(",", "").replace(" ", "_")
    own = TASKS[job.task] | VARIANTS[job.variant]
    dataset = "text_to_sql" if job.task == "text_to_sql" else str(folder / "stdlib_train.jsonl")
    return RunConfig(
        **COMMON
        | own
        | dict(
            dataset=dataset,
            eval_dataset=str(folder / f"{job.task}_heldout.jsonl"),
            seed=job.seed or 0,
            data_cache=str(folder / "tokens"),
            output_dir=str(folder / name),
            max_steps=STEPS[job.task],
        )
        | given
    )


# ---- data --------------------------------------------------------------------------------------


def make_data(folder: Path, most: int | None = None):
    """Held-out questions of the demo's kind, and rows of the library; at most so many held out."""
    from fsdp_qlora.demo.make_text_to_sql import make_rows, write_rows
    from fsdp_qlora.demo.worlds import read_worlds

    folder.mkdir(parents=True, exist_ok=True)
    questions = make_rows(read_worlds(0), "held out", SQL_PER_KIND)
    write_rows(folder / "text_to_sql_heldout.jsonl", questions[:most])
    rows: dict[str, list[dict]] = {split: [] for split in STDLIB_ROWS}
    for split, text in stdlib_rows(Path(sysconfig.get_path("stdlib"))):
        rows[split].append({"text": text})
    for split, count in STDLIB_ROWS.items():
        some = random.Random(0).sample(rows[split], count)
        write_rows(folder / f"stdlib_{split}.jsonl", some[:most] if split == "heldout" else some)


def stdlib_rows(root: Path) -> Iterator[tuple[str, str]]:
    """(split, text) of all modules, in pieces of whole lines; about every twelfth module is held out."""
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED & set(name.parts):
            continue
        is_held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] % 12 == 0
        for text in pieces(path.read_text(errors="replace")):
            yield ("heldout" if is_held_out else "train"), text


def pieces(text: str) -> Iterator[str]:
    """A text in runs of whole lines of about CHARACTERS; the last, shorter one is left out."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > CHARACTERS:
            yield piece
            piece = ""
        piece += line


# ---- one run, in a process of its own ----------------------------------------------------------


def start_worker(jobs: int, started):
    """Each process has its share of the cores, and one GPU: processes take turns."""
    from fsdp_qlora.lifecycle.launcher import share_cores

    share_cores(jobs)
    with started.get_lock():
        number, started.value = started.value, started.value + 1
    if gpus := visible_gpus():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]


def visible_gpus() -> list[str]:
    """The GPUs of the command, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(n) for n in range(torch.cuda.device_count())]


def run(job: Job, config: RunConfig) -> dict:
    """The line of a job; what the run prints is in `log.txt` beside its metrics."""
    import torch

    output, started = Path(config.output_dir), time.perf_counter()
    output.mkdir(parents=True, exist_ok=True)
    (output / "metrics.jsonl").unlink(missing_ok=True)
    row = asdict(job) | dict(status="ok")
    with open(output / "log.txt", "w") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            row |= before(config) if job.seed is None else trained(config)
        except Exception as error:  # the others go on, and the line says what it was
            row |= dict(status="error", error=f"{type(error).__name__}: {error}".splitlines()[0])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return row | dict(run_seconds=round(time.perf_counter() - started, 1))


def trained(config: RunConfig) -> dict:
    """Train as the command does; what its metrics say."""
    from fsdp_qlora.training.rank import train_rank

    train_rank(config)
    lines = map(json.loads, (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines())
    by_kind: dict[str, list[dict]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    steps, end = by_kind["step"], by_kind["eval"][-1]
    return dict(
        steps=len(steps),
        held_out_loss=end["eval_loss"],
        held_out_tokens=end["trained_tokens"],
        seconds_per_step=sorted(s["seconds"] for s in steps)[len(steps) // 2],
        peak_allocated_gib=steps[-1]["peak_allocated_gib"],
        losses=[round(s["loss"], 5) for s in steps],
    )


def before(config: RunConfig) -> dict:
    """The loss on held-out rows of a base whose adapter gives nothing yet."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.data import choose_pad_token_id
    from fsdp_qlora.dist import process_group, rank_device
    from fsdp_qlora.observe.evaluate import held_out_loss
    from fsdp_qlora.preflight.run_data import load_data, run_tokenizer

    device, tokenizer = rank_device(config.device), run_tokenizer(config)
    held_out = load_data(config, tokenizer).held_out
    with process_group(device):
        model = build_model(config, device)
        pad = choose_pad_token_id(tokenizer, model.config.vocab_size)
        loss, tokens = held_out_loss(
            model, held_out, device, batch_size=config.batch_size, pad_token_id=pad
        )
    return dict(steps=0, held_out_loss=loss, held_out_tokens=tokens)


# ---- the grid ----------------------------------------------------------------------------------


def finished(results: Path, **of) -> set[Job]:
    """The jobs whose line is there and is no error; only lines that say `of`."""
    if not results.exists():
        return set()
    rows = map(json.loads, results.read_text().splitlines())
    return {
        Job(r["task"], r["variant"], r["seed"])
        for r in rows
        if "variant" in r
        and r["status"] == "ok"
        and all(r[name] == value for name, value in of.items())
    }


def run_grid(jobs: dict[Job, RunConfig], options: argparse.Namespace, about: dict):
    """Run jobs side by side and write a line as each ends; start none that would end too late."""
    started, longest, running = time.perf_counter(), 0.0, {}
    spawn = multiprocessing.get_context("spawn")
    workers = (options.processes, spawn.Value("i", 0))
    with ProcessPoolExecutor(options.processes, spawn, start_worker, workers) as pool:
        waiting = iter(jobs)
        while True:
            while len(running) < options.processes:
                late = time.perf_counter() - started + longest > options.seconds
                job = None if late else next(waiting, None)
                if job is None:
                    break
                running[pool.submit(run, job, jobs[job])] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                row, job = future.result(), running.pop(future)
                longest = max(longest, row["run_seconds"])
                with open(options.results, "a") as file:
                    file.write(json.dumps(row | about) + "\n")
                print(
                    f"{time.perf_counter() - started:6.0f} s  {job.task} | {job.variant} | seed "
                    f"{job.seed}: {row.get('held_out_loss', row.get('error'))} in "
                    f"{row['run_seconds']} s",
                    flush=True,
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; grows")
    parser.add_argument("--model_name", default=".cache/SmolLM2-135M-Instruct")
    parser.add_argument("--jobs", type=int, default=12, dest="processes", help="runs side by side")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="start no run that would end later"
    )
    parser.add_argument("--only", default="", help="jobs with this in `TASK, VARIANT`")
    parser.add_argument("--steps", type=int, help="of every run, with 16 rows held out: a trial")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".cache/quality"),
        help="data, and metrics and log of each run",
    )
    options = parser.parse_args()
    given = dict(model_name=options.model_name, device=options.device)
    if options.steps:
        given["max_steps"] = options.steps
    make_data(options.folder, 16 if options.steps else None)
    tokenize([config_of(Job(task, "bf16", 0), options.folder, **given) for task in TASKS])
    done = finished(options.results)
    jobs = {
        job: config_of(job, options.folder, **given)
        for job in all_jobs(options.seeds)
        if options.only in f"{job.task}, {job.variant}" and job not in done
    }
    run_grid(jobs, options, about(options))
    print("\n" + tables([json.loads(line) for line in options.results.read_text().splitlines()]))


def tokenize(configs: list[RunConfig]):
    """Fill the cache of tokens before many processes read it."""
    from fsdp_qlora.preflight.run_data import load_data, run_tokenizer

    for config in configs:
        load_data(config, run_tokenizer(config))


def weights_of(folder: str) -> str | None:
    """What tells one base from another that was made by the same command; None of a hub's model."""
    files = sorted(Path(folder).glob("*.safetensors"))
    whole = b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)
    return hashlib.sha256(whole).hexdigest()[:12] if files else None


def about(options: argparse.Namespace) -> dict:
    """What every line says of where it was made."""
    from fsdp_qlora.dist import rank_device

    return dict(
        model=Path(options.model_name).name,
        weights=weights_of(options.model_name),
        gpu=device_name(rank_device(options.device)),
        commit=commit(),
        date=time.strftime("%Y-%m-%d"),
        processes=options.processes,
        versions=versions() | dict(python=sys.version.split()[0]),
    )


if __name__ == "__main__":
    main()
