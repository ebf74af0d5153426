"""The wheel and the sdist hold all that the package needs, and the wheel works where it is unpacked."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import fsdp_qlora

ROOT = Path(__file__).parents[1]
DATA = {
    "py.typed",
    "__init__.pyi",
    "demo/worlds.txt",
    "demo/text_to_sql_heldout.jsonl",
    "demo/text_to_sql_schemas.json",
    "demo/text_to_sql_train.jsonl",
}


def tracked() -> list[str]:
    """Files of the checkout, as git lists them; all of the package where there is no git."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [f for f in listed.stdout.splitlines() if (ROOT / f).is_file()]
    return [
        str(f.relative_to(ROOT)) for f in ROOT.rglob("*") if f.is_file() and ".venv" not in f.parts
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    code = "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "dist"


def of_the_package() -> set[str]:
    modules = {str(f.relative_to(ROOT)) for f in (ROOT / "fsdp_qlora").rglob("*.py")}
    return modules | {f"fsdp_qlora/{name}" for name in DATA}


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_data_file_and_nothing_of_the_tests(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert of_the_package() <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fsdp_qlora"}


@pytest.mark.slow
def test_the_sdist_holds_the_package_the_tests_and_what_they_read(built):
    (sdist,) = built.glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    wanted = {f for f in tracked() if f.split("/")[0] in ("docs", "examples", "tests", "scripts")}
    assert of_the_package() | wanted | {"setup.cfg", "constraints.txt", "train.py"} <= names


@pytest.mark.slow
def test_the_wheel_works_where_it_is_unpacked(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys, fsdp_qlora; from fsdp_qlora.cli import main;"
        "from fsdp_qlora.data.sources import open_source;"
        f"assert fsdp_qlora.__file__.startswith({str(tmp_path)!r}), fsdp_qlora.__file__;"
        "row = next(iter(open_source('text_to_sql').rows())); assert row;"
        "sys.exit(main(['estimate', '--params', '7B', '--gpu', 'h100']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "tokens/s per GPU" in done.stdout


def test_every_package_that_an_extra_names_has_the_version_of_the_tests():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pinned = {
        line.split("==")[0].lower()
        for line in (ROOT / "constraints.txt").read_text().split()
        if "==" in line
    }
    named = {
        re.split(r"[\[=<>]", name)[0].lower()
        for extra in setup["options.extras_require"].values()
        for name in extra.split()
    }
    assert named <= pinned


def test_the_image_has_the_files_it_copies_and_runs_as_no_root():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    for name in copied:
        assert (ROOT / name).exists() and f"!{name}" in ignored, name
    user = [line for line in lines if line.startswith("USER ")][-1]
    assert user != "USER root" and lines.index(user) < lines.index('ENTRYPOINT ["fsdp-qlora"]')


def test_each_step_of_the_image_can_be_run_on_what_the_steps_before_it_left():
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line]
    steps = [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]
    known = {"ARG", "FROM", "RUN", "COPY", "USER", "ENV", "WORKDIR", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in steps} <= known
    copied: set[str] = set()
    for name, rest in steps:
        if name == "COPY":
            *sources, target = rest.split()
            copied |= {
                f"{target}{source}" if target.endswith("/") else target for source in sources
            }
        if name == "RUN":
            subprocess.run(["bash", "-n", "-c", rest], check=True)
            used = set(re.findall(r"/src/\w[\w./]*", rest))
            assert used <= copied, used
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = re.search(r'"/src\[([\w,]+)\]"', text)[1].split(",")
    assert {*extras} <= setup["options.extras_require"].keys()
    assert (
        re.search(r'ENTRYPOINT \["([\w-]+)"\]', text)[1]
        in setup["options.entry_points"]["console_scripts"]
    )
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert len([pin for pin in pins if re.match("torch==", pin)]) == 1


@pytest.mark.docker
def test_the_image_is_built_and_its_command_answers():
    subprocess.run(
        ["docker", "build", "--quiet", "--tag", "fsdp_qlora:test", "."], cwd=ROOT, check=True
    )
    told = subprocess.run(
        ["docker", "run", "--rm", "fsdp_qlora:test", "estimate", "--params", "7B", "--gpu", "3090"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "RTX 3090" in told


def test_the_version_is_written_alike_everywhere():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == fsdp_qlora.__version__
    assert f"\n## {fsdp_qlora.__version__}" in (ROOT / "CHANGELOG.md").read_text()
