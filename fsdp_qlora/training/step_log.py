"""Turns the result of a step into its metrics, a step late on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..observe.compilations import compile_seconds, compiled_graphs, say_what_runs_eager
from ..observe.device_timer import mark, seconds_between
from ..observe.metrics import StepMetrics
from ..observe.runlog import RunLog
from ..observe.throughput import Arithmetic
from .step import StepResult


class LaggedLog:
    """Logs each step when the next one is under way; on the CPU, where a step is done at once, then.

    Reading a loss waits for the GPU. Reading it a step late leaves the host free to queue work ahead,
    so the GPU never waits for the host between steps.
    """

    def __init__(
        self,
        log: RunLog,
        device: torch.device,
        was_read: Callable[[StepMetrics], None] = lambda _: None,
        arithmetic: Arithmetic | None = None,
    ):
        self.log, self.device, self.pending, self.was_read = log, device, None, was_read
        self.arithmetic = arithmetic
        self.restart_clock()

    def restart_clock(self):
        """Count the next step's seconds from now."""
        self.done, self.compiled = mark(self.device), compile_seconds()

    def compile_seconds(self) -> float:
        """Seconds that torch compiled since the clock was last restarted."""
        return compile_seconds() - self.compiled

    def add(self, number: int, lr: float, rows: int, tokens: int, result: StepResult):
        """Take a step that was queued, of so many rows and tokens of theirs, and log the one before."""
        self.flush()
        self.pending = number, lr, rows, tokens, result, mark(self.device), compiled_graphs()
        if self.device.type == "cpu":
            self.flush()

    def flush(self):
        """Log the step that is waiting, if there is one."""
        if self.pending is None:
            return
        number, lr, rows, tokens, result, done, compilations = self.pending
        result.loss_and_norm = result.loss_and_norm.cpu()  # waits until the step is done
        before, self.done = self.done, done
        seconds = seconds_between(before, done)
        metrics = _step_metrics(number, lr, tokens, result, seconds, self.device)
        metrics = replace(metrics, compilations=compilations)
        if self.arithmetic:
            metrics = replace(metrics, **self.arithmetic.of_step(tokens, rows, seconds))
        self.pending = None
        self.log.log(metrics)
        say_what_runs_eager()
        self.was_read(metrics)


def _step_metrics(
    number: int, lr: float, tokens: int, result: StepResult, seconds: float, device: torch.device
) -> StepMetrics:
    """A step's result with its time and memory; `tokens` are the rows' own."""
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    busiest, idle = (None, None) if result.expert_load is None else result.expert_load.tolist()
    return StepMetrics(
        step=number,
        loss=result.loss,
        lr=lr,
        grad_norm=result.grad_norm,
        trained_tokens=result.trained_tokens,
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        peak_allocated_gib=peak,
        padded_tokens=result.tokens,
        busiest_expert_share=busiest,
        idle_expert_share=idle,
        token_accuracy=result.token_accuracy,
        loss_scale=None if result.loss_scale is None else result.loss_scale.item(),
    )
