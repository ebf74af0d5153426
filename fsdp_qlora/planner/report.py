"""A plan for people, and for programs."""

from __future__ import annotations

from dataclasses import replace
from shutil import get_terminal_size
from textwrap import wrap

from ..config import AUTO, plan_batches
from ..config.settings import counted, shown
from ..estimate import Estimate, padding_line
from ..estimate import as_json as estimate_as_json
from ..estimate.peak import EXPLAINED
from ..estimate.report import data_notes, notes, settings_line, subject_lines, wrapped
from .ladder import Climbed
from .plan import Plan, make_plan
from .search import seconds_per_token

SHOWN = 8  # of the search's results


def report(plan: Plan) -> str:
    """The whole plan as text."""
    some = plan.choice or plan.closest
    assert some  # a search tries something
    lines = [
        *wrapped(subject_lines(some)[0]),
        *wrapped(plan.machine.describe()),
        "",
        *_ladder_lines(plan),
        "",
        *_search_lines(plan),
        "",
        *_choice_lines(plan),
    ]
    said = [*data_notes(some, plan.rows), *notes(some)]
    return "\n".join(lines + [line for note in said for line in wrapped(note)])


def _ladder_lines(plan: Plan) -> list[str]:
    """Each rung with its need, speed and verdict."""
    rows, length = plan.config.batch_size, plan.config.context_length
    lines = [f"{'GiB':>7}{'tok/s/GPU':>11}  the ladder, {rows} x {length:,} tokens per GPU"]
    for number, climbed in enumerate(plan.rungs, 1):
        lines += row(
            figures(climbed.found), f"{number}. {climbed.rung.name}: {_rung_verdict(plan, climbed)}"
        )
    last = "not needed" if plan.choice else "see below"
    return lines + row(figures(None), f"{len(plan.rungs) + 1}. shorter rows, or more GPUs: {last}")


def row(numbers: str, text: str) -> list[str]:
    """Numbers in columns with text beside them, which goes on below within the terminal's width."""
    width = max(40, get_terminal_size().columns - 1)
    lines = wrap(text, width - len(numbers) - 2, subsequent_indent="   ", break_long_words=False)
    return [
        f"{numbers if first else '':<{len(numbers)}}  {line}"
        for first, line in zip([True] + [False] * len(lines), lines, strict=False)
    ]


def figures(found: Estimate | None) -> str:
    """Need and speed in columns."""
    if found is None:
        return f"{'-':>7}{'-':>11}"
    return f"{found.memory.total:7.1f}{found.step.tokens_per_second_per_gpu:11,.0f}"


def _rung_verdict(plan: Plan, climbed: Climbed) -> str:
    """Why a rung is, or is not, the answer."""
    found, limit = climbed.found, plan.machine.memory_gib
    if found is None:
        return climbed.refused
    if not found.fits_gpu:
        return (
            f"{found.memory.total - limit:.1f} too much; most is "
            f"{EXPLAINED[found.memory.largest]}, {found.memory.parts[found.memory.largest]:.1f}"
        )
    if not found.fits_host:
        return f"the host needs {found.memory.host:.0f} GiB of {plan.machine.host_memory_gib:.0f}"
    first = next(c for c in plan.rungs if c.fits)
    best = plan.choice and seconds_per_token(plan.choice)
    slower = seconds_per_token(found) / best - 1 if best else 0.0
    behind = f"; the search found {slower:.0%} more speed" if slower >= 0.01 else ""
    return ("fits, the first that does" if climbed is first else "fits") + behind


def _search_lines(plan: Plan) -> list[str]:
    """The fastest configurations that fit: rows of a micro-batch, how often in a step, and the rest."""
    if not plan.fitting:
        return ["nothing fits"]
    lines = [f"{'GiB':>7}{'tok/s/GPU':>11}{'rows':>9}  the fastest of {len(plan.fitting)} that fit"]
    for found in plan.fitting[:SHOWN]:
        rows = f"{found.plan.batch.micro_batch_size} x {found.plan.batch.accumulation}"
        speed = 1 / seconds_per_token(found) / plan.machine.world_size
        lines += row(
            f"{found.memory.total:7.1f}{speed:11,.0f}{rows:>9}",
            settings_line(found).replace(",", ", ").replace(",  ", ", "),
        )
    if plan.choice is not min(plan.fitting, key=seconds_per_token):
        lines += wrapped("the first is simpler, and as fast within what predictions are off by")
    return lines


def _choice_lines(plan: Plan) -> list[str]:
    """What to do, and what it gives; or what is missing."""
    if plan.choice is None:
        return [line for text in advice(plan) for line in wrapped(text)]
    step, choice = plan.choice.step, plan.choice
    batches = plan_batches(choice.config, plan.machine.world_size)
    fixed = "fixed" if plan.config.global_batch_size != AUTO else "--global_batch_size fixes them"
    speed = step.tokens_per_second_per_gpu * plan.machine.world_size
    return [
        f"chosen: {flags(plan)}",  # on one line, to be copied
        *wrapped(
            f"        {step.total:.3f} s a step of {counted(batches.per_step, batches.unit)} "
            f"({fixed}), {speed:,.0f} tokens/s on {counted(plan.machine.world_size, 'GPU')}; "
            f"{choice.memory.total:.1f} of {plan.machine.memory_gib:g} GiB"
            f"{_host_share(plan, choice)}"
        ),
    ]


def _host_share(plan: Plan, choice: Estimate) -> str:
    """What an offload takes of a machine's memory, which may not be known."""
    if not (choice.plan.memory.cpu_offload or choice.plan.memory.activation_offload):
        return ""
    limit = f" of {plan.machine.host_memory_gib:.0f}" if plan.machine.host_memory_gib else ""
    each = " per machine" if plan.machine.nodes > 1 else ""
    return f", and {choice.memory.host:.0f}{limit} GiB of host memory{each}"


def flags(plan: Plan) -> str:
    """The chosen settings as they are typed."""
    order = sorted(plan.changes, key=lambda name: (name != "sharding_strategy", name))
    return (
        " ".join(
            f"--{name} {shown(plan.changes[name])}"
            for name in order
            if plan.changes[name] is not False
        )
        or "as given"
    )


def packing_line(plan: Plan) -> str:
    """What a plan with packed rows would give, where padding wastes much; else empty."""
    some, rows = plan.choice, plan.rows
    if not some or not rows or not padding_line(rows, some.config, plan.machine.world_size):
        return ""
    packed = make_plan(
        plan.shape, plan.machine, replace(plan.config, packing=True), plan.free, rows
    )
    gain = seconds_per_token(some) / seconds_per_token(packed.choice) if packed.choice else 0
    if gain <= 1:
        return ""
    return (
        f"{1 - some.batches.share:.0%} of the places are padding; with --packing true the plan is "
        f"{flags(packed)}: {packed.choice.step.tokens_per_second_per_gpu:,.0f} tokens/s per GPU by "
        f"the estimate, {gain:.1f} times as many"
    )


def advice(plan: Plan) -> list[str]:
    """The last rung: what would fit."""
    assert plan.closest  # else something fits
    need, limit = plan.closest.memory, plan.machine.memory_gib
    short = (
        f"{need.total:.1f} GiB of {limit:g}"
        if not plan.closest.fits_gpu
        else f"{need.host:.0f} GiB of host memory, of {plan.machine.host_memory_gib:.0f}"
    )
    lines = [f"closest: {settings_line(plan.closest)}, one row at a time, needs {short}"]
    if plan.longest:
        lines.append(f"shorter: --context_length {plan.longest} fits")
    if plan.more_gpus:
        lines.append(f"more GPUs: {plan.more_gpus} of them hold it")
    if not plan.longest and not plan.more_gpus:
        lines.append(
            "neither shorter rows nor more of these GPUs help: take cards with more memory, "
            "or a smaller model"
        )
    return lines


def as_json(plan: Plan) -> dict:
    """The whole plan as a dict of plain values."""
    return dict(
        ladder=[
            dict(
                rung=c.rung.name,
                why=c.rung.why,
                changes=c.changes,
                fits=c.fits,
                verdict=_rung_verdict(plan, c),
                estimate=estimate_as_json(c.found) if c.found else None,
            )
            for c in plan.rungs
        ],
        search=[estimate_as_json(found) for found in plan.fitting[:SHOWN]],
        tried_and_fitting=len(plan.fitting),
        chosen=plan.changes or None,
        choice=estimate_as_json(plan.choice) if plan.choice else None,
        longest_context_that_fits=plan.longest or None,
        gpus_that_fit=plan.more_gpus or None,
    )
