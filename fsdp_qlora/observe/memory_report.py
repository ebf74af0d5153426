"""--profile_memory: where a GPU's memory goes in a step, beside the estimate; and out of memory, what
next.

The second step of a process is recorded: in the first one kernels are compiled and the optimizer has
no states.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, nullcontext
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from ..adapters import trainable_parameters
from ..adapters.fp8_layers import cached_fp8_tensors
from ..config import RunConfig
from ..config.settings import shown
from ..data import Step
from ..dist import local_rows, print_main, ranks_from_env
from ..estimate import Memory, memory
from ..model.blocks import base_model
from ..plan import Plan
from ..planner import savings
from .memory_timeline import PARTS, Timeline, draw, timeline
from .throughput import shape_of

_RECORDED_STEP = 2
GIB = 2**30
# What the estimate calls the parts of a timeline.
ESTIMATED = dict(
    weights=("linears", "absmax", "fp8", "embedding", "head", "norms"),
    adapters=("adapters",),
    optimizer=("optimizer",),
    gradients=("gradients",),
    activations=("activations", "working"),
    unsharded=("unsharded",),
    logits=("loss",),
    other=("workspace",),
)


class MemoryWatch:
    """Records the memory of one step of a run, and gives advice when a step does not fit."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ):
        self.config, self.plan, self.model = config, plan, model
        self.optimizer, self.device = optimizer, device
        self.taken = 0  # steps of this process
        if config.profile_memory and device.type != "cuda":
            print_main("--profile_memory needs a GPU: torch records no other device's memory")

    @contextmanager
    def step(self, step: Step):
        """Around one step of a run.

        Raises ValueError, with the remedy, where the GPU's memory is not enough.
        """
        self.taken += 1
        records = self.config.profile_memory and self.device.type == "cuda"
        try:
            with self.recording() if records and self.taken == _RECORDED_STEP else nullcontext():
                yield
        except torch.OutOfMemoryError as error:
            raise ValueError(_out_of_memory(self.plan, self.model, step)) from error

    @contextmanager
    def recording(self):
        """Record a step, then print the table and draw the picture on rank 0."""
        seen = Gradients(self.optimizer)
        standing = _standing_tensors(self.model, self.optimizer, self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
        try:
            yield
            events = torch.cuda.memory._snapshot(self.device)["device_traces"][
                self.device.index or 0
            ]
        finally:
            torch.cuda.memory._record_memory_history(None)
            seen.hook.remove()
        found = timeline(events, standing, allocated, seen.addresses, seen.time)
        print_main(
            memory_table(
                found,
                torch.cuda.max_memory_reserved(self.device),
                estimated(self.plan, self.model),
            )
        )
        if ranks_from_env().is_main:
            self.save_picture(found)

    def save_picture(self, found: Timeline):
        """The timeline beside the run's other outputs."""
        path = Path(self.config.output_dir) / "memory.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if draw(found, path, f"{Path(self.config.model_name).name}, step {_RECORDED_STEP}"):
            print(f"memory over the step: {path}")
        else:
            print("run `pip install matplotlib` for a plot of it")


class Gradients:
    """Where the gradients are, and when, as the optimizer begins its step."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.addresses: set[int] = set()
        self.time = 0.0
        self.hook = optimizer.register_step_pre_hook(self.look)

    def look(self, optimizer, *_):
        grads = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        self.addresses = {address(g) for g in grads}
        self.time = time.time_ns() / 1e3


def address(tensor: Tensor) -> int:
    """Where this rank's part of a tensor is allocated."""
    return local_rows(tensor)[0].untyped_storage().data_ptr() if tensor.dim() else tensor.data_ptr()


def _standing_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> dict[int, tuple[int, str]]:
    """Address -> (bytes, part) of what is on the GPU between steps."""
    trained = set(trainable_parameters(model).values())
    adapted = base_model(model) is not model
    found = {}

    def add(tensor: Tensor, part: str):
        local = local_rows(tensor)[0] if tensor.dim() else tensor
        if local.device.type != device.type:
            return
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes(), part

    for p in model.parameters():
        add(p, "adapters" if adapted and p in trained else "weights")
    for b in model.buffers():
        add(b, "weights")
    for t in cached_fp8_tensors(model):
        add(t, "weights")
    for states in optimizer.state.values():
        for value in states.values():
            if isinstance(value, Tensor):
                add(value, "optimizer")
    return found


def estimated(plan: Plan, model: nn.Module) -> Memory:
    """What the estimate says of this run."""
    return memory(shape_of(model, plan), plan)


def _by_part(estimate: Memory) -> dict[str, float]:
    """The estimate's GiB in a timeline's parts."""
    return {part: sum(estimate.parts[name] for name in names) for part, names in ESTIMATED.items()}


def memory_table(found: Timeline, reserved: int, estimate: Memory) -> str:
    """Measured parts at the step's peak beside the estimate's, in lines for people."""
    measured, predicted = found.at_peak(), _by_part(estimate)
    lines = [
        f"memory at the peak of step {_RECORDED_STEP}, rank 0",
        f"{'part':<12} {'measured':>12} {'estimate':>12}",
    ]
    rows = [(part, measured[part] / GIB, predicted[part]) for part in PARTS]
    total = sum(measured.values()) / GIB
    rows += [
        ("allocated", total, estimate.peak_allocated),
        ("slack", reserved / GIB - total, estimate.parts["slack"]),
    ]
    return "\n".join(
        lines + [f"{name:<12} {gib:8.2f} GiB {guess:8.2f} GiB" for name, gib, guess in rows]
    )


# ---- out of memory -----------------------------------------------------------------------------


def _out_of_memory(plan: Plan, model: nn.Module, step: Step) -> str:
    """Which part was the largest by the estimate, and the next rung of the guide, in one line."""
    rows, tokens = max((tuple(b["input_ids"].shape) for b in step.micro_batches), key=prod)
    return (
        f"GPU memory ran out in step {step.index + 1} at a micro-batch of {rows} x {tokens} "
        f"tokens: {_largest_part(plan, model)}next option: "
        f"{_next_rung(plan)}; the run then resumes from its last "
        "checkpoint"
    )


def _largest_part(plan: Plan, model: nn.Module) -> str:
    """What takes most by the estimate, as part of a sentence; nothing of a model it does not know."""
    try:
        estimate = estimated(plan, model)
    except ValueError:
        return ""
    parts = _by_part(estimate)
    largest = max(parts, key=parts.get)
    return (
        f"by the estimate, {largest} take the most, {parts[largest]:.1f} of "
        f"{estimate.total:.1f} GiB; "
    )


def _next_rung(plan: Plan) -> str:
    """The first step of the planner's ladder that this run has not taken, then what lies beyond it."""
    if plan.quantization.keep_fp8_weights:
        return "--keep_fp8_weights false"
    for name, value in savings().items():
        if plan.setting(name) == value:
            continue
        if name == "sharding_strategy" and plan.sharding.world_size == 1:
            continue  # nothing to split
        shard = name == "use_cpu_offload" and plan.sharding.strategy != "full_shard"
        return f"{'--sharding_strategy full_shard ' * shard}--{name} {shown(value)}"
    if not plan.memory.trained_offload:
        return "--use_trained_cpu_offload true"
    rows, length = plan.batch.micro_batch_size, plan.batch.context_length
    if rows > 1:
        return f"--batch_size {rows // 2}, with more --gradient_accumulation_steps"
    return f"a --context_length below {length}, or more GPUs"
