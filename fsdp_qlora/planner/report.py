"""A plan for people, and for programs."""

from __future__ import annotations

from dataclasses import asdict, replace
from shutil import get_terminal_size
from textwrap import wrap

from ..config import AUTO, plan_batches
from ..config.settings import counted
from ..estimate import Estimate, Failures, packing_gain
from ..estimate import as_json as estimate_as_json
from ..estimate.peak import EXPLAINED
from ..estimate.report import data_notes, notes, settings_line, subject_lines, wrapped
from .ladder import Climbed, flags_of
from .proposal import Proposal, propose
from .search import seconds_per_token

SHOWN = 8  # of the search's results


def report(proposal: Proposal, lost: Failures | None = None) -> str:
    """The whole plan as text; `lost` is what failing machines cost it."""
    some = proposal.choice or proposal.closest
    assert some  # a search tries something
    lines = [
        *wrapped(subject_lines(some)[0]),
        *wrapped(proposal.machine.describe()),
        "",
        *_ladder_lines(proposal),
        "",
        *_search_lines(proposal),
        "",
        *_choice_lines(proposal),
        *(wrapped(lost.line()) if lost else ()),
    ]
    said = [*data_notes(some, proposal.rows), *notes(some)]
    return "\n".join(lines + [line for note in said for line in wrapped(note)])


def _ladder_lines(proposal: Proposal) -> list[str]:
    """Each rung with its need, speed and verdict."""
    rows, length = proposal.config.batch_size, proposal.config.context_length
    lines = [f"{'GiB':>7}{'tok/s/GPU':>11}  the ladder, {rows} x {length:,} tokens per GPU"]
    for number, climbed in enumerate(proposal.rungs, 1):
        lines += row(
            figures(climbed.found),
            f"{number}. {climbed.rung.name}: {_rung_verdict(proposal, climbed)}",
        )
    last = "not needed" if proposal.choice else "see below"
    lines += row(figures(None), f"{len(proposal.rungs) + 1}. shorter rows, or more GPUs: {last}")
    typed = [f"{n}. {flags_of(c.changes)}" for n, c in enumerate(proposal.rungs, 1)]
    return [*lines, "", "each rung's flags:", *typed]  # on one line each, to be copied


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


def _rung_verdict(proposal: Proposal, climbed: Climbed) -> str:
    """Why a rung is, or is not, the answer."""
    found, limit = climbed.found, proposal.machine.memory_gib
    if found is None:
        return climbed.refused
    if not found.fits_gpu:
        return (
            f"{found.memory.total - limit:.1f} too much; most is "
            f"{EXPLAINED[found.memory.largest]}, {found.memory.parts[found.memory.largest]:.1f}"
        )
    if not found.fits_host:
        return (
            f"the host needs {found.memory.host:.0f} GiB of {proposal.machine.host_memory_gib:.0f}"
        )
    first = next(c for c in proposal.rungs if c.fits)
    best = proposal.choice and seconds_per_token(proposal.choice)
    slower = seconds_per_token(found) / best - 1 if best else 0.0
    behind = f"; the search found {slower:.0%} more speed" if slower >= 0.01 else ""
    return ("fits, the first that does" if climbed is first else "fits") + behind


def _search_lines(proposal: Proposal) -> list[str]:
    """The fastest configurations that fit: rows of a micro-batch, how often in a step, and the rest."""
    if not proposal.fitting:
        return ["nothing fits"]
    lines = [
        f"{'GiB':>7}{'tok/s/GPU':>11}{'rows':>9}  the fastest of {len(proposal.fitting)} that fit"
    ]
    for found in proposal.fitting[:SHOWN]:
        rows = f"{found.plan.batch.micro_batch_size} x {found.plan.batch.accumulation}"
        speed = 1 / seconds_per_token(found) / proposal.machine.world_size
        lines += row(
            f"{found.memory.total:7.1f}{speed:11,.0f}{rows:>9}",
            (settings_line(found) + ", packed" * found.config.packing)
            .replace(",", ", ")
            .replace(",  ", ", "),
        )
    if proposal.choice is not min(proposal.fitting, key=seconds_per_token):
        lines += wrapped("the first is simpler, and as fast within what predictions are off by")
    return lines


def _choice_lines(proposal: Proposal) -> list[str]:
    """What to do, and what it gives; or what is missing."""
    if proposal.choice is None:
        return [line for text in advice(proposal) for line in wrapped(text)]
    step, choice = proposal.choice.step, proposal.choice
    batches = plan_batches(choice.config, proposal.machine.world_size)
    sets = "--bins_per_step" if batches.unit == "bin" else "--global_batch_size"
    fixed = "fixed" if proposal.config.units_per_step != AUTO else f"{sets} sets another"
    speed = step.tokens_per_second_per_gpu * proposal.machine.world_size
    return [
        f"chosen: {flags(proposal)}",  # on one line, to be copied
        *wrapped(
            f"        {step.total:.3f} s a step of {counted(batches.per_step, batches.unit)} "
            f"({fixed}), {speed:,.0f} tokens/s on {counted(proposal.machine.world_size, 'GPU')}; "
            f"{choice.memory.total:.1f} of {proposal.machine.memory_gib:g} GiB"
            f"{_host_share(proposal, choice)}"
        ),
    ]


def _host_share(proposal: Proposal, choice: Estimate) -> str:
    """What an offload takes of a machine's memory, which may not be known."""
    if not (choice.plan.memory.cpu_offload or choice.plan.memory.activation_offload):
        return ""
    limit = (
        f" of {proposal.machine.host_memory_gib:.0f}" if proposal.machine.host_memory_gib else ""
    )
    each = " per machine" if proposal.machine.nodes > 1 else ""
    return f", and {choice.memory.host:.0f}{limit} GiB of host memory{each}"


def flags(proposal: Proposal) -> str:
    """The chosen settings as they are typed."""
    return flags_of(proposal.changes) or "as given"


def packing_line(proposal: Proposal) -> str:
    """What a plan with packed rows would give, where much is lost without; else empty."""
    some, rows = proposal.choice, proposal.rows
    if not some or not some.batches or not rows:
        return ""
    found = packing_gain(
        rows, some.config, proposal.machine.world_size, on_gpu=not proposal.machine.is_cpu
    )
    if not found:
        return ""
    packed = propose(
        proposal.shape,
        proposal.machine,
        replace(proposal.config, packing=True),
        proposal.free,
        rows,
    )
    if not packed.choice:
        return ""
    gain = seconds_per_token(some) / seconds_per_token(packed.choice)
    if gain <= 1:
        return ""
    return (
        f"{found.lost}; with --packing true the plan is "
        f"{flags(packed)}: {packed.choice.step.tokens_per_second_per_gpu:,.0f} tokens/s per GPU by "
        f"the estimate, {gain:.1f} times as many"
    )


def advice(proposal: Proposal) -> list[str]:
    """The last rung: what would fit."""
    assert proposal.closest  # else something fits
    need, limit = proposal.closest.memory, proposal.machine.memory_gib
    short = (
        f"{need.total:.1f} GiB of {limit:g}"
        if not proposal.closest.fits_gpu
        else f"{need.host:.0f} GiB of host memory, of {proposal.machine.host_memory_gib:.0f}"
    )
    lines = [f"closest: {settings_line(proposal.closest)}, one row at a time, needs {short}"]
    if proposal.longest:
        lines.append(f"shorter: --context_length {proposal.longest} fits")
    if proposal.more_gpus:
        lines.append(f"more GPUs: {proposal.more_gpus} of them hold it")
    if not proposal.longest and not proposal.more_gpus:
        lines.append(
            "neither shorter rows nor more of these GPUs help: take cards with more memory, "
            "or a smaller model"
        )
    return lines


def as_json(proposal: Proposal, lost: Failures | None = None) -> dict:
    """The whole plan as a dict of plain values."""
    return dict(
        ladder=[
            dict(
                rung=c.rung.name,
                why=c.rung.why,
                changes=c.changes,
                flags=flags_of(c.changes),
                fits=c.fits,
                verdict=_rung_verdict(proposal, c),
                estimate=estimate_as_json(c.found) if c.found else None,
            )
            for c in proposal.rungs
        ],
        search=[estimate_as_json(found) for found in proposal.fitting[:SHOWN]],
        tried_and_fitting=len(proposal.fitting),
        chosen=proposal.changes or None,
        choice=estimate_as_json(proposal.choice) if proposal.choice else None,
        longest_context_that_fits=proposal.longest or None,
        gpus_that_fit=proposal.more_gpus or None,
        failures=asdict(lost) if lost else None,
    )
