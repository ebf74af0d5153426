"""Every recipe is short, valid, fits the machine that it names, and says what the estimator says."""

import re
import runpy
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from fsdp_qlora.cli import TrainOptions, parse
from fsdp_qlora.config.reference import schema

ROOT = Path(__file__).parents[1]
MADE = runpy.run_path(str(ROOT / "scripts/make_reference.py"))
RECIPES = pytest.mark.parametrize("path", MADE["recipe_files"](), ids=lambda path: path.stem)
STALE = "the header is old; run: python scripts/make_reference.py"


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
    if found.config.use_cpu_offload:
        host = int(re.search(r"(\d+) of the host", said)[1])
        assert host == pytest.approx(found.memory.host, rel=0.05), STALE
    step = float(re.search(r"([\d.]+) s a step", said)[1])
    assert step == pytest.approx(found.step.total, rel=0.15), STALE


@RECIPES
def test_its_command_is_one_that_the_program_takes_and_starts_as_many_ranks_as_the_machine_has(
    path,
):
    launcher, _, flags = MADE["header"](path)["run"].partition("train.py ")
    config, _ = parse(shlex.split(flags), TrainOptions)
    assert (
        flags == f"--config {path.relative_to(ROOT)}" and config == MADE["estimated"](path).config
    )
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
