"""The table of targets in docs/performance.md: what was measured of each row, beside its peers.

    python scripts/speed_page.py

Rows and targets are those of benchmarks/speed_rows.py; the newest row of a name counts.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fsdp_qlora.bench.row import BenchRow, read_rows
from fsdp_qlora.bench.tables import markdown, number

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from speed_rows import CASES, Case  # noqa: E402

PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- targets: made by make -C docs speed -->", "<!-- end of targets -->"
HEAD = [
    "row",
    "GPUs",
    "target",
    "measured",
    "of the target",
    "allocated GiB",
    "blocks keep",
    "transformers + PEFT",
    "with Liger",
]


def newest(prefix: str) -> dict[tuple[str, str], BenchRow]:
    """The last row that ended well of each name and peer, in results files that begin with `prefix`."""
    files = sorted((ROOT / "benchmarks/results").glob(f"{prefix}_*.jsonl"))
    rows = [row for path in files for row in read_rows(path) if row.status == "ok"]
    return {(row.name, (row.peer or "").partition(":")[0]): row for row in rows}


def table() -> str:
    """One line for each row and number of GPUs."""
    ours, peers = newest("speed"), newest("peers")
    return markdown(
        HEAD,
        [
            line(name, case, gpus, ours, peers)
            for name, case in CASES.items()
            if case.target
            for gpus in case.gpus
        ],
    )


def line(name: str, case: Case, gpus: int, ours: dict, peers: dict) -> list[str]:
    """One row's cells."""
    asked, seconds = f"{name} on {gpus}", case.unit == "s/step"
    said = [name, str(gpus), f"{case.target:,.5g}" + " s" * seconds]
    beside = [speed(peers.get((asked, peer))) for peer in ("hf", "hf_liger")]
    row = ours.get((asked, ""))
    if row is None:
        return [*said, "not measured", *[""] * 3, *beside]
    reached = row.seconds_per_step if seconds else row.tokens_per_second_per_gpu
    share = case.target / reached if seconds else reached / case.target
    return [
        *said,
        f"{reached:,.3f} s" if seconds else speed(row),
        f"{share:.1%}",
        number(row.peak_allocated_gib, 1),
        row.activation_policy,
        *beside,
    ]


def speed(row: BenchRow | None) -> str:
    """Tokens per second and GPU, if it was measured."""
    return number(row and row.tokens_per_second_per_gpu, 0)


if __name__ == "__main__":
    PAGE.write_text(
        re.sub(
            f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{table()}\n{END}", PAGE.read_text(), flags=re.S
        )
    )
