"""`fsdp-qlora report RUN`: a run's folder as one HTML page. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.flags import parse_alone, with_named_words
from ..config.settings import opt


@dataclass
class _ReportOptions:
    """Report"""

    run: str = opt("output", "--output_dir of a run, also as the first argument")
    output: str | None = opt(
        None, "HTML file; default: report.html in the run's folder", example="report.html"
    )
    verbose: bool = opt(False, "after an error, print the traceback")


def report_command(argv: list[str]):
    """Make one HTML page of a run: curves, answers, data, estimate and measurement, faults."""
    options = parse_alone(
        with_named_words(argv, "run"),
        _ReportOptions,
        "fsdp-qlora report",
        about=report_command.__doc__,
    )
    from ..lifecycle.lock import is_held
    from ..report import write_report

    print(f"report: {write_report(options.run, options.output, is_held(options.run))}")
