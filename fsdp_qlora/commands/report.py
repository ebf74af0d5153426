"""`fsdp-qlora report RUN`: a run's folder as one HTML page. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.flags import parse_alone, with_named_words
from ..config.settings import opt


@dataclass
class _ReportOptions:
    """Report"""

    run: str = opt("output", "the --output_dir of a run; also as the first word")
    output: str | None = opt(
        None, "the page; report.html in the run's folder if left out", example="report.html"
    )
    verbose: bool = opt(False, "print the traceback of an error")


def report_command(argv: list[str]):
    """Make one HTML page of a run: curves, answers, data, estimate and measurement, faults."""
    options = parse_alone(with_named_words(argv, "run"), _ReportOptions, "fsdp-qlora report")
    from ..report import write_report

    print(f"report: {write_report(options.run, options.output)}")
