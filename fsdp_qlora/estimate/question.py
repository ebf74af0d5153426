"""One question to the estimates: this model, on this machine, with these settings; and its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from ..catalog.arch import ModelShape
from ..catalog.llama_pro import expanded_shape
from ..catalog.machine import Machine
from ..config import AUTO, RunConfig
from ..config.run import check_kept_stay
from .cost import RunCost, run_cost
from .lengths import Batches, Rows, batches_of, with_longest_row
from .peak import Memory, memory
from .policies import SPARE_SHARE, choose_policies, choose_tiles, keeps_fp8_weights
from .setup import Setup, check_context, setup_from_config
from .speed import StepTime, step_seconds
from .weights import trained_on_host


@dataclass(frozen=True)
class Estimate:
    """Memory and time of one configuration on one machine."""

    shape: ModelShape
    machine: Machine
    config: RunConfig
    setup: Setup
    memory: Memory
    step: StepTime  # its tokens are the rows' own where `batches` is known
    batches: Batches | None = None  # None: rows are taken as full

    @property
    def fits(self) -> bool:
        """True if the GPUs, and the host where its memory is known, hold it."""
        return self.fits_gpu and self.fits_host

    @property
    def fits_gpu(self) -> bool:
        """Judged on reserved memory, the CUDA context and NCCL's buffers."""
        return self.memory.fits(self.machine.memory_gib)

    @property
    def fits_host(self) -> bool:
        """True also where the host's memory is not known."""
        limit = self.machine.host_memory_gib
        return limit is None or self.memory.host <= limit

    @property
    def rows_per_second(self) -> float:
        """Rows of --context_length tokens, over all GPUs."""
        setup = self.setup
        return setup.batch_size * setup.accumulation * setup.world_size / self.step.total

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run over its data; None where that is not known."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        if not self.batches or self.batches.steps is None:
            return None
        return self.batches.steps * self.config.num_epochs

    @property
    def epochs(self) -> float | None:
        """Times that the run goes over its data; None where the end of it is not known."""
        if not self.batches or not self.batches.steps:
            return None
        return (
            self.config.max_steps / self.batches.steps
            if self.config.max_steps > 0
            else float(self.config.num_epochs)
        )

    def run_of_data(self, rows: Rows) -> RunCost | None:
        """Hours and dollars of the run over its data; None where the end of a stream is not known."""
        if not rows.num_rows or self.epochs is None:
            return None
        return run_cost(
            self.step,
            self.machine.gpu,
            gpus=self.machine.world_size,
            examples=rows.num_rows,
            length=rows.mean_length,
            epochs=self.epochs,
            price_per_hour=self.config.price_per_hour,
        )

    def run(self, examples: int, rows: Rows | None = None) -> RunCost:
        """Hours and dollars to train on so many rows like `rows`, or full ones, --num_epochs times."""
        if examples < 1:
            raise ValueError(f"--examples must be 1 or more, got {examples}")
        return run_cost(
            self.step,
            self.machine.gpu,
            gpus=self.machine.world_size,
            examples=examples,
            length=rows.mean_length if rows else self.config.context_length,
            epochs=self.config.num_epochs,
            price_per_hour=self.config.price_per_hour,
        )


def estimate(
    shape: ModelShape, machine: Machine, config: RunConfig, rows: Rows | None = None
) -> Estimate:
    """The answer: memory for the longest of `rows`, time for all; full rows where none are known.

    Raises ValueError, naming the flag, for settings that the model or GPU can't do.
    """
    shape = expanded_shape(shape, config)
    _check_question(shape, machine, config)
    setup = asked_setup(shape, machine, with_longest_row(config, rows))
    check_context(shape, setup)
    config, setup = with_choices(shape, machine, config, setup)
    batches = batches_of(rows, config, machine.world_size) if rows else None
    step = step_seconds(
        shape,
        machine.gpu,
        batches.seen(setup) if batches else setup,
        link_gb_s=machine.link_gb_s,
        internode_gb_s=machine.internode_gb_s,
    )
    if batches:
        step = replace(step, tokens_per_gpu=batches.tokens / machine.world_size)
    return Estimate(shape, machine, config, setup, memory(shape, setup), step, batches)


def asked_setup(shape: ModelShape, machine: Machine, config: RunConfig) -> Setup:
    """The settings on this machine, which decides where trained weights are under CPU offload."""
    setup = setup_from_config(config, machine.world_size, gpus_per_node=machine.gpus)
    on_host = trained_on_host(shape, setup, machine.gpu.memory_gib)
    if setup.cpu_offload:
        setup = replace(setup, trained_offload=on_host)
    if config.mlp_tiles == AUTO:
        setup = replace(setup, mlp_tiles=choose_tiles(shape, setup, _budget_of(config)))
    return setup


def _budget_of(config: RunConfig) -> float | None:
    """GiB of --activation_budget_gib; None where it is left out, or left to the plan."""
    return None if config.activation_budget_gib == AUTO else config.activation_budget_gib


def with_choices(
    shape: ModelShape, machine: Machine, config: RunConfig, setup: Setup
) -> tuple[RunConfig, Setup]:
    """The settings with what a run chooses by these estimates before its first step.

    That is what blocks keep under --activation_budget_gib, and --keep_fp8_weights None.
    """
    budget = _budget_of(config)
    if budget is not None:
        policy = choose_policies(shape, setup, budget)
        config = replace(config, activation_policy=policy, activation_budget_gib=None)
        setup = replace(setup, activation_policy=policy)
    if config.keep_fp8_weights is None and config.compute_dtype == "fp8":
        within = (
            ((1 - SPARE_SHARE) * machine.memory_gib, attrgetter("total"))
            if budget is None
            else (budget, attrgetter("peak_allocated"))
        )
        keeps = keeps_fp8_weights(shape, setup, *within)
        config, setup = (
            replace(config, keep_fp8_weights=keeps),
            replace(setup, keep_fp8_weights=keeps),
        )
    return config, setup


def _check_question(shape: ModelShape, machine: Machine, config: RunConfig):
    """Refuse what the card or the number of GPUs rules out."""
    if config.compute_dtype == "fp8" and not machine.gpu.fp8_tflops:
        raise ValueError(
            f"--compute_dtype fp8: the {machine.gpu.name} has no fp8 products; use bf16"
        )
    check_kept_stay(config, machine.world_size)
    if config.strategy.is_hybrid and not hybrid_groups(machine, config):
        raise ValueError(
            f"--sharding_strategy {config.sharding_strategy} needs 2 or more replicas of "
            f"2 or more GPUs; {machine.world_size} GPUs do not divide so"
        )


def hybrid_groups(machine: Machine, config: RunConfig) -> bool:
    """Whether the GPUs divide into two or more shard groups of two or more."""
    world, size = machine.world_size, config.shard_group_size
    if size == -1:
        size = machine.gpus if machine.nodes > 1 else world // 2
    return size >= 2 and world % size == 0 and world // size >= 2
