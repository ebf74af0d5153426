r"""Steps of a mixture of experts on one GPU: tokens per second, memory by what holds it, time by kernel.

    python benchmarks/experts.py
    python benchmarks/experts.py experts --layers 12 --compute_dtype fp8
    python benchmarks/experts.py attention --model mistralai/Mixtral-8x7B-v0.1 --context_length 2048

"attention" adapts the attention's layers, "experts" also the experts. Settings of a run
(`--activation_policy keep_linears`) replace those of the row; `--model` is any known model, with random
weights and `--layers` of its blocks. The step is the one that train and bench run.

After the row come the tensors that were alive when a step held most, by the line that made them (for
compiled code, the generated line), and the kernels of one step by their time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import linecache
import pickle
import tempfile
from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path

import torch
from one_rank import settings_of
from speed_rows import config_folder, measured_row

from fsdp_qlora.bench.measure import summary
from fsdp_qlora.bench.row import BenchRow, append_row
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group, rank_device

CASES = {"attention": {}, "experts": dict(lora_target_parameters="experts", lora_rank=16)}
COMMON = dict(
    random_weights=True,
    lora_dropout=0.0,
    gradient_accumulation_steps=1,
    lora_target_modules="q_proj,k_proj,v_proj,o_proj",
    sharding_strategy="ddp",
    activation_policy="recompute_all",
    batch_size=2,
    context_length=4096,
)
_GIB = 2**30
_OWN = ("fsdp_qlora", "torchinductor", "transformers", "peft", "torch/optim")


def alive_at_peak(snapshot: dict) -> tuple[int, int, Counter, Counter]:
    """Of a memory snapshot: bytes before it and at its peak, then bytes and tensors by their maker."""
    (events,) = [trace for trace in snapshot["device_traces"] if trace]
    sign = {"alloc": 1, "free_completed": -1}
    changes = [sign.get(event["action"], 0) * event["size"] for event in events]
    held = list(accumulate(changes, initial=0))
    peak = max(range(len(held)), key=held.__getitem__)
    alive = {}
    for event in events[:peak]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    sizes, counts = Counter(), Counter()
    for event in alive.values():
        line = _maker(event.get("frames", ()))
        sizes[line] += event["size"]
        counts[line] += 1
    before = sum(s["allocated_size"] for s in snapshot["segments"]) - held[-1]
    return before, before + held[peak], sizes, counts


def _maker(frames) -> str:
    """The innermost line of a stack that is the project's, a library's or generated."""
    for frame in frames:
        file = frame["filename"]
        if any(own in file for own in _OWN):
            text = linecache.getline(file, frame["line"]).strip()
            place = "/".join(Path(file).parts[-2:])
            return f"{place}:{frame['line']} {frame['name']}: {text[:90]}"
    return "elsewhere"


def memory_table(folder: Path, rows: int) -> str:
    """What was alive at the peak of the recorded steps; empty where nothing was recorded (no GPU)."""
    lines = []
    for path in folder.glob("memory_*.pickle"):
        before, peak, sizes, counts = alive_at_peak(pickle.loads(path.read_bytes()))
        lines += [f"peak {peak / _GIB:.2f} GiB, of which {before / _GIB:.2f} before the step"]
        lines += [
            f"{size / _GIB:9.3f} GiB {counts[line]:5d}x  {line}"
            for line, size in sizes.most_common(rows)
        ]
    return "\n".join(lines)


def kernel_table(folder: Path, rows: int) -> str:
    """Milliseconds and calls of one step by kernel; of torch's operators on a CPU."""
    lines = []
    for path in folder.glob("trace_*.json.gz"):
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        times = defaultdict(list)
        for event in on_gpu or [e for e in events if e.get("cat") == "cpu_op"]:
            times[event["name"]].append(event.get("dur", 0) / 1e3)
        total = sum(map(sum, times.values()))
        lines += [f"{total:.1f} ms in {sum(map(len, times.values()))} kernels"]
        lines += [
            f"{sum(ms):9.2f} ms {len(ms):6d}x {sum(ms) / len(ms):8.3f} each  {name[:110]}"
            for name, ms in sorted(times.items(), key=lambda item: -sum(item[1]))[:rows]
        ]
    return "\n".join(lines)


def run_case(name: str, folder: str, options: argparse.Namespace, **changes) -> BenchRow:
    """Measure a case and print its tables."""
    with tempfile.TemporaryDirectory() as profiles:
        settings = COMMON | CASES[name] | settings_of(options.settings) | changes
        settings |= dict(profile=options.tables, active_steps=1, profiling_output=profiles)
        config = RunConfig(model_name=folder, **settings)
        device = rank_device(config.device)
        with process_group(device, config.timeout_minutes):
            row = measured_row(f"{Path(folder).name}, {name}", config, options, device)
        print(
            f"{summary(row)}  reserved {row.peak_reserved_gib or 0:.2f} GiB",
            memory_table(Path(profiles), options.rows),
            kernel_table(Path(profiles), options.rows),
            sep="\n",
            flush=True,
        )
    if options.results:
        append_row(row, options.results)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"{', '.join(CASES)}; all if none is named")
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
    parser.add_argument("--layers", type=int, help="cut the model to so many")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rows", type=int, default=40, help="lines of each table")
    parser.add_argument("--tables", choices=("true", "false"), default="true")
    parser.add_argument("--results")
    options, options.settings = parser.parse_known_args()
    options.tables = options.tables == "true"
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case is named {', '.join(unknown)}; there are {', '.join(CASES)}")
    print(f"torch {torch.__version__}", flush=True)
    for name in options.cases or CASES:
        run_case(name, config_folder(options.model, options.layers), options)


if __name__ == "__main__":
    main()
