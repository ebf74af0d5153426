"""The architecture's promises: imports go one way, the pure layer has no torch, one file owns FSDP."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fsdp_qlora"
# A package imports only from those before it.
ORDER = [
    "redact",
    "json_input",
    "writable",
    "atomic_files",
    "hub",
    "choices",
    "config",
    "catalog",
    "plan",
    "plan_draft",
    "estimate",
    "planner",
    "report",
    "tensor_files",
    "dist",
    "own_forward",
    "quantization",
    "experts",
    "model",
    "adapters",
    "memory",
    "sharding",
    "loading",
    "lora_init",
    "type_probe",
    "run_plan",
    "build",
    "data",
    "optim",
    "observe",
    "export",
    "checkpoint",
    "lifecycle",
    "preflight",
    "training",
    "simulation",
    "bench",
    "commands",
    "demo",
    "cli",
    "__main__",
    "integrations",
]
PURE = set(ORDER[: ORDER.index("tensor_files")])


def modules() -> list[tuple[str, Path]]:
    """(top-level module or package name, file) of every file of the package."""
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if f != PACKAGE / "__init__.py"]
    return [(f.relative_to(PACKAGE).parts[0].removesuffix(".py"), f) for f in files]


def imports(path: Path) -> set[str]:
    """Absolute names of what a file imports, inside functions too."""
    depth, found = len(path.relative_to(PACKAGE).parts), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level < depth and node.level:
                continue  # within its own package
            names = [node.module] if node.module else [alias.name for alias in node.names]
            prefix = "fsdp_qlora." if node.level else ""
            found |= {prefix + name for name in names}
    return found


@pytest.mark.parametrize("name, path", modules(), ids=lambda v: v if isinstance(v, str) else v.stem)
def test_a_module_imports_only_from_modules_before_it(name, path):
    inside = {
        i.split(".")[1]
        for i in imports(path)
        if i.startswith("fsdp_qlora.") and not i.endswith("__")
    }
    assert name in ORDER, f"{name} has no place in the layout"
    later = {i for i in inside if ORDER.index(i) >= ORDER.index(name)} - {name}
    assert not later


def files_of(folder: Path) -> dict[str, list[Path]]:
    """The files of each module and package in a package, by its name."""
    packages = {p.parent.name: sorted(p.parent.rglob("*.py")) for p in folder.glob("*/__init__.py")}
    return packages | {p.stem: [p] for p in folder.glob("[!_]*.py")}


PACKAGES = [p.parent for p in sorted(PACKAGE.rglob("__init__.py")) if p.parent != PACKAGE]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda folder: folder.name)
def test_a_package_names_its_modules_in_an_order_in_which_they_can_be_read(package):
    doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    listed = re.search(r"Modules, each importing only from those before it: ([\w\s,]+)\.", doc)
    order = re.findall(r"\w+", listed[1])
    files = files_of(package)
    assert sorted(order) == sorted(files)
    for place, name in enumerate(order):
        needed = {
            part
            for path in files[name]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and node.level == len(path.relative_to(package).parts)
            for part in ([node.module] if node.module else [a.name for a in node.names])
        }
        assert needed & set(order) <= set(order[:place]), name


def test_no_two_modules_import_each_other():
    known = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for _, path in modules()
    }
    known = {name.removesuffix(".__init__"): path for name, path in known.items()}

    def needs(path: Path) -> set[str]:
        found, here = set(), path.relative_to(PACKAGE).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = [*here[: len(here) + 1 - node.level], *(node.module or "").split(".")]
            base = ".".join(part for part in base if part)
            found |= {
                name for alias in node.names if (name := f"{base}.{alias.name}".strip(".")) in known
            } or ({base} & set(known))
        return found

    order = graphlib.TopologicalSorter({name: needs(path) for name, path in known.items()})
    assert len(list(order.static_order())) == len(known)


def test_the_pure_layer_imports_no_torch():
    for name, path in modules():
        if name in PURE:
            assert not {i for i in imports(path) if i.split(".")[0] == "torch"}, path


def test_one_file_owns_fsdp():
    owners = {
        path.name
        for _, path in modules()
        if any(i.startswith("torch.distributed.fsdp") for i in imports(path))
    }
    assert owners == {"fsdp.py"}


def test_one_file_writes_safetensors():
    """Any other would write files that their owner alone can read."""
    writers = {p.name for _, p in modules() if re.search(r"\bsave_file\b", p.read_text())}
    assert writers == {"tensor_files.py"}


COLLECTIVES = set(
    """all_reduce broadcast reduce all_gather all_gather_into_tensor all_gather_single gather scatter
    reduce_scatter reduce_scatter_tensor reduce_scatter_single all_to_all all_to_all_single send recv
    all_gather_object broadcast_object_list gather_object scatter_object_list""".split()
)


def calls_in_a_default_group(path: Path) -> set[str]:
    """Collectives that a file leaves to the default group, and those that sharded tensors make."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed":
            found |= {alias.name for alias in node.names} & COLLECTIVES
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name, of_torch = node.func.attr, ast.unparse(node.func.value).endswith("dist")
        named_group = any(keyword.arg == "group" for keyword in node.keywords)
        if of_torch and name in COLLECTIVES and not named_group:
            found.add(name)
        if name in ("full_tensor", "redistribute"):
            found.add(name)
    return found


def test_one_file_calls_collectives_over_all_ranks():
    """It knows which group takes a tensor in host memory; a default group may serve GPUs alone."""
    callers = {
        path.name: found for _, path in modules() if (found := calls_in_a_default_group(path))
    }
    assert callers == {"sharded_tensors.py": {"full_tensor"}}
    functional = {
        path.name
        for _, path in modules()
        if any("functional_collectives" in name for name in imports(path))
    }
    assert functional == {
        "sequence_parallel.py"
    }  # in groups that it makes, of tensors of the model
