"""The page of a run: what it says, that it stands alone, and that a browser draws it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from dataclasses import asdict
from html import unescape
from html.parser import HTMLParser

import pytest

from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.report.charts import Series, _ticks_of, chart, short
from fsdp_qlora.report.page import write_report
from fsdp_qlora.report.run_history import read_run_history, smoothed, thinned
from tests.patience import patience

from .test_cli import without_torch
from .tokenizers import save_chat_model

SECRET = "hf_canaryCanaryCanary123"


def start(step: int, minute: int, **settings) -> dict:
    config = (
        asdict(
            RunConfig(
                model_name="/home/me/base-8b",
                lr=1e-4,
                context_length=2048,
                samples=1,
                eval_share=0.1,
            )
        )
        | settings
    )
    report = dict(
        context_length=2048,
        train_on="completion",
        rows_read=110,
        rows_kept=100,
        rows_truncated=7,
        rows_with_folded_system=0,
        tokens_total=5000,
        tokens_trained=2000,
        tokens_cut=321,
        dropped={"no <answer>": dict(rows=10, sources=["rows.jsonl:12"])},
        lengths={"32": 60, "64": 40},
    )
    return dict(
        kind="start",
        step=step,
        time=f"2026-11-28T06:{minute:02}:00+00:00",
        run_id="a",
        settings=config | dict(about=dict(hardware="2 x H100", packages=dict(torch="2.13.0"))),
        ranks=2,
        total_steps=60,
        rows_per_step=4,
        micro_batch=1,
        accumulation=2,
        trained_weights=9,
        load_seconds=3.0,
        dollars_per_hour=36.0,
        data=dict(report=report, rows_trained=90, rows_held_out=10),
        estimate=dict(peak_allocated_gib=20.0, seconds_per_step=1.0, tokens_per_second=1000.0),
    )


def step(number: int, **more) -> dict:
    return (
        dict(
            kind="step",
            step=number,
            loss=2 / number,
            lr=1e-4,
            grad_norm=0.5,
            trained_tokens=10,
            tokens=2000,
            seconds=2.0,
            tokens_per_second=1000.0,
            peak_allocated_gib=10.0,
            share_of_peak=0.4,
        )
        | more
    )


def answers(number: int, answer: str) -> dict:
    return dict(
        kind="samples",
        step=number,
        seconds=1.0,
        samples=[dict(prompt="Why <b>not</b>?", answer=answer, reference="because")],
    )


@pytest.fixture
def run(tmp_path):
    """A run of 60 steps that was killed in step 41, went on from step 30, and skipped one."""
    lines = [
        start(0, 0),
        answers(0, "it was not"),
        *(step(n) for n in range(1, 31)),
        dict(
            kind="eval",
            step=30,
            eval_loss=0.25,
            perplexity=1.3,
            trained_tokens=5,
            is_best=True,
            seconds=4.0,
        ),
        answers(30, "be"),
        dict(kind="checkpoint", step=30, seconds_held=1.5),
        *(step(n, loss=9.0) for n in range(31, 41)),
        start(30, 20),
        *(step(n, seconds=60.0 if n == 31 else 2.0) for n in range(31, 61)),
        step(44, loss=math.nan),
        dict(kind="skipped", step=44, rows=[5, 6]),
        dict(
            kind="eval",
            step=60,
            eval_loss=0.125,
            perplexity=1.1,
            trained_tokens=5,
            is_best=True,
            seconds=4.0,
        ),
        answers(60, "because"),
        dict(kind="end", step=60, status="finished", message="", time="2026-11-28T06:40:00+00:00"),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


EVIL = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


def with_evil(value) -> list:
    """A record with each of its parts replaced by markup, one at a time."""
    if isinstance(value, dict):
        return [value | {key: part} for key, old in value.items() for part in with_evil(old)] + [
            value | {EVIL: old} for old in list(value.values())[:1]
        ]
    if isinstance(value, list):
        return [
            [*value[:i], part, *value[i + 1 :]]
            for i, old in enumerate(value)
            for part in with_evil(old)
        ] or [[EVIL]]
    return [EVIL]


def test_markup_in_any_part_of_any_record_never_stands_raw_in_the_page(run):
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = {record["kind"]: i for i, record in enumerate(lines)}
    usual, written = sorted({tag for tag, _ in tags_of(run)}), 0
    for i in last.values():
        for changed in with_evil(lines[i]):
            path.write_text(
                "".join(json.dumps(line) + "\n" for line in [*lines[:i], changed, *lines[i + 1 :]])
            )
            try:
                tags = tags_of(run)
            except ValueError as error:  # a number is no text
                assert "metrics.jsonl has a record that no run writes" in str(error), changed
                continue
            written += 1
            assert [tag for tag, _ in tags].count("script") == 1, changed
            assert {tag for tag, _ in tags} <= {*usual, "p"}, changed
            assert not any(name.startswith("on") for _, given in tags for name in given), changed
    assert written > 100


def tags_of(run) -> list[tuple[str, dict]]:
    return Page(write_report(run).read_text()).tags


class Page(HTMLParser):
    """The text of a page, the attributes of its tags, and whether tags are closed in their order."""

    VOID = {"meta", "link", "line", "polyline", "path", "br"}

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(run, *flags) -> tuple[str, Page]:
    assert main(["report", str(run), *flags]) == 0
    text = (run / "report.html").read_text()
    return text, Page(text)


# ---- what it says --------------------------------------------------------------------------------


def test_every_part_of_the_run_is_on_the_page(run):
    _, page = page_of(run)
    for part in (
        "base-8b",
        "finished",
        "Loss per trained token",
        "Gradient norm",
        "Learning rate",
        "Why <b>not</b>?",
        "before training it was not",
        "after step 60 because",
        "in between after step 30 be",
        "dropped: no <answer> 10 (rows.jsonl:12, ...)",
        "7 rows to 2,048 tokens, losing 321",
        "peak memory of a GPU 20.00 GiB 10.00 GiB 0.50",
        "one optimizer step 1.000 s 2.000 s 2.00",
        "context_length 2048",
        "torch 2.13.0",
        "went on after step 30 on 2 ranks",
        "ended without a word",
        "step 44 was skipped",
        "its rows: 5, 6",
        "0.1250 lowest held-out loss",
    ):
        assert part in page.text, part
    assert "/home/me" not in page.text.split("Settings")[0]


def test_what_a_restart_did_again_counts_once_and_money_is_that_of_the_seconds(run):
    story = read_run_history(run)
    assert [s["step"] for s in story.steps] == list(range(1, 61))
    assert max(s["loss"] for s in story.steps if s["step"] > 30) < 1
    assert story.typical("seconds") == 2.0  # without steps 1 and 31, which compile
    assert story.seconds == pytest.approx(59 * 2 + 60 + 2 * 4 + 3 + 1.5)
    assert story.dollars == pytest.approx(story.seconds / 100)


def test_a_run_that_goes_on_and_one_without_a_gpu_have_a_page(tmp_path):
    lines = [
        start(0, 0),
        *(step(n, peak_allocated_gib=0.0) for n in (1, 2)),
        '{"kind": "step", "st',
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
    )
    _, page = page_of(tmp_path)
    for is_running, status in ((True, "running"), (False, "killed")):
        text = write_report(tmp_path, is_running=is_running).read_text()
        assert f'<b class="{status}">{status}</b>' in text
    assert "running or killed" in page.text and "no GPU was used" in page.text
    assert "Answers" not in page.text and "20.00 GiB - -" in page.text


def test_a_run_of_this_program_on_the_cpu_has_a_page_with_its_answers(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    save_chat_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(
        (json.dumps(dict(prompt="say it", completion=f"yes {SECRET}")) + "\n") * 12
    )
    out, rows = tmp_path / "out", str(tmp_path / "rows.jsonl")
    assert (
        main(
            [
                "train",
                "--model_name",
                str(tmp_path / "model"),
                "--dataset",
                rows,
                "--eval_dataset",
                rows,
                "--device",
                "cpu",
                "--precision",
                "fp32",
                "--compile",
                "false",
                "--world_size",
                "1",
                "--samples",
                "1",
                "--eval_every",
                "2",
                "--max_steps",
                "4",
                "--sample_tokens",
                "4",
                "--output_dir",
                str(out),
            ]
        )
        == 0
    )
    text, page = page_of(out)
    for part in (
        "rows kept 12",
        "before training",
        "after step 4",
        "1 x CPU",
        "4 of 4 steps",
        "max_steps 4",
        "0.1",
    ):
        assert part in page.text, part
    assert "canary" not in text.lower()


@pytest.mark.parametrize(
    "made, said", [(None, "no metrics.jsonl there"), ("", "it has no step yet")]
)
def test_a_folder_that_is_no_runs_is_said_in_one_line(tmp_path, capsys, made, said):
    if made is not None:
        (tmp_path / "metrics.jsonl").write_text(made)
    assert main(["report", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {tmp_path}") and said in line and "--output_dir" in line


def test_the_page_is_written_where_it_is_asked_for_and_without_torch(run, tmp_path):
    without_torch("report", "--run", str(run), "--output", str(tmp_path / "deep" / "page.html"))
    assert (tmp_path / "deep" / "page.html").read_text().endswith("</html>\n")


# ---- how it stands -------------------------------------------------------------------------------


def test_nothing_is_loaded_from_elsewhere(run):
    text, page = page_of(run)
    for tag, attrs in page.tags:
        assert "src" not in attrs and tag not in ("img", "iframe", "object"), tag
        assert attrs.get("href", "data:,") == "data:,"
    assert not re.search(r"url\(|@import|https?:|fetch\(|//[a-z]+\.", text)


def test_charts_have_points_within_their_box_and_none_that_is_no_number(run):
    _, page = page_of(run)
    lines = [attrs for tag, attrs in page.tags if tag == "polyline"]
    assert len(lines) == 9  # loss 3, speed 2, memory, lr, norm 2
    for line in lines:
        places = [tuple(map(float, place.split(","))) for place in line["points"].split()]
        assert len(places) >= 2 and all(0 <= x <= 1000 and 0 <= y <= 400 for x, y in places)
    data = [json.loads(attrs["data-chart"]) for _, attrs in page.tags if "data-chart" in attrs]
    assert len(data) == 5 and len(data[0]["series"][0][2]) == 59  # without the NaN
    assert data[0]["series"][2][2] == [[30, 0.25], [60, 0.125]]


def test_a_million_steps_keep_their_peaks_in_a_page_of_some_hundred_kilobytes():
    points = [(i, 1.0 + (i == 777_777)) for i in range(1_000_000)]
    kept = thinned(points)
    assert len(kept) <= 600 and (777_777, 2.0) in kept and kept == sorted(kept)
    assert len(chart("x", [Series("a", points)])) < 50_000


def test_the_mean_around_a_point_leans_to_no_side():
    line = [(i, 3.0 * i) for i in range(100)]
    assert smoothed(line) == [(i, pytest.approx(3.0 * i)) for i in range(100)]


@pytest.mark.parametrize(
    "low, high",
    [(0, 1), (0.13, 0.135), (-3, 7), (5, 5), (0, 0), (1e-6, 3e-5), (12_345, 67_890_000)],
)
def test_grid_lines_are_even_and_hold_the_values(low, high):
    ticks = _ticks_of(low, high)
    assert 2 <= len(ticks) <= 8 and ticks[0] <= low + 1e-9 and ticks[-1] >= high - 1e-9
    assert len({round(b - a, 9) for a, b in zip(ticks, ticks[1:], strict=False)}) == 1
    assert all(len(short(t)) <= 8 for t in ticks)


# ---- in a browser --------------------------------------------------------------------------------

BROWSER = next(
    filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None
)
LOOK = """<script>
const area = document.querySelector(".area"), box = area.getBoundingClientRect();
area.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width, bubbles: true}));
const tip = document.querySelector(".tip");
document.body.dataset.seen = JSON.stringify({
  lines: [...document.querySelectorAll("polyline")].map((l) => {
    const r = l.getBoundingClientRect(); return [r.width, r.height, l.getTotalLength()]; }),
  tip: tip.hidden ? "" : tip.textContent, wide: document.documentElement.scrollWidth - innerWidth,
  ground: getComputedStyle(document.body).backgroundColor, text: getComputedStyle(document.body).color});
</script>"""


def seen(page, folder, width: int) -> tuple[dict, str]:
    """What a browser of that width made of the page, and what it complained of."""
    assert BROWSER, "install Chromium, or leave the mark `browser` out"
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--window-size={width},900",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=patience(100),
    )
    found = unescape(re.search(r'<body data-seen="([^"]*)"', done.stdout)[1])
    return json.loads(found), "\n".join(
        line for line in done.stderr.splitlines() if "CONSOLE" in line
    )


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 500])
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_it_without_complaint_in_light_and_dark_wide_and_narrow(run, width, dark):
    text, _ = page_of(run)
    if dark:
        text = text.replace("@media (prefers-color-scheme: dark)", "@media all")
    look = run / "look.html"
    look.write_text(text.replace("</body>", LOOK + "</body>"))
    found, complaints = seen(look, run, width)
    assert not complaints
    assert len(found["lines"]) == 9 and all(wide > 100 for wide, _, _ in found["lines"])
    assert found["tip"].startswith("step 60: ") and "held out 0.125" in found["tip"]
    assert found["wide"] <= 0  # nothing to scroll sideways
    light = [
        sum(map(int, re.findall(r"\d+", found[name])[:3])) / 765 for name in ("ground", "text")
    ]
    assert (light[0] < 0.15 and light[1] > 0.85) if dark else (light[0] > 0.9 and light[1] < 0.2)
