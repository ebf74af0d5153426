"""Markdown of measurements: rows with estimates and errors, two results files, published tables."""

from __future__ import annotations

from dataclasses import replace

from ..catalog.machine import MachineOptions, machine_from_options
from ..config.settings import counted
from ..estimate import Estimate, estimate
from .accuracy import Compared, accuracy, compare
from .grid import Cell, Grid
from .row import BenchRow


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are numbers, on the right."""
    rule = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


def number(value: float | None, places: int = 2) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else f"{value:,.{places}f}"


def percent(share: float) -> str:
    return f"{share:+.1%}"


def results_table(rows: list[BenchRow]) -> str:
    """Every row: what was measured, today's estimates and their errors."""
    by_row = {id(c.row): c for c in compare(rows)}
    head = [
        "row",
        "s/step",
        "tok/s per GPU",
        "estimate s",
        "error",
        "peak GiB",
        "estimate",
        "error",
    ]
    return markdown(head, [_result_line(row, by_row.get(id(row))) for row in rows])


def _result_line(row: BenchRow, compared: Compared | None) -> list[str]:
    """One row's cells."""
    name = f"{row.name}, {row.gpus or 1}x {row.gpu or '?'}"
    if row.status != "ok":
        return [
            name,
            "out of memory" if row.status == "oom" else f"error: {row.error or ''}",
            *[""] * 6,
        ]
    line = [name, number(row.seconds_per_step, 3), number(row.tokens_per_second_per_gpu, 0)]
    if compared is None:
        return [*line, "", "", number(row.peak_allocated_gib), "", ""]
    return [
        *line,
        number(compared.step.total, 3),
        percent(compared.time_error),
        number(row.peak_allocated_gib),
        number(compared.memory.peak_allocated),
        percent(compared.memory_error),
    ]


def accuracy_table(rows: list[BenchRow]) -> str:
    """Rows with their errors, the newest of each name; empty what other code than today's took."""
    head = [
        "row",
        "GPUs",
        "s/step",
        "estimate",
        "error",
        "allocated GiB",
        "error",
        "reserved GiB",
        "error",
        "sets constants",
    ]
    return markdown(
        head,
        [
            _accuracy_line(c)
            for c in compare(rows)
            if not c.superseded and not (c.old_code and c.old_memory)
        ],
    )


def _accuracy_line(c: Compared) -> list[str]:
    """One row's cells."""
    time = [number(c.row.seconds_per_step, 3), number(c.step.total, 3), percent(c.time_error)]
    size = [number(c.row.peak_allocated_gib), percent(c.memory_error)]
    reserved = [number(c.row.peak_reserved_gib), percent(c.reserved_error)]
    return [
        c.row.name,
        str(c.row.gpus),
        *([""] * 3 if c.old_code else time),
        *([""] * 2 if c.old_memory else size),
        *([""] * 2 if c.old_reserved else reserved),
        "yes" * c.calibrates,
    ]


def accuracy_lines(rows: list[BenchRow]) -> str:
    """How near the estimates come."""
    found = accuracy(compare(rows))

    def line(rows, what, middle, worst, lowest=None):
        below = "" if lowest is None else f", most below {percent(lowest)}"
        return f"{rows}: {what}: median error {middle:.1%}, worst {worst:.1%}{below}."

    lines = [
        "On rows that no constant was set on.",
        line(
            counted(found.rows, "row"),
            "allocated memory",
            found.memory_median,
            found.memory_worst,
            found.memory_lowest,
        ),
    ]
    if found.reserving:
        lines.append(
            line(
                counted(found.reserving, "row"),
                "reserved memory",
                found.reserved_median,
                found.reserved_worst,
                found.reserved_lowest,
            )
        )
    if found.timed:
        lines.append(
            line(
                counted(found.timed, "row") + " of today's kernels",
                "time",
                found.time_median,
                found.time_worst,
            )
        )
    return " ".join(lines)


def against_table(rows: list[BenchRow], others: list[BenchRow]) -> str:
    """Rows of two files that have the same name, the second as a share of the first."""
    theirs = {row.name: row for row in others}
    head = ["row", "tok/s per GPU", "other", "share", "peak GiB", "other"]
    body = []
    for row in rows:
        other = theirs.get(row.name)
        if other is None:
            continue
        speeds = row.tokens_per_second_per_gpu, other.tokens_per_second_per_gpu
        share = f"{speeds[1] / speeds[0]:.0%}" if all(speeds) else f"{row.status} / {other.status}"
        body.append(
            [
                row.name,
                *(number(s, 0) for s in speeds),
                share,
                number(row.peak_allocated_gib),
                number(other.peak_allocated_gib),
            ]
        )
    return markdown(head, body) if body else "no row is in both files"


def grid_table(grid: Grid, rows: list[BenchRow]) -> str:
    """A grid beside what was measured: with auto's share of the best, if a cell of it is auto."""
    planned = any(cell.config.is_auto for cell in grid.cells)
    return (_auto_table if planned else _published_table)(grid, rows)


def _auto_table(grid: Grid, rows: list[BenchRow]) -> str:
    """What was chosen and what a person might try, and the speed that auto reaches of the best.

    Cells are compared with those of the same limit of memory.
    """
    names = {cell.name for cell in grid.cells}
    found = {row.name: row for row in rows if row.name in names}
    head = ["", "settings", "tok/s per GPU", "of the best by hand", "GiB reserved"]
    body, lines = [], []
    for cell in grid.cells:
        best, row = _best_by_hand(grid, cell.gpu_memory_gib, found), found.get(cell.name)
        body.append(_auto_line(cell.name, row, best and best.tokens_per_second_per_gpu))
        if not cell.config.is_auto:
            continue
        share = (
            best
            and row
            and row.status == "ok"
            and (row.tokens_per_second_per_gpu / best.tokens_per_second_per_gpu)
        )
        lines.append(
            f"{cell.name}: "
            + (f"{share:.1%} of {best.name}, the best by hand" if share else "not measured yet")
        )
    return "\n".join([markdown(head, body), "", *lines])


def _best_by_hand(
    grid: Grid, limit_gib: float | None, found: dict[str, BenchRow]
) -> BenchRow | None:
    """The fastest row of a cell without auto settings that has this limit."""
    cells = [c for c in grid.cells if not c.config.is_auto and c.gpu_memory_gib == limit_gib]
    by_hand = [found[c.name] for c in cells if c.name in found and found[c.name].status == "ok"]
    return max(by_hand, key=lambda row: row.tokens_per_second_per_gpu, default=None)


def _auto_line(name: str, row: BenchRow | None, best: float | None) -> list[str]:
    """One cell of an auto grid."""
    if row is None:
        return [name, "not measured", "", "", ""]
    if row.status != "ok":
        return [name, row.status, "", "", ""]
    offload = [
        text
        for text, on in (
            ("CPU offload", row.cpu_offload),
            ("activation offload", row.activation_offload),
        )
        if on
    ]
    settings = [
        row.sharding_strategy,
        row.activation_policy,
        *offload,
        f"{row.batch_size} x {row.gradient_accumulation_steps} rows",
    ]
    speed = row.tokens_per_second_per_gpu
    return [
        name,
        ", ".join(settings),
        number(speed, 0),
        f"{speed / best:.1%}" if best else "",
        number(row.peak_reserved_gib, 1),
    ]


def _published_table(grid: Grid, rows: list[BenchRow]) -> str:
    """A grid's cells: what others published, what is estimated for their card and for an H100, and what
    was measured here; empty where nothing was.

    Times are seconds of an optimizer step; where a whole run was published, it is divided by its steps.
    """
    measured = {row.name: row for row in rows if row.status == "ok"}
    head = [
        "",
        "published on",
        "GiB",
        "s/step",
        "estimated GiB",
        "s/step",
        "on H100 s/step",
        "measured on",
        "GiB",
        "s/step",
    ]
    return markdown(head, [_published_line(cell, measured.get(cell.name)) for cell in grid.cells])


def _published_line(cell: Cell, row: BenchRow | None) -> list[str]:
    """One cell's three sources."""
    said, card = cell.published, cell.published.get("gpu")
    there = estimated(cell, card) if card else None
    line = [
        cell.name,
        f"{cell.gpus}x {card}" if card else "",
        number(said.get("peak_gib")),
        number(_published_seconds(cell), 2),
    ]
    line += [number(there.memory.peak_reserved), number(there.step.total, 2)] if there else ["", ""]
    line.append(number(estimated(cell, "h100").step.total, 2))
    if row is None:
        return [*line, "", "", ""]
    return [
        *line,
        f"{row.gpus}x {row.gpu}",
        number(row.peak_reserved_gib),
        number(row.seconds_per_step, 2),
    ]


def _published_seconds(cell: Cell) -> float | None:
    """Seconds of an optimizer step as published: directly, or from a run's time and rows."""
    said = cell.published
    if "seconds_per_step" in said:
        return said["seconds_per_step"]
    rows = cell.settings.get("batch_size", 1) * cell.settings.get("gradient_accumulation_steps", 1)
    if "tokens_per_second" in said:
        return rows * cell.settings["context_length"] * cell.gpus / said["tokens_per_second"]
    if "seconds" not in said:
        return None
    return said["seconds"] * rows * cell.gpus / said["rows"]


def estimated(cell: Cell, card: str) -> Estimate:
    """The estimate of a cell on a card, also for rows beyond the model's positions."""
    link = cell.published.get("interconnect") if card != "h100" else None
    machine = machine_from_options(MachineOptions(gpu=card, gpus=cell.gpus, interconnect=link))
    return estimate(replace(cell.shape, max_positions=None), machine, cell.config)
