"""Quantizer x scales x adapter x strategy: each value, each pair of values, or all cells."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest

from scripts.make_matrix import PAGE, page
from tests.matrix import (
    RESULTS,
    TOLERANCE,
    cells,
    covering,
    outcomes,
    refusal,
    save_models,
    values_of,
)
from tests.parts import rest


def accepted():
    return [c for c in cells() if not refusal(c)]


@pytest.mark.parametrize("together", [1, rest(2)])
def test_every_value_and_pair_of_quantizer_scales_adapter_and_strategy_equals_one_process(
    tmp_path, together
):
    few = covering(accepted(), together)
    values = lambda some: set().union(*(values_of(c, together) for c in some))  # noqa: E731
    assert values(few) == values(accepted()) and len(few) < len(accepted()) / 5
    apart = dict(outcomes(save_models(tmp_path), few))
    assert len(apart) == len(few)
    assert not {c: a for c, a in apart.items() if not a < TOLERANCE}


@pytest.mark.exhaustive
def test_every_cell_equals_one_process(tmp_path):
    apart = dict(outcomes(save_models(tmp_path), accepted()))
    assert not {c: a for c, a in apart.items() if not a < TOLERANCE}


def test_a_cell_is_refused_only_where_no_weight_could_be_trained_and_says_so():
    for cell in cells():
        text = refusal(cell)
        assert bool(text) == (cell.adapter == "full" and cell.quantizer != "none"), cell
        if text:
            assert "--adapter none" in text and "--adapter lora" in text


def test_the_page_is_made_of_a_run_of_every_cell():
    lines = json.loads(RESULTS.read_text())
    assert [tuple(line["cell"]) for line in lines] == [astuple(c) for c in cells()]
    assert all(line["deviation"] < TOLERANCE for line in lines if "refused" not in line)
    assert PAGE.read_text() == page(lines)
