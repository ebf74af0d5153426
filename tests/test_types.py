"""What a type checker sees of the package, as a user of it runs one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import get_args

import pytest

import fsdp_qlora
from fsdp_qlora.choices import (
    FORMATS,
    OPTIMIZERS,
    POLICIES,
    STRATEGIES,
    FormatName,
    OptimizerName,
    PolicyName,
    StrategyName,
)

ROOT = Path(__file__).parents[1]
MISTAKES = """import fsdp_qlora as fq
fq.RunConfig(learning_rate=1e-4)
fq.plan_batches(fq.RunConfig(), world_size="2")
fq.quantize_linear
fq.quantize_linears(fq.load_adapter(None, "adapter"), "nf5")
fq.apply_sharding(fq.build_model(fq.RunConfig(), None), "full_shards")
"""
USE = ROOT / "tests/typed_use.py"


def mypy(*args: str) -> str:
    """mypy's findings, under the project's settings."""
    return subprocess.run(
        [sys.executable, "-m", "mypy", *args], cwd=ROOT, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
def test_mypy_finds_nothing_in_what_is_public():
    assert mypy().startswith("Success")


def test_every_module_of_a_public_name_is_checked():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    files = {f.strip() for f in setup["mypy"]["files"].replace("\n", " ").split(",")}
    for module in set(fsdp_qlora.PUBLIC.values()):
        path = "fsdp_qlora/" + module.replace(".", "/")
        assert {path, f"{path}.py", f"{path}/__init__.py"} & files, module


def test_every_example_is_checked():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert "examples" in re.split(r"[,\s]+", setup["mypy"]["files"])


# What pyright says of other packages' own exports: `from trl import SFTConfig` and torch's TCPStore are
# documented, but imported there without `as` or `__all__`. Ray comes with no extra.
LIBRARIES_OWN = re.compile(
    r'"\w+Config" is not exported from module "trl"'
    r'|"TCPStore" is not exported from module "torch.distributed"'
    r'|Import "ray(\.train(\.torch)?)?" could not be resolved'
)


@pytest.mark.pyright
def test_pyright_finds_nothing_in_the_examples_and_in_a_use_of_every_public_name():
    options = ["--outputjson", "--pythonpath", sys.executable]
    found = subprocess.run(
        [sys.executable, "-m", "pyright", *options, str(USE), "examples"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    found = json.loads(found)
    assert found["summary"]["filesAnalyzed"] == 1 + len([*(ROOT / "examples").rglob("*.py")])
    said = [f"{d['file']}: {d['message']}" for d in found["generalDiagnostics"]]
    assert not [line for line in said if not LIBRARIES_OWN.search(line)]


@pytest.mark.slow
def test_mistakes_of_a_user_are_seen(tmp_path):
    (tmp_path / "use.py").write_text(MISTAKES)
    found = mypy(str(tmp_path / "use.py"))
    assert 'Unexpected keyword argument "learning_rate"' in found
    assert 'Argument "world_size" to "plan_batches" has incompatible type "str"' in found
    assert 'Module has no attribute "quantize_linear"' in found
    assert 'Argument 2 to "quantize_linears" has incompatible type' in found
    assert 'Argument 2 to "apply_sharding" has incompatible type' in found


@pytest.mark.slow
def test_a_script_of_the_public_names_is_strictly_typed():
    """--strict refuses a call of a function that lacks the type of an argument or of its result."""
    assert mypy("--strict", str(USE)).startswith("Success")


def test_that_script_has_every_public_name():
    used = set(re.findall(r"\bfq\.(\w+)", USE.read_text()))
    assert used == set(fsdp_qlora.PUBLIC)


def test_types_of_choices_are_the_rows_of_their_tables():
    assert get_args(FormatName) == tuple(FORMATS)
    assert get_args(OptimizerName) == tuple(OPTIMIZERS)
    assert get_args(PolicyName) == tuple(POLICIES)
    names = {name for part in get_args(StrategyName) for name in get_args(part)}
    assert names == STRATEGIES.keys() | {row.fsdp1 for row in STRATEGIES.values()}
