"""Every recipe is short, valid, fits the machine that it names, says what the estimator says, and its
dry run passes; every rung of the ladder has one."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from fsdp_qlora.catalog.known_models import known_config
from fsdp_qlora.cli import TrainOptions, parse
from fsdp_qlora.config.reference import schema
from fsdp_qlora.planner import BEYOND, rungs

from .parts import rest
from .tokenizers import save_tokenizer

ROOT = Path(__file__).parents[1]
MADE = runpy.run_path(str(ROOT / "scripts/make_reference.py"))
RECIPES = pytest.mark.parametrize("path", MADE["recipe_files"](), ids=lambda path: path.stem)
NAMES = [path.stem for path in MADE["recipe_files"]()]
QUICK = ["8b-1xh100", "continued-pretraining"]
STALE = "the header is old; run: python scripts/make_reference.py"


# Dry runs of all recipes in one process: a line of JSON each.
DRY_RUNS = """
import contextlib, io, json, sys
from fsdp_qlora.cli import main
for recipe, ranks in json.load(open("recipes.json")):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(["train", "--config", recipe, "--dry_run", "--device", "cpu", "--world_size", ranks])
    print(json.dumps([recipe, code, said.getvalue()]))
"""
ROWS = {
    "rows.jsonl": {"instruction": "Say N", "output": "N"},
    "chat.jsonl": {"messages": [{"role": r, "content": "N"} for r in ("user", "assistant")]},
    "corpus/text.jsonl": {"text": "N hi there"},
}


def cached_model(cache: Path, name: str):
    """A model's real config.json and a small tokenizer, as the hub's cache has them."""
    folder = cache / f"hub/models--{name.replace('/', '--')}"
    snapshot = folder / f"snapshots/{'a' * 40}"
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("a" * 40)
    (snapshot / "config.json").write_text(json.dumps(known_config(name)))
    save_tokenizer(snapshot)


def dry_runs(folder: Path, paths: list[Path]) -> dict[str, tuple[int, str]]:
    """Exit code and output of each recipe's dry run, on the CPU, with the ranks of its machine."""
    found = {path: MADE["estimated"](path) for path in paths}
    for name in {made.config.model_name for made in found.values()}:
        cached_model(folder / "cache", name)
    for file, row in ROWS.items():
        (folder / file).parent.mkdir(exist_ok=True)
        lines = (json.dumps(row).replace("N", str(n)) for n in range(80))
        (folder / file).write_text("\n".join(lines))
    asked = [(str(path), str(made.machine.world_size)) for path, made in found.items()]
    (folder / "recipes.json").write_text(json.dumps(asked))
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", DRY_RUNS],
        cwd=folder,
        capture_output=True,
        text=True,
        env=env | dict(HF_HOME=str(folder / "cache"), HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 0, done.stderr
    return {
        Path(name).stem: (code, said)
        for name, code, said in map(json.loads, done.stdout.splitlines())
    }


@pytest.mark.parametrize("names", [QUICK, rest([n for n in NAMES if n not in QUICK])])
def test_its_dry_run_passes(tmp_path, names):
    found = dry_runs(tmp_path, [path for path in MADE["recipe_files"]() if path.stem in names])
    assert sorted(found) == sorted(names)
    for name, (code, said) in found.items():
        assert code == 0, (name, said)
        assert said.endswith("dry run: nothing was trained or written\n"), name


def test_every_rung_of_the_ladder_and_each_hybrid_has_a_recipe():
    guide = runpy.run_path(str(ROOT / "scripts/guide_page.py"))
    steps = rungs() + [(r, guide["after"](r)) for r in BEYOND if r.name.startswith("hybrid")]
    assert [rung.name for rung, changes in steps if not guide["recipes_of"](changes)] == []


class Yaml12(yaml.SafeLoader):
    """YAML 1.2, as editors read it: 1e-4 is a number."""


Yaml12.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^-?\d+(\.\d+)?e-?\d+$"), list("-0123456789")
)


@RECIPES
def test_it_fits_its_machine_and_needs_the_memory_that_its_header_says(path):
    found, said = MADE["estimated"](path), MADE["header"](path)["expects"]
    assert found.fits
    needs = float(re.match(r"([\d.]+) of", said)[1])
    assert needs == pytest.approx(found.memory.total, rel=0.03), STALE
    if found.config.use_cpu_offload or found.config.use_activation_cpu_offload:
        host = int(re.search(r"(\d+) of the host", said)[1])
        assert host == pytest.approx(found.memory.host, rel=0.05), STALE
    step = float(re.search(r"([\d.]+) s a step", said)[1])
    assert step == pytest.approx(found.step.total, rel=0.15), STALE


@RECIPES
def test_its_command_is_one_that_the_program_takes_and_starts_as_many_ranks_as_the_machine_has(
    path,
):
    launcher, _, flags = MADE["header"](path)["run"].partition("train.py ")
    parse(shlex.split(flags), TrainOptions)
    assert flags == f"--config {path.relative_to(ROOT)}"
    count = {name: int(n) for name, n in re.findall(r"--(nnodes|nproc_per_node) (\d+)", launcher)}
    ranks = count.get("nnodes", 1) * count.get("nproc_per_node", 1)
    assert ranks == MADE["estimated"](path).machine.world_size


@RECIPES
def test_it_is_valid_by_the_schema_that_it_names_and_fits_on_a_screen(path):
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.validate(yaml.load(text, Yaml12), schema())
    assert len(text.splitlines()) <= 30


def test_what_was_measured_near_a_recipe_is_a_row_of_the_results():
    for name in MADE["NEAREST"]:
        path = ROOT / f"examples/recipes/{name}.yaml"
        assert re.search(r"[\d,]+ tokens/s per GPU", MADE["measured"](path)), name
        assert MADE["header"](path)["measured"] == MADE["measured"](path), STALE


def test_a_hybrid_recipe_leaves_only_gradients_to_the_link_between_machines():
    found = MADE["estimated"](ROOT / "examples/recipes/70b-2-nodes.yaml")
    assert found.machine.nodes == 2 and found.plan.sharding.shard_ranks == found.machine.gpus
