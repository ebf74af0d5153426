"""What quality.py compares, and tables of what it and one_step_error.py wrote; no torch."""

from __future__ import annotations

from statistics import mean, stdev

from fsdp_qlora.bench.tables import markdown

# The settings of each, important ones first: a run that is cut off has these.
VARIANTS = {
    "bf16": dict(train_type="lora"),
    "nf4": dict(train_type="qlora"),
    "bf16, fp8 products": dict(train_type="lora", compute_dtype="fp8"),
    "nf4, fp8 products": dict(train_type="qlora", compute_dtype="fp8"),
    "nf4, 8-bit scales": dict(train_type="qlora", absmax_dtype="int8"),
    "nf4, DoRA": dict(train_type="bnb_dora"),
    "hqq 4 bits": dict(train_type="hqq_lora", n_bits=4),
    "hqq 3 bits": dict(train_type="hqq_lora", n_bits=3),
    "hqq 2 bits": dict(train_type="hqq_lora", n_bits=2),
    "int8": dict(quant="int8"),
    "fp4": dict(quant="fp4"),
    "bf16, DoRA": dict(train_type="lora", adapter="dora"),
}
BASE = "bf16"  # what the others are compared with
FP8 = {"bf16, fp8 products": "bf16", "nf4, fp8 products": "nf4"}  # and the same weights without
CLEAR = 2.5  # standard deviations over three seeds: 4.30, of Student's t, by the root of three
WINDOW = 10  # steps that a point of a curve is the mean of
TITLES = {"text_to_sql": "Text to SQL", "stdlib": "Source of the standard library"}


def tables(rows: list[dict]) -> str:
    """One table a task."""
    found = [row for row in rows if row.get("status") == "ok" and "variant" in row]
    return "\n\n".join(
        f"{TITLES[task]}\n\n{table([r for r in found if r['task'] == task])}"
        for task in TITLES
        if any(r["task"] == task for r in found)
    )


def table(rows: list[dict]) -> str:
    """A task's variants: the loss before training, after it over all seeds, and against bf16.

    Runs of one seed see the same rows in the same order, so the difference is taken seed by seed.
    """
    losses = final_losses(rows)
    start = {row["variant"]: row["held_out_loss"] for row in rows if row["seed"] is None}
    head = ["weights", "before", "after", f"against {BASE}", "seeds"]
    return markdown(
        head,
        [
            [
                variant,
                f"{start[variant]:.3f}" if variant in start else "",
                spread(list(by_seed.values()), 4),
                against(losses, variant),
                str(len(by_seed)),
            ]
            for variant, by_seed in losses.items()
        ],
    )


def final_losses(rows: list[dict]) -> dict[str, dict[int, float]]:
    """Held-out loss by variant and seed; of lines of the same run the newest counts."""
    found: dict[str, dict[int, float]] = {variant: {} for variant in VARIANTS}
    for row in rows:
        if row["seed"] is not None:
            found[row["variant"]][row["seed"]] = row["held_out_loss"]
    return {variant: dict(sorted(by_seed.items())) for variant, by_seed in found.items() if by_seed}


def against(losses: dict[str, dict[int, float]], variant: str) -> str:
    """The mean difference from the base; bold if it is no accident."""
    found = [] if variant == BASE else differences(losses, variant)
    text = spread(found, 4, "+")
    return f"**{text}**" if exceeds_spread(found) else text


def differences(losses: dict[str, dict[int, float]], variant: str) -> list[float]:
    """A variant's losses less the base's, of the seeds that both have."""
    ours, theirs = losses.get(variant, {}), losses.get(BASE, {})
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


def exceeds_spread(values: list[float]) -> bool:
    """Whether three seeds or more agree on it: one accident in twenty, by Student's t for three."""
    return len(values) >= 3 and abs(mean(values)) > CLEAR * stdev(values)


def gaps(rows: list[dict], variant: str) -> list[list[float]]:
    """Of each seed, training loss of fp8 products less that of bf16 ones, at every step."""
    losses = {(row["variant"], row["seed"]): row["losses"] for row in rows if row.get("losses")}
    return [
        [a - b for a, b in zip(losses[variant, seed], losses[FP8[variant], seed], strict=True)]
        for found, seed in losses
        if found == variant and (FP8[variant], seed) in losses
    ]


def smooth(values: list[float]) -> list[float]:
    """Means of WINDOW steps in a row."""
    return [mean(values[i : i + WINDOW]) for i in range(len(values) - WINDOW + 1)]


def fp8_table(rows: list[dict]) -> str:
    """fp8 products beside bf16 ones, by task and weights; each seed with its like."""
    head = [
        "task, weights",
        "held-out loss, fp8 less bf16",
        "training loss, fp8 less bf16",
        f"largest gap of {WINDOW}-step means",
        "seeds",
    ]
    body = []
    for task, title in TITLES.items():
        found = [row for row in rows if row.get("task") == task and row.get("status") == "ok"]
        for variant, base in FP8.items():
            per_seed = gaps(found, variant)
            if not per_seed:
                continue
            losses = final_losses([row for row in found if "variant" in row])
            ends = [
                losses[variant][seed] - losses[base][seed]
                for seed in losses[variant]
                if seed in losses[base]
            ]
            largest = max((gap for gap in per_seed for gap in smooth(gap)), key=abs, default=0.0)
            body.append(
                [
                    f"{title}, {base}",
                    spread(ends, 4, "+"),
                    spread([mean(gap) for gap in per_seed], 4, "+"),
                    f"{largest:+.4f}",
                    str(len(per_seed)),
                ]
            )
    return markdown(head, body)


def spread(values: list[float], places: int, sign: str = "") -> str:
    """Mean and sample standard deviation; of a single value the value."""
    if not values:
        return ""
    text = f"{mean(values):{sign}.{places}f}"
    return text if len(values) == 1 else f"{text} ± {stdev(values):.{places}f}"


def error_tables(rows: list[dict]) -> str:
    """One step's errors, a table a task; the newest line of a case counts."""
    head = [
        "weights",
        "loss",
        "error of the loss",
        "error of the gradient",
        "of the loss, same weights",
        "of the gradient, same weights",
    ]
    found = {(row["task"], row["case"]): row for row in rows if "case" in row}
    return "\n\n".join(
        f"{title}\n\n" + markdown(head, [error_line(row) for row in lines])
        for task, title in TITLES.items()
        if (lines := [row for (of, _), row in found.items() if of == task])
    )


def error_line(row: dict) -> list[str]:
    """One case against fp32 on the checkpoint's weights, and on what these were rounded to."""
    return [
        row["case"],
        f"{row['loss']:.4f}",
        *(
            text
            for which in ("error", "own_error")
            for text in (f"{row[which]['loss']:.3%}", f"{row[which]['gradient']:.2%}")
        ),
    ]
