"""What a type checker sees of the package, as a user of it runs one."""

from __future__ import annotations

import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import fsdp_qlora

ROOT = Path(__file__).parents[1]
MISTAKES = """import fsdp_qlora as fq
fq.RunConfig(learning_rate=1e-4)
fq.plan_batches(fq.RunConfig(), world_size="2")
fq.quantize_linear
"""


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


@pytest.mark.slow
def test_mistakes_of_a_user_are_seen(tmp_path):
    (tmp_path / "use.py").write_text(MISTAKES)
    found = mypy(str(tmp_path / "use.py"))
    assert 'Unexpected keyword argument "learning_rate"' in found
    assert 'Argument "world_size" to "plan_batches" has incompatible type "str"' in found
    assert 'Module has no attribute "quantize_linear"' in found
