"""A GPU's memory over one step by what it is for, read from torch's record of allocations.

The record (`torch.cuda.memory._record_memory_history`) has each allocation with the Python lines
that asked for it. What was there before is known by its address; what comes and goes is told by
those lines, and gradients by where the optimizer finds them.
https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PARTS = (
    "weights",
    "adapters",
    "optimizer",
    "gradients",
    "activations",
    "unsharded",
    "logits",
    "other",
)
# The first rule that any frame of an allocation fits.
_RULES = (  # (file, start of the function's name, part)
    ("_fsdp_collectives.py", "foreach_reduce", "gradients"),
    ("_fsdp_collectives.py", "", "unsharded"),
    ("_fsdp_param_group.py", "post_backward", "gradients"),
    ("_fsdp_param_group.py", "", "unsharded"),
    ("_fsdp_param.py", "", "unsharded"),
    ("vocab_parallel.py", "gathered_weight", "unsharded"),
    ("chunked_cross_entropy.py", "_loss_", "logits"),
    ("chunked_cross_entropy.py", "forward", "logits"),
    ("chunked_cross_entropy.py", "backward", "logits"),
    ("fsdp.py", "reduce", "gradients"),
    ("step.py", "clip_gradients", "other"),
)

_RULED = {file for file, _, _ in _RULES}


@dataclass(frozen=True)
class Timeline:
    """Bytes by part after each allocation and release of a step."""

    times: list[float]  # seconds from its start
    parts: dict[str, list[int]]  # PARTS -> bytes at each time

    @property
    def peak(self) -> int:
        """The index of the time at which most is allocated."""
        totals = [sum(values) for values in zip(*self.parts.values(), strict=True)]
        return max(range(len(totals)), key=totals.__getitem__)

    def at_peak(self) -> dict[str, int]:
        """Bytes by part at the peak."""
        return {part: values[self.peak] for part, values in self.parts.items()}


def part_of(frames: list[Mapping]) -> str:
    """What an allocation is for, by the frames that led to it."""
    where = [(frame["filename"].rpartition("/")[2], frame["name"]) for frame in frames]
    where = [(file, name) for file, name in where if file in _RULED]
    for ruled, function, part in _RULES:
        if any(file == ruled and name.startswith(function) for file, name in where):
            return part
    return "optimizer" if any("/optim/" in f["filename"] for f in frames) else "activations"


def timeline(
    events: list[Mapping],
    standing: Mapping[int, tuple[int, str]],
    allocated: int,
    gradients: set[int] = frozenset(),
    optimizer_time: float = 0.0,
) -> Timeline:
    """The timeline of a record of allocations.

    events: torch's, in their order. standing: address -> (bytes, part) of known tensors that were
    there before, when `allocated` bytes were in use. gradients: addresses of gradients at
    `optimizer_time`, in microseconds as the events have it.
    """
    found = {id(e) for e in _gradient_events(events, gradients, optimizer_time)}
    now = dict.fromkeys(PARTS, 0)
    for size, part in standing.values():
        now[part] += size
    now["other"] = max(0, allocated - sum(now.values()))
    live = dict(standing)
    times, series = [], {part: [] for part in PARTS}
    moves = [e for e in events if e["action"] in ("alloc", "free_requested")]
    for event in moves:
        if event["action"] == "alloc":
            part = "gradients" if id(event) in found else part_of(event.get("frames", ()))
            live[event["addr"]] = event["size"], part
            now[part] += event["size"]
        else:
            size, part = live.pop(event["addr"], (event["size"], "other"))
            now[part] -= size
        times.append((event["time_us"] - moves[0]["time_us"]) / 1e6)
        for name in PARTS:
            series[name].append(now[name])
    return Timeline(times, series)


def _gradient_events(
    events: list[Mapping], gradients: set[int], optimizer_time: float
) -> list[Mapping]:
    """The allocations that held gradients when the optimizer began."""
    last: dict[int, Mapping] = {}
    for event in events:
        if event["time_us"] > optimizer_time:
            break
        if event["action"] == "alloc" and event["addr"] in gradients:
            last[event["addr"]] = event
    return list(last.values())


def draw(found: Timeline, path: str | Path, title: str = "") -> bool:
    """The timeline as a PNG; False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keep = sorted({*range(0, len(found.times), max(1, len(found.times) // 4000)), found.peak})
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    axes.stackplot(
        [found.times[i] for i in keep],
        [[values[i] / 2**30 for i in keep] for values in found.parts.values()],
        labels=found.parts,
        step="post",
        linewidth=0,
        colors=plt.get_cmap("tab10").colors[: len(PARTS)],
    )
    axes.axvline(found.times[found.peak], color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="seconds of the step", ylabel="GiB allocated", title=title)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return True
