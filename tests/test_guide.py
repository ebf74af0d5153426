"""docs/guide.md is the planner's ladder, with today's estimates."""

import re
import runpy
from pathlib import Path

import pytest

from fsdp_qlora.planner import BEYOND, flags_of, rungs

ROOT = Path(__file__).parents[1]
GUIDE = runpy.run_path(str(ROOT / "scripts/guide_page.py"))
PAGE = (ROOT / "docs/guide.md").read_text()
STALE = "docs/guide.md is old; run: python scripts/make_reference.py"
CELL = re.compile(r"\| [^|\n]*GiB[^|\n]*(?= \|)")  # of a table: memory, and time or "too large"


@pytest.fixture(scope="module")
def made_today() -> str:
    return GUIDE["guide_page"]()


def test_the_page_is_the_ladder_in_its_words(made_today):
    assert CELL.sub("", PAGE) == CELL.sub("", made_today), STALE


def test_every_figure_of_the_page_is_todays_estimate(made_today):
    said, made = (CELL.findall(text) for text in (PAGE, made_today))
    assert len(said) == len(made) > 100
    for old, new in zip(said, made, strict=True):
        assert ("too large" in old) == ("too large" in new), STALE
        # A time is rounded to minutes, or to seconds below two of them.
        old_gib, new_gib = (float(re.search(r"([\d.]+) GiB", text)[1]) for text in (old, new))
        assert old_gib == pytest.approx(new_gib, rel=0.03), STALE
        if "too large" not in new:
            assert minutes(old) == pytest.approx(minutes(new), rel=0.15, abs=0.6), STALE


def minutes(cell: str) -> float:
    """The time of a cell."""
    number, unit = re.search(r"([\d.]+) (s|min|h|days)$", cell).groups()
    return float(number) * {"s": 1 / 60, "min": 1, "h": 60, "days": 1440}[unit]


def test_each_step_has_a_section_with_its_flags():
    for rung, changes in [*rungs(), *((r, GUIDE["after"](r)) for r in BEYOND)]:
        title = re.escape(GUIDE["sentence"](rung.name) if rung in BEYOND else rung.name)
        section = re.search(rf"^#+ (?:\d\. )?{title}\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
        assert section, rung.name
        typed = {k: v for k, v in changes.items() if k not in ("context_length", "batch_size")}
        assert flags_of(typed) in section[1]
