"""One question to the estimates: this model, on this machine, with these settings; and its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..catalog.arch import ModelShape
from ..catalog.families import BALANCED_EXPERTS, FROZEN_EXPERTS, WITH_WHOLE_ROWS
from ..catalog.llama_pro import expanded_shape
from ..catalog.machine import Machine
from ..config import RunConfig
from ..config.run import with_bins_of
from ..plan import Plan
from .cost import RunCost, run_cost
from .lengths import Batches, Rows, batches_of, with_longest_row
from .peak import Memory, memory
from .resolve import Room, chosen_settings, hybrid_groups, resolve
from .speed import StepTime, step_seconds


@dataclass(frozen=True)
class Estimate:
    """Memory and time of one configuration on one machine."""

    shape: ModelShape
    machine: Machine
    config: RunConfig
    plan: Plan
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
        plan = self.plan
        return (
            plan.batch.micro_batch_size
            * plan.batch.accumulation
            * plan.sharding.world_size
            / plan.batch.ranks_per_row
            / self.step.total
        )

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run over its data; None where that is not known."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        if not self.batches or self.batches.steps is None:
            return None
        return math.ceil(round(self.batches.steps * self.config.num_epochs, 6))

    @property
    def epochs(self) -> float | None:
        """Times that the run goes over its data; None where the end of it is not known."""
        if not self.batches or not self.batches.steps:
            return None
        return (
            self.config.max_steps / self.batches.steps
            if self.config.max_steps > 0
            else self.config.num_epochs
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
    shape: ModelShape,
    machine: Machine,
    config: RunConfig,
    rows: Rows | None = None,
    room: Room | None = None,
) -> Estimate:
    """The answer: memory for the longest of `rows`, time for all; full rows where none are known.

    room: what the activation policy is chosen to fill, in place of what `config` says of it.
    Raises ValueError, naming the flag, for settings that the model or GPU can't do.
    """
    shape = expanded_shape(shape, config)
    if rows:
        config = with_bins_of(config, rows.mean_length, machine.world_size)
    longest = with_longest_row(config, rows)
    _check_question(shape, machine, longest)
    batches = batches_of(rows, config, machine.world_size) if rows else None
    plan = resolve(longest, shape, machine, room, batches)
    step = step_seconds(
        shape,
        machine.gpu,
        batches.seen(plan) if batches else plan,
        link_gb_s=machine.link_gb_s,
        internode_gb_s=machine.internode_gb_s,
    )
    if batches:
        step = replace(step, tokens_per_gpu=batches.tokens / machine.world_size)
    config = replace(config, **chosen_settings(config, plan, room))
    return Estimate(shape, machine, config, plan, memory(shape, plan), step, batches)


def _check_question(shape: ModelShape, machine: Machine, config: RunConfig):
    """Refuse what the card, the number of GPUs or the model's positions rule out."""
    if config.compute_dtype == "fp8" and not machine.gpu.fp8_tflops:
        raise ValueError(
            f"--compute_dtype fp8: the {machine.gpu.name} has no fp8 products; use bf16"
        )
    if config.product_dtype == "bf16" and not machine.gpu.has_bf16:
        raise ValueError(
            f"--precision {config.precision}: the {machine.gpu.name} does not support bf16; use "
            "--precision fp16_autocast or fp32"
        )
    if config.strategy.is_hybrid and not hybrid_groups(machine, config):
        raise ValueError(
            f"--sharding_strategy {config.sharding_strategy} needs shard groups of 2 or more GPUs; "
            f"{machine.world_size} GPUs with --shard_group_size {config.shard_group_size} can't be "
            "divided like this"
        )
    if problem := why_not_shared(shape, machine, config):
        raise ValueError(f"--sequence_parallel {config.sequence_parallel}: {problem}")
    if config.mlp_tiles > 1 and shape.expert_linears():
        raise ValueError(
            f"--mlp_tiles {config.mlp_tiles}: the experts of {shape.name} can't be computed in tiles; leave "
            "it out"
        )
    if config.target_parameters and shape.family in FROZEN_EXPERTS:
        raise ValueError(
            f"--lora_target_parameters {','.join(config.target_parameters)}: {shape.name} has no experts "
            "that PEFT can adapt; leave it out"
        )
    if config.router_aux_loss_coef and shape.family not in BALANCED_EXPERTS:
        raise ValueError(
            f"--router_aux_loss_coef {config.router_aux_loss_coef:g}: transformers has no balance loss for "
            f"{shape.name}; leave it out"
        )
    if shape.max_positions and config.context_length > shape.max_positions:
        raise ValueError(
            f"--context_length {config.context_length}: {shape.name} has "
            f"{shape.max_positions} positions; give at most as many, or estimate beyond "
            "them with --beyond_positions"
        )


def why_not_shared(shape: ModelShape, machine: Machine, config: RunConfig) -> str:
    """What keeps --sequence_parallel GPUs from sharing the model's rows; empty if nothing does."""
    size = config.sequence_parallel
    if size == 1:
        return ""
    if machine.world_size % size:
        fit = _divisors(machine.world_size)
        return f"{machine.world_size} GPUs are not a multiple of it; use one of {fit}"
    kinds = shape.kinds or (shape,)
    if any(kind.state_width for kind in kinds):
        return f"layers of {shape.name} carry a state along the tokens; leave it out"
    if shape.traits.mixers or shape.traits.attention == "own" or shape.family in WITH_WHOLE_ROWS:
        return f"the layers of {shape.name} can't be computed from a part of a row; leave it out"
    return ""


def _divisors(number: int) -> list[int]:
    return [n for n in range(2, number + 1) if number % n == 0]
