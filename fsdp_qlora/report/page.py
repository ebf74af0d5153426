"""The report of a run as one HTML page that stands alone: styles, script and charts are in it.

Pure: no torch, so that a report can be made on a laptop from a copied folder.
"""

from __future__ import annotations

from dataclasses import fields
from html import escape
from importlib.resources import files
from pathlib import Path

from ..config.run import GROUPS
from ..config.settings import default_of, shown
from ..estimate.report import duration
from ..redact import redact, without_folders
from ..writable import check_file
from .charts import Series, chart, histogram, short
from .run_history import RunHistory, points_of, read_run_history, smoothed

_NO_GPU = "not measured: no GPU was used"
_NO_ACCURACY = "not counted: the model keeps its own loss, or the run is of an older version"


def write_report(
    run: str | Path, path: str | Path | None = None, is_running: bool | None = None
) -> Path:
    """Write the page of a run's folder, `report.html` in it if not said otherwise.

    is_running: whether the run still is, if that is known (lifecycle/lock.py).
    Raises ValueError for a folder that is no run's, and naming --output for a page that can't be written.
    """
    target = Path(path) if path else Path(run) / "report.html"
    check_file("output", target)
    story = read_run_history(run)
    story.is_running = is_running
    try:
        text = page(story)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{run}: metrics.jsonl has a record that no run writes "
            f"({type(error).__name__}: {error}); give a folder that a run has written"
        ) from error
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(redact(text), encoding="utf-8")
    return target


def page(story: RunHistory) -> str:
    """The whole page."""
    settings = story.start.get("settings", {})
    name = without_folders(settings.get("model_name") or "a run")
    parts = [
        header(story, name, settings),
        tiles(story),
        section("Curves", curves(story)),
        section("Answers", samples(story)),
        section("Data", data(story)),
        section("Estimate and measurement", _comparison(story)),
        section("Starts, stops and faults", events(story)),
        section("Settings", configuration(settings)),
    ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(name)}: report of a run</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,"><style>{_own_file("page.css")}</style></head>
<body><main>{"".join(parts)}</main><script>{_own_file("page.js")}</script></body></html>
"""


def _own_file(name: str) -> str:
    """A file beside this one."""
    return files(__package__).joinpath(name).read_text()


def section(title: str, content: str) -> str:
    """A titled part; nothing where there is no content."""
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _html_table(rows: list[list[str]], head: list[str] | None = None, style: str = "") -> str:
    """Rows of text; the first cell of each is its name."""
    top = "<tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>" if head else ""
    body = "".join(
        "<tr><th>"
        + escape(first)
        + "</th>"
        + "".join(f"<td>{escape(c)}</td>" for c in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return f'<div class="box"><table class="{style}">{top}{body}</table></div>'


# ---- top ---------------------------------------------------------------------------------------


def header(story: RunHistory, name: str, settings: dict) -> str:
    """What was trained, on what, and how it ended."""
    about = settings.get("about", {})
    status = story.status
    parts = [
        f'<b class="{escape(status.split()[0])}">{escape(status)}</b>',
        escape(without_folders(settings["dataset"])) if settings.get("dataset") else "",
        escape(about.get("hardware", "")),
        escape(settings.get("sharding_strategy", "")),
        escape(kind_of(settings)),
        escape(about.get("date", "")),
    ]
    line = " · ".join(p for p in parts if p)
    return f'<header><h1>{escape(name)}</h1><p class="about">{line}</p></header>'


def kind_of(settings: dict) -> str:
    """What is trained, in words."""
    if not settings:
        return ""
    base = "16-bit" if settings["quant"] == "none" else settings["quant"]
    if settings["adapter"] == "none":
        return "all weights trained"
    return f"{settings['adapter']} r={settings['lora_rank']} on {base} weights"


def tiles(story: RunHistory) -> str:
    """The figures one looks for first."""
    last, steps = story.steps[-1:], story.start.get("total_steps")
    best = min((e["eval_loss"] for e in story.evaluations), default=None)
    share, speed = story.typical("share_of_peak"), story.typical("tokens_per_second")
    peak, dollars = story.highest("peak_allocated_gib"), story.dollars
    found = {
        f"of {steps:,} steps" if steps else "steps": f"{last[0]['step']:,}" if last else "0",
        "loss, last tenth": short(_last_tenth(story)) if last else None,
        "lowest held-out loss": f"{best:.4f}" if best is not None else None,
        "tokens trained": short(sum(s["trained_tokens"] for s in story.steps)),
        "tokens/s, median": f"{speed:,.0f}" if speed is not None else None,
        "of the card's bf16 peak": f"{share:.0%}" if share is not None else None,
        "GiB at the peak": f"{peak:.1f}" if peak is not None else None,
        "in steps and evaluations": duration(story.seconds / 3600),
        "for the GPUs": f"${dollars:,.2f}" if dollars is not None else None,
    }
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
            for name, value in found.items()
            if value is not None
        )
        + "</div>"
    )


def _last_tenth(story: RunHistory) -> float:
    """The loss per trained token of the last tenth of the steps."""
    part = story.steps[-max(1, len(story.steps) // 10) :]
    tokens = sum(s["trained_tokens"] for s in part)
    return (
        sum(s["loss"] * s["trained_tokens"] for s in part) / tokens if tokens else part[-1]["loss"]
    )


# ---- curves ------------------------------------------------------------------------------------


def curves(story: RunHistory) -> str:
    """The figures over steps."""
    loss, steps = points_of(story.steps, "loss"), story.steps
    held_out = Series("held out", points_of(story.evaluations, "eval_loss"), "other", dots=True)
    accuracy = [
        *_raw_and_mean(points_of(story.steps, "token_accuracy")),
        Series("held out", points_of(story.evaluations, "token_accuracy"), "other", dots=True),
    ]
    speed, norm = points_of(story.warm, "tokens_per_second"), points_of(steps, "grad_norm")
    memory = [p for p in points_of(steps, "peak_allocated_gib") if p[1]]
    return (
        '<div class="charts">'
        + "".join(
            [
                chart(
                    "Loss per trained token", [*_raw_and_mean(loss), held_out], "no step was taken"
                ),
                chart("Token accuracy", accuracy, _NO_ACCURACY),
                chart("Tokens per second, all GPUs", _raw_and_mean(speed), from_zero=True),
                chart(
                    "Memory at its peak, GiB",
                    [Series("allocated", memory)],
                    _NO_GPU,
                    from_zero=True,
                ),
                chart(
                    "Learning rate",
                    [Series("learning rate", points_of(steps, "lr"))],
                    from_zero=True,
                ),
                chart("Gradient norm", _raw_and_mean(norm), from_zero=True),
            ]
        )
        + "</div>"
    )


def _raw_and_mean(points: list[tuple[float, float]]) -> list[Series]:
    """A figure, and its mean around each step."""
    return [Series("each step", points, "pale"), Series("mean around it", smoothed(points), "main")]


# ---- answers -----------------------------------------------------------------------------------


def samples(story: RunHistory) -> str:
    """Each prompt with the answers before and after, and those in between."""
    if not story.samples:
        return ""
    first, last = story.samples[0], story.samples[-1]
    shown = []
    for i, sample in enumerate(last["samples"]):
        answers = {
            when(r): r["samples"][i]["answer"] for r in story.samples if i < len(r["samples"])
        }
        ends = {
            name: answers[name]
            for name in dict.fromkeys((when(first), when(last)))
            if name in answers
        }
        if sample["reference"]:
            ends["in the data"] = sample["reference"]
        between = {name: text for name, text in answers.items() if name not in ends}
        more = (
            f"<details><summary>in between</summary>{blocks(between)}</details>" if between else ""
        )
        shown.append(
            f'<div class="box sample"><p class="prompt">{escape(sample["prompt"])}</p>'
            f"{blocks(ends)}{more}</div>"
        )
    return "".join(shown)


def when(record: dict) -> str:
    """The moment of an answer."""
    return f"after step {record['step']:,}" if record["step"] else "before training"


def blocks(texts: dict[str, str]) -> str:
    """Texts under their names, beside each other where there is room."""
    return (
        '<div class="answers">'
        + "".join(
            f"<div><h3>{escape(name)}</h3><pre>{escape(text) or '(nothing)'}</pre></div>"
            for name, text in texts.items()
        )
        + "</div>"
    )


# ---- data --------------------------------------------------------------------------------------


def data(story: RunHistory) -> str:
    """What happened to the rows on the way to tokens."""
    found = story.data.get("report")
    if not found:
        return ""
    rows = [["rows read", f"{found['rows_read']:,}"], ["rows kept", f"{found['rows_kept']:,}"]]
    rows += [
        [
            f"dropped: {reason}",
            f"{d['rows']:,} ({', '.join(map(str, d['sources']))}"
            + (", ...)" if d["rows"] > len(d["sources"]) else ")"),
        ]
        for reason, d in found["dropped"].items()
    ]
    rows += [
        [
            "truncated",
            f"{found['rows_truncated']:,} rows to {found['context_length']:,} tokens, "
            f"losing {found['tokens_cut']:,}",
        ],
        ["tokens", f"{found['tokens_total']:,}"],
        [
            "of them trained",
            f"{found['tokens_trained']:,} "
            f"({found['tokens_trained'] / max(1, found['tokens_total']):.0%}, {found['train_on']})",
        ],
    ]
    for name, text in (("rows_trained", "rows trained on"), ("rows_held_out", "rows held out")):
        if name in story.data:
            rows.append([text, f"{story.data[name]:,}"])
    lengths = {int(bound): count for bound, count in found["lengths"].items()}
    return f'<div class="pair">{_html_table(rows)}{histogram(lengths) if lengths else ""}</div>'


# ---- estimate ----------------------------------------------------------------------------------


def _comparison(story: RunHistory) -> str:
    """What was predicted beside what was measured."""
    guess = story.start.get("estimate") or {}
    peak, seconds = story.highest("peak_allocated_gib"), story.typical("seconds")
    rows = [
        ["peak memory of a GPU", *pair(guess.get("peak_allocated_gib"), peak, "{:.2f} GiB")],
        ["one optimizer step", *pair(guess.get("seconds_per_step"), seconds, "{:.3f} s")],
        [
            "tokens/s, all GPUs",
            *pair(guess.get("tokens_per_second"), story.typical("tokens_per_second"), "{:,.0f}"),
        ],
    ]
    length = story.start.get("settings", {}).get("context_length")
    note = (
        f'<p class="about">The estimate is of rows of {length:,} tokens, the --context_length; '
        "measured are medians, without the first step of each start, and the highest peak.</p>"
        if length
        else ""
    )
    return _html_table(rows, ["", "estimate", "measured", "measured / estimate"], "figures") + note


def pair(guess: float | None, found: float | None, form: str) -> list[str]:
    """Two figures and their ratio; a dash for what is not known."""
    texts = ["-" if value is None else form.format(value) for value in (guess, found)]
    return [*texts, "-" if not guess or found is None else f"{found / guess:.2f}"]


# ---- events ------------------------------------------------------------------------------------


def events(story: RunHistory) -> str:
    """What happened to the run beside its steps."""
    rows = []
    for event, following in zip(story.events, [*story.events[1:], None], strict=True):
        rows.append(
            [event.get("time", "").replace("T", " ").replace("+00:00", " UTC"), said(event)]
        )
        if event["kind"] == "start" and following and following["kind"] == "start":
            rows.append(["", "ended without a word, as a run does that is killed"])
    if story.checkpoints:
        held = sum(c["seconds_held"] for c in story.checkpoints)
        rows.append(
            [
                "",
                f"{len(story.checkpoints):,} checkpoints, the last after step "
                f"{story.checkpoints[-1]['step']:,}; they held the run up for {held:.1f} s in all",
            ]
        )
    return _html_table(rows) if rows else ""


def said(event: dict) -> str:
    """An event in words."""
    step, kind = f"{event['step']:,}", event["kind"]
    if kind == "start":
        ranks = f"{event['ranks']} rank{'' if event['ranks'] == 1 else 's'}"
        how = f"went on after step {step}" if event["step"] else "began"
        return f"{how} on {ranks}; model ready in {event['load_seconds']:.0f} s"
    if kind == "end":
        if event["message"].startswith(event["status"]):
            return event["message"]
        return f"{event['status']} after step {step}" + f": {event['message']}".removesuffix(": ")
    if kind == "rollback":
        return f"went back from step {event['from_step']:,} to step {step}"
    rows = ", ".join(map(str, event["rows"][:10])) + (", ..." if len(event["rows"]) > 10 else "")
    return f"step {step} was skipped, for its loss or gradient is not a number; its rows: {rows}"


# ---- settings ----------------------------------------------------------------------------------


def configuration(settings: dict) -> str:
    """The settings that differ from their defaults, and all others behind a click."""
    if not settings:
        return ""
    defaults = {f.name: default_of(f) for group in GROUPS for f in fields(group)}
    rows = [[name, shown(settings[name])] for name in defaults if name in settings]
    changed = [row for row in rows if settings[row[0]] != defaults[row[0]]]
    about = settings.get("about", {})
    versions = [[name, version] for name, version in about.get("packages", {}).items()]
    rest = [row for row in rows if row not in changed]
    return (
        f"{_html_table(changed, style='code') if changed else '<p>All settings have their defaults.</p>'}"
        f"<details><summary>settings at their defaults</summary>{_html_table(rest)}</details>"
        f"<details><summary>versions</summary>{_html_table(versions)}</details>"
    )
