"""The names that the package promises, and that asking for them costs nothing until one is used."""

import importlib
import subprocess
import sys

import pytest

import fsdp_qlora


@pytest.mark.parametrize("name", fsdp_qlora.__all__)
def test_every_public_name_is_there(name):
    module = importlib.import_module(f"fsdp_qlora.{fsdp_qlora.PUBLIC[name]}")
    assert getattr(fsdp_qlora, name) is getattr(module, name)


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
