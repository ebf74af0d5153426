"""docs/api.md, each public name with its signature and docstring; and the names' types.

The page is read from the source, so that it needs no torch and no build of the site.
"""

from __future__ import annotations

import ast
from pathlib import Path

from fsdp_qlora import PUBLIC

PACKAGE = Path(__file__).parents[1] / "fsdp_qlora"
WIDTH = 100  # of a signature on one line
INTRO = """# The library

Made by `python scripts/make_reference.py` from the names that `fsdp_qlora` exports; do not edit.

Use the pieces in a training script of your own: [examples/custom_loop.py](../examples/custom_loop.py)
is a whole one. `import fsdp_qlora as fq` takes no time, because a name is imported when it is first
used: `fq.RunConfig` and `fq.plan_batches` need no torch. All names are typed. Shapes: B batch, T tokens,
D hidden, R rank of an adapter, O rows of a weight."""

# Title, and the first packages of the modules that stand under it.
SECTIONS = [
    ("Settings and a whole run", ("config", "plan", "estimate", "training")),
    ("Ranks", ("dist",)),
    (
        "A model, step by step",
        ("build", "loading", "quantization", "adapters", "lora_init", "memory", "sharding"),
    ),
    ("Other trainers, and a model that knows its files", ("integrations",)),
    ("Training and evaluation", ("data", "optim", "observe")),
    ("Results", ("export",)),
]
# What can't be read from the source: a class made of many, and a table.
ELSEWHERE = {
    "RunConfig": (
        "RunConfig(**settings)",
        "All settings of one run; each of [these](flags.md) is a field. Raises ValueError, naming the "
        "flag and the remedy, if they clash.",
    ),
    "STRATEGIES": (
        "STRATEGIES: dict[str, Strategy]",
        "The sharding strategies by name, as [strategies](strategies.md) lists them.",
    ),
}


def api_page() -> str:
    """The page."""
    parts = [INTRO]
    for title, packages in SECTIONS:
        parts.append(f"## {title}")
        parts += [
            _entry(name, module)
            for name, module in PUBLIC.items()
            if module.split(".")[0] in packages
        ]
    return "\n\n".join(parts) + "\n"


def _as_sorted_imports(item: tuple[str, str]) -> tuple[str, bool, str]:
    """By module; constants come before classes and functions, as ruff has it."""
    name, module = item
    return module, not name.isupper(), name


def public_types() -> str:
    """fsdp_qlora/__init__.pyi: where type checkers find what is imported on first use."""
    lines = [
        f"from .{module} import {name} as {name}"
        for name, module in sorted(PUBLIC.items(), key=_as_sorted_imports)
    ]
    return "\n".join(
        [
            "# Made by python scripts/make_reference.py; do not edit.",
            *lines,
            "",
            "__all__: list[str]",
            "__version__: str",
            "PUBLIC: dict[str, str]",
            "",
        ]
    )


def _entry(name: str, module: str) -> str:
    """A name's heading, signature, docstring and, of a class, the methods that users call."""
    if name in ELSEWHERE:
        return _section(name, *ELSEWHERE[name])
    node = _definition(name, module)
    if isinstance(node, ast.FunctionDef):
        return _section(name, _signature(node), _docstring(node))
    methods = [
        each
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name[0] != "_" and _docstring(each)
    ]
    rows = [f"- `{_shown(each)}`: {_docstring(each).splitlines()[0]}" for each in methods]
    doc = "\n\n".join([_docstring(node), *(["\n".join(rows)] if rows else [])])
    return _section(name, _signature(_initializer(node), name), doc)


def _section(name: str, signature: str, doc: str) -> str:
    return f"### {name}\n\n```python\n{signature}\n```\n\n{doc}"


def _definition(name: str, module: str) -> ast.FunctionDef | ast.ClassDef:
    """Where a module, or the one that it imports the name from, defines it."""
    path = PACKAGE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    package = module.split(".") if path.is_dir() else module.split(".")[:-1]
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            there = package[: len(package) - node.level + 1]
            return _definition(name, ".".join([*there, node.module or ""]).strip("."))
    raise LookupError(f"fsdp_qlora.{module} defines no {name}")


def _initializer(node: ast.ClassDef) -> ast.FunctionDef:
    """How a class is made; of a dataclass, from its fields, by keyword."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    if own := [each for each in methods if each.name == "__init__"]:
        return own[0]
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    given = ", ".join(f"{ast.unparse(f.target)}: {ast.unparse(f.annotation)} = ..." for f in fields)
    return ast.parse(f"def __init__(self, *, {given}): ...").body[0]


def _docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    return ast.get_docstring(node) or ""


def _shown(node: ast.FunctionDef) -> str:
    """A method on one line; a property has no arguments."""
    return node.name if node.decorator_list else " ".join(_signature(node).split())


def _signature(node: ast.FunctionDef, name: str = "") -> str:
    """A function's name, arguments and what it returns, an argument a line where it is long."""
    arguments = _arguments(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"{name or node.name}({', '.join(arguments)}){returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join(
        [f"{name or node.name}(", *(f"    {each}," for each in arguments), f"){returns}"]
    )


def _arguments(args: ast.arguments) -> list[str]:
    """Arguments with their types and defaults, without self."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
    found = [_argument(a, d) for a, d in zip(plain, defaults, strict=True) if a.arg != "self"]
    if args.vararg:
        found.append(f"*{_argument(args.vararg)}")
    elif args.kwonlyargs:
        found.append("*")
    found += map(_argument, args.kwonlyargs, args.kw_defaults)
    return found + [f"**{_argument(args.kwarg)}"] if args.kwarg else found


def _argument(arg: ast.arg, default: ast.expr | None = None) -> str:
    typed = f"{arg.arg}: {ast.unparse(arg.annotation)}" if arg.annotation else arg.arg
    if default is None:
        return typed
    value = ast.unparse(default)
    shown = "..." if value.startswith("_") else value  # a private name, as .pyi files show it
    return f"{typed} = {shown}" if arg.annotation else f"{typed}={shown}"
