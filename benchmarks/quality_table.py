"""Tables of what quality.py and one_step_error.py wrote; no torch."""
from __future__ import annotations

from statistics import mean, stdev

from fsdp_qlora.bench.tables import markdown

BASE = "bf16"  # what the others are compared with
TITLES = {"text_to_sql": "Text to SQL", "stdlib": "Source of the standard library"}


def tables(rows: list[dict]) -> str:
    """One table a task."""
    found = [row for row in rows if row.get("status") == "ok" and "variant" in row]
    return "\n\n".join(f"{TITLES[task]}\n\n{table([r for r in found if r['task'] == task])}"
                       for task in TITLES if any(r["task"] == task for r in found))


def table(rows: list[dict]) -> str:
    """A task's variants: the loss before training, after it over all seeds, and against bf16.

    Runs of one seed see the same rows in the same order, so the difference is taken seed by seed.
    """
    losses = final_losses(rows)
    start = {row["variant"]: row["held_out_loss"] for row in rows if row["seed"] is None}
    head = ["weights", "before", "after", f"against {BASE}", "seeds"]
    return markdown(head, [[variant, f"{start[variant]:.3f}" if variant in start else "",
                            spread(list(by_seed.values()), 4), against(losses, variant),
                            str(len(by_seed))] for variant, by_seed in losses.items()])


def final_losses(rows: list[dict]) -> dict[str, dict[int, float]]:
    """Held-out loss by variant and seed, in the order of the variants' first rows; the newest counts."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["seed"] is None: continue
        found.setdefault(row["variant"], {})[row["seed"]] = row["held_out_loss"]
    return found


def against(losses: dict[str, dict[int, float]], variant: str) -> str:
    """The mean difference from the base over the seeds that both have."""
    if variant == BASE or BASE not in losses: return ""
    ours, theirs = losses[variant], losses[BASE]
    return spread([ours[seed] - theirs[seed] for seed in ours if seed in theirs], 4, "+")


def spread(values: list[float], places: int, sign: str = "") -> str:
    """Mean and sample standard deviation; of a single value the value."""
    if not values: return ""
    text = f"{mean(values):{sign}.{places}f}"
    return text if len(values) == 1 else f"{text} ± {stdev(values):.{places}f}"


def error_tables(rows: list[dict]) -> str:
    """One step's errors, a table a task; the newest line of a case counts."""
    head = ["weights", "loss", "error of the loss", "error of the gradient",
            "of the loss, same weights", "of the gradient, same weights"]
    found = {(row["task"], row["case"]): row for row in rows if "case" in row}
    return "\n\n".join(f"{title}\n\n" + markdown(head, [error_line(row) for row in lines])
                       for task, title in TITLES.items()
                       if (lines := [row for (of, _), row in found.items() if of == task]))


def error_line(row: dict) -> list[str]:
    """One case against fp32 on the checkpoint's weights, and on what these were rounded to."""
    return [row["case"], f"{row['loss']:.4f}",
            *(text for which in ("error", "own_error")
              for text in (f"{row[which]['loss']:.3%}", f"{row[which]['gradient']:.2%}"))]
