"""docs/references.md says of each published configuration what `fsdp-qlora estimate` prints."""

import json
import runpy
from pathlib import Path

import pytest
import yaml

from fsdp_qlora.cli import main

ROOT = Path(__file__).parents[1]
MADE = runpy.run_path(str(ROOT / "scripts/published_page.py"))
PAGE = (ROOT / "docs/references.md").read_text()
TABLES = {
    table["title"]: table
    for path in sorted((ROOT / "benchmarks/published").glob("*.yaml"))
    for table in yaml.safe_load(path.read_text())["tables"]
}


def printed(run: dict, *more: str, capsys) -> dict:
    """The command's answer for a published configuration, typed as its flags."""
    flags = dict(gpus=1, batch_size=1) | run.get("settings", {})
    flags |= {k: run[k] for k in ("gpu", "gpus", "batch_size", "context_length") if k in run}
    argv = [f"--{name}={str(value).lower()}" for name, value in flags.items()]
    argv += [f"--interconnect={run['interconnect']}"] if "interconnect" in run else []
    argv += ["--defaults=classic", "--model_name", run["model"], *more, "--json"]
    assert main(["estimate", *argv]) == 0
    return json.loads(capsys.readouterr().out)


RUNS = [
    (title, place)
    for title, table in TABLES.items()
    if table["kind"] == "runs"
    for place in {0, len(table["runs"]) - 1}
]


@pytest.mark.parametrize("title, place", RUNS)
def test_an_estimate_of_the_page_is_the_commands(title, place, capsys):
    run = TABLES[title].get("defaults", {}) | TABLES[title]["runs"][place]
    line = MADE["run_line"](run, [])
    more = ["--beyond_positions"] if "(beyond positions)" in line[0] else []
    answer = printed(run, *more, capsys=capsys)
    assert line[3] == f"{answer['reserved_gib']:.1f}"
    assert line[4].split()[0] == f"{answer['tokens_per_second_per_gpu']:,.0f}"
    assert f"| {line[0]} |" in PAGE


def test_rows_beyond_a_models_positions_need_the_flag_that_says_so(capsys):
    run = next(r for r in TABLES["H100"]["runs"] if "Phi-3-mini QLoRA" in r["name"])
    argv = ["--model_name", run["model"], "--gpu", "h100", "--context_length", "8192"]
    assert main(["estimate", *argv]) == 2
    assert "has 4096 positions; give at most as many, or" in capsys.readouterr().err
    assert main(["estimate", *argv, "--beyond_positions"]) == 0
    assert main(["plan", *argv, "--beyond_positions"]) == 0


@pytest.mark.parametrize("title", [t for t, table in TABLES.items() if table["kind"] == "costs"])
def test_a_cost_of_the_page_is_the_commands(title, capsys):
    run = TABLES[title].get("defaults", {}) | TABLES[title]["runs"][-1]
    line = MADE["cost_line"](run)
    more = [f"--examples={run['examples']}", f"--num_epochs={run.get('epochs', 1)}"]
    more += [f"--price_per_hour={run['price']}"] if "price" in run else []
    more += [f"--card_price={run['card_price']}"] if "card_price" in run else []
    cost = printed(run, *more, capsys=capsys)["run"]
    assert line[3:5] == [f"{cost['hours']:,.1f}", f"{cost['dollars']:,.2f}"]
    if "owned" in run:
        assert line[-1] == f"{cost['owned']['dollars']:,.2f}"


def test_owned_cards_cost_their_wear_and_their_power(capsys):
    argv = ["--model_name", "llama-2-7b", "--gpu", "4090", "--gpus", "2", "--examples", "1000"]
    own = ["--card_price", "2000", "--card_years", "2", "--kwh_price", "0.3"]
    assert main(["estimate", *argv, *own, "--json"]) == 0
    run = json.loads(capsys.readouterr().out)["run"]
    an_hour = 2000 / (2 * 365 * 24) + 0.450 * 0.3  # an RTX 4090 takes 450 W
    assert run["owned"]["dollars"] == pytest.approx(2 * run["hours"] * an_hour)
    assert main(["estimate", *argv, *own]) == 0
    assert f"on your own cards: ${run['owned']['dollars']:,.2f}" in capsys.readouterr().out
    assert main(["estimate", *argv[:-2], *own]) == 2
    assert "--card_price needs --examples" in capsys.readouterr().err
    for wrong in (["--card_years", "0"], ["--kwh_price", "-1"], ["--card_price", "nan"]):
        assert main(["estimate", *argv, *own, *wrong]) == 2
        assert wrong[0] in capsys.readouterr().err
