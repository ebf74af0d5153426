"""The names that the package promises, and that asking for them costs nothing until one is used."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_qlora


@pytest.mark.parametrize("name", fsdp_qlora.__all__)
def test_every_public_name_is_there(name):
    module = importlib.import_module(f"fsdp_qlora.{fsdp_qlora.PUBLIC[name]}")
    assert getattr(fsdp_qlora, name) is getattr(module, name)


@pytest.mark.parametrize("name", fsdp_qlora.__all__)
def test_the_page_shows_its_signature_and_what_it_does_without_a_build(name):
    page = (Path(__file__).parents[1] / "docs/api.md").read_text()
    (signature, text) = re.search(
        rf"^### {name}\n\n```python\n{name}(.*?)\n```\n\n(.+?)$", page, flags=re.M | re.S
    ).groups()
    thing = getattr(fsdp_qlora, name)
    if name in ("RunConfig", "STRATEGIES"):  # every field, every strategy has a page of its own
        assert ".md)" in text
        return
    assert text == inspect.getdoc(thing).splitlines()[0]
    shown = ast.parse(f"def {name}{signature}: ...").body[0].args
    names = [each.arg for each in ast.walk(shown) if isinstance(each, ast.arg)]
    assert sorted(names) == sorted(set(inspect.signature(thing).parameters))


@pytest.mark.parametrize("old, new", fsdp_qlora.DEPRECATED.items())
def test_an_old_name_still_works_and_tells_the_new_one(old, new):
    with pytest.warns(DeprecationWarning, match=rf"fsdp_qlora\.{old} is now fsdp_qlora\.{new}"):
        assert getattr(fsdp_qlora, old) is getattr(fsdp_qlora, new)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="fsdp_qlora.*no_such_name"):
        _ = fsdp_qlora.no_such_name


def test_star_import_gives_the_public_names():
    names = {}
    exec("from fsdp_qlora import *", names)
    assert set(fsdp_qlora.__all__) <= set(names)


def test_importing_the_package_imports_no_torch():
    code = "import sys, fsdp_qlora; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
