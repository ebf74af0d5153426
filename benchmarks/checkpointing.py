"""What checkpoints cost a run, and how soon it goes on after a rank is killed.

    python benchmarks/checkpointing.py       # Llama 3.1 8B's shape on all visible GPUs, in /dev/shm
    python benchmarks/checkpointing.py /dev/shm/llama-8b --shape meta-llama/Llama-3.1-8B --gpus 2 \
        --steps 240 --results benchmarks/results/checkpointing_h100_$(date +%F).jsonl -- \
        --batch_size 2 --context_length 2048 --lora_dropout 0 --quantized_cache /dev/shm/quantized

Makes a random checkpoint of that shape if the folder is empty, trains QLoRA on random text with a
checkpoint every --every steps, kills a rank at half of the steps, and lets torchrun start again. Prints
one JSON line: seconds that a step was held up, seconds that a checkpoint cost in all (its step, the wait
and the step after it, which the write goes on beside, over two usual steps), bytes of a checkpoint,
seconds from the kill to the next step. The first checkpoint of each start is told apart, as it also
makes the host's buffers. Flags after -- go to train.py, in place of those above. The folder keeps the
model for the next time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAGS = ["--batch_size", "2", "--context_length", "2048", "--lora_dropout", "0"]


def make_inputs(folder: Path, shape: str, rows: int, words: int) -> Path:
    """The model and its tokenizer, if they are not there, and random text; the file of rows."""
    if not list(folder.glob("model.safetensors*")):  # the index is written last
        command = [sys.executable, "benchmarks/random_checkpoint.py", shape, str(folder)]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True)
    if not (folder / "tokenizer.json").exists():
        sys.path.insert(0, str(ROOT))
        from tests.tokenizers import save_tokenizer

        save_tokenizer(folder)
    rng, path = random.Random(0), folder / "rows.jsonl"
    lines = (json.dumps(dict(text="".join(rng.choices("abcdefgh ", k=words)))) for _ in range(rows))
    path.write_text("".join(line + "\n" for line in lines))
    return path


def environment() -> dict:
    """The environment with this repository's packages first."""
    return os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def start(options, out: Path, rows: Path, flags: list[str]) -> subprocess.Popen:
    """The run under torchrun, which may start it once more."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        str(options.gpus),
        "--max_restarts",
        "1",
        "--monitor_interval",
        "0.2",
        "train.py",
        "--model_name",
        str(options.folder),
        "--dataset",
        str(rows),
        "--train_on",
        "all",
        "--output_dir",
        str(out),
        "--max_steps",
        str(options.steps),
        "--checkpoint_every",
        str(options.every),
        "--checkpoint_minutes",
        "0",
        "--log_to",
        "jsonl",
        *flags,
    ]
    log = open(f"{out}.log", "w")  # noqa: SIM115  the process has it
    return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=log, stderr=log)


def records(out: Path) -> list[dict]:
    """The whole lines of metrics.jsonl."""
    if not (out / "metrics.jsonl").exists():
        return []
    found = []
    for line in (out / "metrics.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def last_step(out: Path) -> int:
    """The newest step that was logged."""
    return max((r["step"] for r in records(out) if r["kind"] == "step"), default=0)


def resumed_at(out: Path) -> int | None:
    """The step that the second start went on from, as the run says; None before."""
    found = re.search(r"resumed from .*: step (\d+) ", Path(f"{out}.log").read_text())
    return int(found[1]) if found else None


def ranks_of(run: subprocess.Popen) -> list[int]:
    """Process ids of the ranks."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    return [int(c) for c in children if "train.py" in Path(f"/proc/{c}/cmdline").read_text()]


def wait_for(condition, run: subprocess.Popen, what: str, out: Path, seconds: float = 560):
    """Poll; ends with the log's end if the run is over before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if (run.poll() or time.monotonic() > deadline) and not condition():
            run.kill()
            sys.exit(f"no {what}: {Path(f'{out}.log').read_text()[-3000:]}")
        time.sleep(0.05)


def measure(options, flags: list[str]) -> dict:
    """One run with a kill in its middle."""
    rows = make_inputs(options.folder, options.shape, options.rows, options.words)
    out = options.folder / f"run-{os.getpid()}"
    run = start(options, out, rows, flags)
    wait_for(lambda: last_step(out) >= options.steps // 2, run, "first half", out)
    os.kill(ranks_of(run)[-1], signal.SIGKILL)
    killed, step = time.monotonic(), last_step(out)
    wait_for(lambda: resumed_at(out) is not None, run, "restart", out)
    wait_for(lambda: last_step(out) > resumed_at(out), run, "step after the restart", out)
    to_next_step = time.monotonic() - killed
    wait_for(lambda: last_step(out) > step, run, "new step", out)
    to_new_step = time.monotonic() - killed
    if run.wait() != 0:
        sys.exit(Path(f"{out}.log").read_text()[-3000:])
    return figures(options, out, records(out)) | dict(
        step_when_killed=step,
        step_resumed=resumed_at(out),
        seconds_kill_to_next_step=round(to_next_step, 2),
        seconds_kill_to_new_step=round(to_new_step, 2),
    )


def figures(options, out: Path, found: list[dict]) -> dict:
    """What the finished run's metrics and checkpoints say."""
    first, held = held_up(found)
    seconds = statistics.median([r["seconds"] for r in found if r["kind"] == "step"][3:])
    lost = lost_to_checkpoints(found, seconds)
    newest = max((out / "checkpoints").glob("step-*"))
    size = sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())
    adapter = (newest / "adapter" / "adapter_model.safetensors").stat().st_size
    return dict(
        name="checkpointing",
        shape=options.shape,
        gpus=options.gpus,
        steps=options.steps,
        every=options.every,
        checkpoints=len(first + held),
        seconds_held_first=first,
        seconds_held_median=statistics.median(held),
        seconds_held_p95=held[min(len(held) - 1, int(0.95 * len(held)))],
        seconds_held_max=held[-1],
        seconds_per_step=seconds,
        seconds_lost=lost,
        bytes_checkpoint=size,
        bytes_adapter=adapter,
        date=str(date.today()),
    )


def held_up(found: list[dict]) -> tuple[list[float], list[float]]:
    """Seconds that the first checkpoint of each start held up its step; those of others, by size."""
    first, others, is_first = [], [], True
    for record in found:
        if record["kind"] == "start":
            is_first = True
        if record["kind"] != "checkpoint":
            continue
        (first if is_first else others).append(record["seconds_held"])
        is_first = False
    return first, sorted(others)


def lost_to_checkpoints(found: list[dict], usual: float) -> list[float]:
    """What each checkpoint between two steps cost, but for the first of a start."""
    found = [r for r in found if r["kind"] in ("start", "step", "checkpoint")]
    lost, is_first = [], True
    for before, saved, after in zip(found, found[1:], found[2:], strict=False):
        if before["kind"] == "start":
            is_first = True
        if saved["kind"] != "checkpoint":
            continue
        if not is_first and before["kind"] == after["kind"] == "step":
            lost.append(before["seconds"] + saved["seconds_held"] + after["seconds"] - 2 * usual)
        is_first = False
    return lost


def visible_gpus() -> int:
    """GPUs of this machine, or two ranks of its CPU."""
    import torch

    return torch.cuda.device_count() or 2


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("/dev/shm/llama-8b"))
    parser.add_argument("--shape", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--gpus", type=int, default=visible_gpus())
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--words", type=int, default=3000)
    parser.add_argument("--results", type=Path)
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    flags = flags or [*FLAGS, "--quantized_cache", str(options.folder / "quantized")]
    line = json.dumps(measure(options, flags))
    print(line)
    if options.results:
        with open(options.results, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
