"""Commands that answer before there is a GPU: what a run would need, what to train with, what to write.

The first two share every flag with training and add those of the machine. They import no torch, unless
--dataset is given, whose rows are then read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..catalog.arch import ModelShape
from ..catalog.machine import Machine, MachineOptions, machine_from_options
from ..catalog.shapes import model_shape, shape_from_params
from ..config import AUTO, RunConfig
from ..config.flags import given_settings, parse, parse_alone, typed_flags
from ..config.settings import opt
from ..config.without_effect import warnings_of
from ..writable import check_file

if TYPE_CHECKING:
    from ..estimate import Rows


@dataclass
class _EstimateOptions:
    """Estimate"""

    params: str | None = opt(
        None, "size of a Llama-like model, instead of --model_name", example="7B"
    )
    examples: int | None = opt(
        None, "rows, or with --task dpo pairs, to train on, for time and cost", unit="rows"
    )
    card_price: float | None = opt(
        None,
        "what one GPU cost: with --examples, also shows what the run costs on GPUs of your own",
        unit="dollars",
        example=1600,
    )
    card_years: float = opt(
        3.0, "years of use around the clock in which --card_price is written off", unit="years"
    )
    kwh_price: float = opt(0.15, "price of electricity, with --card_price", unit="dollars per kWh")
    beyond_positions: bool = opt(False, "allow rows longer than the model's positions")
    task: str = opt(
        "sft",
        "what TRL trains on this engine: dpo counts --batch_size pairs, grpo also generates its answers",
        choices=("sft", "dpo", "grpo"),
    )
    reference: bool = opt(
        True, "with --task dpo or grpo, ask a reference policy; false for GRPO with beta 0"
    )
    completion_length: int = opt(
        -1,
        "with --task grpo, tokens of a row that are generated; -1 = half of --context_length",
        unit="tokens",
    )
    json: bool = opt(False, "print JSON")


@dataclass
class _PlanOptions:
    """Plan"""

    params: str | None = opt(
        None, "size of a Llama-like model, instead of --model_name", example="7B"
    )
    picture: str | None = opt(
        None, "plot the memory of each option to this file", example="plan.png"
    )
    mtbf_hours: float | None = opt(
        None,
        "mean time between failures of one machine: shows how often to save, and what is lost",
        unit="hours",
        example=6000,
        least=1,
    )
    restart_minutes: float = opt(
        5.0,
        "with --mtbf_hours, from a failure until the run trains again",
        unit="minutes",
        least=0,
    )
    beyond_positions: bool = opt(False, "allow rows longer than the model's positions")
    json: bool = opt(False, "print JSON")


def _estimate_command(argv: list[str]):
    """Predict memory, time and money of a run; needs no GPU."""
    from ..estimate import Task, as_json, estimate, owned_cost, report

    config, machine, options = parse(
        argv,
        MachineOptions,
        _EstimateOptions,
        prog="fsdp-qlora estimate",
        about=_estimate_command.__doc__,
    )
    shape, machine = _asked_shape(config, options, argv), machine_from_options(machine)
    _warn_of(config)
    rows = _asked_rows(config, options, argv)
    generated = options.completion_length
    if generated == AUTO:
        generated = config.context_length // 2
    task = Task(options.task, options.reference, generated)
    config = task.of_trainer(config)
    if config.is_auto:
        config = planned(shape, machine, config, argv, rows)
    found = task.added_to(estimate(shape, machine, config, rows))
    cost = found.run(task.rows(options.examples), rows) if options.examples is not None else None
    if options.card_price is not None:
        if cost is None:
            raise ValueError("--card_price needs --examples; give how many rows to train on")
        cost = owned_cost(
            cost,
            machine.gpu,
            machine.world_size,
            options.card_price,
            options.card_years,
            options.kwh_price,
        )
    examples = options.examples and task.rows(options.examples)
    show(as_json if options.json else report, found, cost, examples, rows)


def _plan_command(argv: list[str]):
    """Find the fastest configuration that fits, and say why not another; needs no GPU."""
    from ..estimate import failures
    from ..planner import as_json, draw, free_settings, propose, report

    config, machine, options = parse(
        argv, MachineOptions, _PlanOptions, prog="fsdp-qlora plan", about=_plan_command.__doc__
    )
    check_file("picture", options.picture)
    _warn_of(config)
    shape, rows = _asked_shape(config, options, argv), _asked_rows(config, options, argv)
    free = free_settings(config, given_settings(argv), everything=True, rows=rows)
    plan = propose(shape, machine_from_options(machine), config, free, rows)
    lost = None
    if options.mtbf_hours is not None and plan.choice:
        lost = failures(plan.choice, options.mtbf_hours, options.restart_minutes)
    show(as_json if options.json else report, plan, lost)
    if options.picture:
        draw(plan, options.picture)


def planned(
    shape: ModelShape,
    machine: Machine,
    config: RunConfig,
    argv: list[str],
    rows: Rows | None = None,
) -> RunConfig:
    """The settings with what is auto chosen, as training would. Raises ValueError if nothing fits."""
    from ..planner import free_settings, propose
    from ..planner.report import advice

    free = free_settings(config, given_settings(argv), rows=rows)
    plan = propose(shape, machine, config, free, rows)
    if plan.choice is None:
        raise ValueError("auto: nothing fits; " + "; ".join(advice(plan)))
    return plan.choice.config


def _asked_shape(
    config: RunConfig, options: _EstimateOptions | _PlanOptions, argv: list[str]
) -> ModelShape:
    """The model of --params or --model_name, from its config.json alone.

    Raises ValueError for flags that contradict those which describe model and machine.
    """
    typed = typed_flags(argv)
    if "world_size" in typed:
        raise ValueError(
            f"--world_size {config.world_size}: it sets the ranks to start here; use --gpus and "
            "--nodes for the GPUs to plan for"
        )
    if options.params is None:
        shape = model_shape(config.model_name)
        return replace(shape, max_positions=None) if options.beyond_positions else shape
    if "model_name" in typed:
        raise ValueError(
            f"--params {options.params} and --model_name {config.model_name} both name the model; "
            "give only one"
        )
    return shape_from_params(options.params)


def _asked_rows(
    config: RunConfig, options: _EstimateOptions | _PlanOptions, argv: list[str]
) -> Rows | None:
    """Row lengths of --dataset, where it is given and can be read here; why not is said on stderr."""
    if "dataset" not in given_settings(argv):
        return None
    if options.params is not None:
        said = "assuming full rows: --params names no tokenizer; give --model_name"
        print(f"--dataset {config.dataset}: {said}", file=sys.stderr)
        return None
    try:
        from ..preflight.sampled_lengths import (
            sampled_lengths,  # needs torch, and nothing else here does
        )

        rows, why = sampled_lengths(config)
    except ImportError as error:
        rows, why = None, f"assuming full rows: {error}"
    if why:
        print(f"--dataset {config.dataset}: {why}", file=sys.stderr)
    return rows


def _warn_of(config: RunConfig):
    """Say on stderr which settings do nothing, as a run would."""
    for warning in warnings_of(config):
        print(f"warning: {warning}", file=sys.stderr)


def show(form: Callable, *answer):
    """Print an answer as text, or as JSON where `form` gives a dict."""
    text = form(*answer)
    print(json.dumps(text, indent=1) if isinstance(text, dict) else text)


@dataclass
class _SchemaOptions:
    """Schema"""

    verbose: bool = opt(False, "after an error, print the traceback")


def _schema_command(argv: list[str]):
    """Print the JSON schema of recipes, with which editors check and complete them."""
    from ..config.reference import schema

    parse_alone(argv, _SchemaOptions, "fsdp-qlora schema", about=_schema_command.__doc__)
    print(json.dumps(schema(), indent=1))


GUIDE = {"estimate": _estimate_command, "plan": _plan_command, "schema": _schema_command}
