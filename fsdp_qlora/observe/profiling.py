"""`--profile`: a trace of some steps, a table of where their time goes, and a memory snapshot.

Every rank writes `trace_steps_A-B_rank_R.json.gz` into --profiling_output, for https://ui.perfetto.dev;
rank 0 prints the table and keeps it beside, with a picture of the streams. On a GPU the warm-up steps
before give `memory_..._rank_R.pickle`, for https://pytorch.org/memory_viz: recording memory slows the
host, so it must not run while the trace does.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from ..config import RunConfig
from ..config.settings import counted
from ..dist import print_main, ranks_from_env
from .trace import Span, device_spans, number_of_steps, summarize, summary_table


def phase(step: int, config: RunConfig) -> ProfilerAction:
    """What the profiler does in step `step`, from 0.

    After --wait_steps, each recording is --warmup_steps, then --active_steps; the next one begins
    --profiling_frequency steps after it began, --repeat times or (0) as long as the run.
    """
    recorded = config.warmup_steps + config.active_steps
    cycle, place = divmod(step - config.wait_steps, max(config.profiling_frequency, recorded))
    if cycle < 0 or config.repeat and cycle >= config.repeat or place >= recorded:
        return ProfilerAction.NONE
    if place < config.warmup_steps:
        return ProfilerAction.WARMUP
    return ProfilerAction.RECORD_AND_SAVE if place == recorded - 1 else ProfilerAction.RECORD


@contextmanager
def step_profiler(config: RunConfig, device: torch.device) -> Iterator[Callable[[], None]]:
    """A function to call after each optimizer step; it does nothing without --profile."""
    if not config.profile:
        yield lambda: None
        return
    # Kineto prints each start and stop as "USDT: ..."; a level that is set is the user's.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    folder = Path(config.profiling_output)
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    memory = _MemoryRecorder(config, folder, device)
    with torch.profiler.profile(
        activities=activities,
        schedule=lambda step: phase(step, config),
        on_trace_ready=lambda p: _keep_trace(p, folder, config, device),
        record_shapes=config.with_shapes,
        with_stack=config.with_stack,
        acc_events=True,
    ) as profiler:
        memory.enter(0)

        def step_done():
            memory.enter(profiler.step_num + 1)
            profiler.step()

        yield step_done
        steps = profiler.step_num
    first = config.wait_steps + config.warmup_steps
    if steps <= first:
        print_main(
            f"warning: --profile recorded nothing: the run ended after {counted(steps, 'step')}, "
            f"but recording starts after {first}; lower --wait_steps or --warmup_steps"
        )


def profile_steps(config: RunConfig, device: torch.device, step: Callable[[], object]):
    """One recording of more steps after a benchmark's, whose times it must not touch."""
    with step_profiler(replace(config, wait_steps=0, repeat=1), device) as step_done:
        for _ in range(config.warmup_steps + config.active_steps):
            step()
            step_done()


def _keep_trace(profiler, folder: Path, config: RunConfig, device: torch.device):
    """Write a recording's trace; rank 0 sums it up."""
    rank, last = ranks_from_env(), profiler.step_num
    name = f"steps_{max(last - config.active_steps, 0) + 1}-{last}_rank_{rank.rank}"
    path = folder / f"trace_{name}.json.gz"
    profiler.export_chrome_trace(str(path))
    if not rank.is_main:
        return
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    if device.type == "cuda" and not any(e.get("cat") == "kernel" for e in events):
        print(
            "warning: --profile recorded no GPU kernels, only the CPU; set KINETO_LOG_LEVEL=0 to "
            "see why",
            flush=True,
        )
    spans = device_spans(events)
    text = summary_table(summarize(spans, number_of_steps(events) or 1))
    (folder / f"table_{name}.txt").write_text(text + "\n")
    print(f"{text}\ntrace: {path}", flush=True)
    _plot_streams(spans, folder / f"streams_{name}.png")


class _MemoryRecorder:
    """Records allocations on a GPU in the warm-up steps, and writes them when these end."""

    def __init__(self, config: RunConfig, folder: Path, device: torch.device):
        self.config, self.folder, self.first = config, folder, None
        self.on_gpu = device.type == "cuda"

    def enter(self, step: int):
        """Begin step `step`, from 0."""
        warming = phase(step, self.config) is ProfilerAction.WARMUP
        if not self.on_gpu or warming == (self.first is not None):
            return
        if warming:
            self.first = step + 1
            # A stack for each release too would lose the exception by which checkpointing stops a
            # recomputation early (https://github.com/pytorch/pytorch/issues/179536).
            torch.cuda.memory._record_memory_history(
                "all", context="alloc", stacks="python", max_entries=200_000
            )
            return
        name = f"memory_steps_{self.first}-{step}_rank_{ranks_from_env().rank}.pickle"
        torch.cuda.memory._dump_snapshot(str(self.folder / name))
        torch.cuda.memory._record_memory_history(enabled=None)
        self.first = None


def _plot_streams(spans: list[Span], path: Path) -> bool:
    """Draw what each stream does over time as a PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    streams = sorted({span.stream for span in spans})
    if not streams:
        return False
    figure, axes = plt.subplots(figsize=(12, 1 + 0.5 * len(streams)), layout="constrained")
    colors = {"computing": "#1f5a99", "communication": "#c2571a", "copies": "#6f9e5b"}
    for what, color in colors.items():
        for row, stream in enumerate(streams):
            own = [s for s in spans if s.stream == stream and _drawn_as(s) == what]
            axes.broken_barh(
                [((s.start - spans[0].start) / 1e3, (s.end - s.start) / 1e3) for s in own],
                (row - 0.4, 0.8),
                color=color,
                label=what if own else None,
            )
    handles = {label: bar for bar, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(handles.values(), handles.keys(), frameon=False, loc="upper right", ncols=3)
    axes.set(
        xlabel="milliseconds",
        yticks=range(len(streams)),
        yticklabels=[f"stream {s}" for s in streams],
        ylim=(-0.6, len(streams)),
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True


def _drawn_as(span: Span) -> str:
    """The color class of a span."""
    if span.is_communication:
        return "communication"
    return "computing" if span.is_compute else "copies"
