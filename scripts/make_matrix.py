"""docs/matrix.md, made of docs/matrix.json, which `python -m tests.matrix` writes."""

# ruff: noqa: E501  a paragraph of Markdown is one line
from __future__ import annotations

import json
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "matrix.md"
INTRODUCTION = """# Matrix

See how closely each combination of quantizer, scales, adapter and sharding strategy trains like transformers and PEFT. Each trains 3 steps on 2 ranks (4 under the hybrid strategies) and is compared with one process of transformers and PEFT whose linear layers hold the numbers that the format stands for. `python -m tests.matrix` and `python scripts/make_matrix.py` make this page; the ordinary tests run a subset in which every pair of values occurs.

A cell holds the largest relative difference of losses and gradient norms over its {strategies} strategies ({names}). Trained weights are compared too, except PiSSA's, whose singular vectors have free signs. fp32, on CPU ranks; {count} combinations. "lora and biases" trains a model that has biases (`--bias all`), "lora on experts" a mixture (`--lora_target_parameters experts`).
"""


def page(lines: list[dict]) -> str:
    """The page, of the results of all cells."""
    strategies = list(dict.fromkeys(line["cell"][3] for line in lines))
    adapters = list(dict.fromkeys(line["cell"][2] for line in lines))
    rows = list(dict.fromkeys(tuple(line["cell"][:2]) for line in lines))
    by_place: dict = {}
    for line in lines:
        by_place.setdefault(tuple(line["cell"][:3]), []).append(line)
    reasons = list(dict.fromkeys(line["refused"] for line in lines if "refused" in line))
    text = [
        INTRODUCTION.format(
            strategies=len(strategies), names="; ".join(strategies), count=len(lines)
        ),
        f"| weights | scales | {' | '.join(adapters)} |",
        "|---" * (2 + len(adapters)) + "|",
    ]
    text += [
        f"| {quantizer} | {scales if quantizer != 'none' else '-'} | "
        + " | ".join(entry(by_place[quantizer, scales, a]) for a in adapters)
        + " |"
        for quantizer, scales in rows
    ]
    return "\n".join(
        [*text, "", "Refused combinations:", "", *(f"- {reason}" for reason in reasons), ""]
    )


def entry(lines: list[dict]) -> str:
    """One place of the table, over its strategies."""
    if any("refused" in line for line in lines):
        return "refused"
    return f"{max(line['deviation'] for line in lines):.0e}"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads((DOCS / "matrix.json").read_text())))
