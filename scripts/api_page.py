"""docs/api.md, the public names with their docstrings, which mkdocstrings puts in; and their types."""

from __future__ import annotations

from fsdp_qlora import PUBLIC

INTRO = """# The library

Made by `python scripts/make_reference.py` from the names that `fsdp_qlora` exports; do not edit.

`import fsdp_qlora as fq` takes no time: a name is imported when it is first used, so torch is not
needed for `fq.RunConfig` and `fq.plan_batches`. [examples/custom_loop.py](../examples/custom_loop.py)
is a whole training script. All names are typed. Shapes: B batch, T tokens, D hidden, R rank of an
adapter, O rows of a weight."""

# Title, and the first packages of the modules that stand under it.
SECTIONS = [
    ("Settings and a whole run", ("config", "training")),
    ("Ranks", ("dist",)),
    (
        "A model, step by step",
        ("build", "loading", "quantization", "adapters", "memory", "sharding"),
    ),
    ("Training and evaluation", ("optim", "observe")),
    ("Results", ("export",)),
]


def api_page() -> str:
    """The page; its `:::` lines are read by mkdocstrings."""
    parts = [INTRO]
    for title, packages in SECTIONS:
        names = [
            f"::: fsdp_qlora.{module}.{name}"
            for name, module in PUBLIC.items()
            if module.split(".")[0] in packages
        ]
        parts += [f"## {title}", *(with_options(line) for line in names)]
    return "\n\n".join(parts) + "\n"


def with_options(line: str) -> str:
    """A name's line; the fields of RunConfig are all on the page of flags."""
    return f"{line}\n    options:\n      members: false" if line.endswith(".RunConfig") else line


def public_types() -> str:
    """fsdp_qlora/__init__.pyi: where type checkers find what is imported on first use."""
    lines = [
        f"from .{module} import {name} as {name}"
        for name, module in sorted(PUBLIC.items(), key=lambda item: (item[1], item[0]))
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
