"""The settings as others read them: a JSON schema for editors, and a reference page. Pure: no torch.

Both are made of the fields that the flags are made of. Editors with the YAML language server check
and complete a recipe whose first line names the schema:

    # yaml-language-server: $schema=schema.json

https://json-schema.org/draft/2020-12
"""

from __future__ import annotations

from .flags import typed_fields, usable_choices
from .migration import SAME, names_elsewhere
from .run import GROUPS
from .settings import AUTO, default_of, shown, title


def schema() -> dict:
    """The JSON schema of a recipe."""
    own = {f.name: _property_of(f, kind) for group in GROUPS for f, kind in typed_fields(group)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of fsdp_qlora",
        "type": "object",
        "additionalProperties": False,
        "properties": own | {name: {"$ref": f"#/properties/{same}"} for name, same in SAME.items()},
    }


def _property_of(f, kind: type) -> dict:
    """One setting: what it takes, its default, help and example."""
    unit = f" ({f.metadata['unit']})" if f.metadata["unit"] else ""
    forms: list[dict] = choices_of(f) or _forms_of(f, kind)
    if default_of(f) is None:
        forms.append({"type": "null"})
    found = forms[0] if len(forms) == 1 else {"anyOf": forms}
    found = found | {"description": f.metadata["help"] + unit, "default": default_of(f)}
    if f.metadata["example"] is not None:
        found["examples"] = [f.metadata["example"]]
    return found


def choices_of(f) -> list[dict]:
    """The forms of a setting that has choices."""
    choices = usable_choices(f)
    if not choices:
        return []
    if not f.metadata["several"]:
        return [{"enum": choices}]
    one = "|".join(choices)
    return [
        {"type": "string", "pattern": f"^ *({one}) *(, *({one}) *)*$"},
        {"type": "array", "items": {"enum": choices}, "minItems": 1},
    ]


def _forms_of(f, kind: type) -> list[dict]:
    """The forms in which YAML can write a setting that has no choices."""
    if kind is bool:
        return [{"type": "boolean"}]
    if kind is str:  # a port or a commit of digits is a number to YAML
        lists = (
            [{"type": "array", "items": {"type": "string"}}]
            if "," in str(f.metadata["example"])
            else []
        )
        if "=" in str(f.metadata["example"]):
            lists.append(
                {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}
            )
        return [{"type": ["string", "number"]}, *lists]
    number: dict[str, object] = {"type": "integer" if kind is int else "number"}
    if f.metadata["least"] is None:
        return [number, {"const": "auto"}] if "auto" in f.metadata["help"] else [number]
    auto: list[dict] = [{"const": AUTO}, {"const": "auto"}] if f.metadata["or_auto"] else []
    return [number | {"minimum": f.metadata["least"]}, *auto]


_PREFACE = """# Every setting

Made by `python scripts/make_reference.py` from the fields that the flags are made of; do not edit.

The first tables are the settings of a run. They are flags of `train.py` and of `fsdp-qlora train`,
`estimate`, `plan`, `data`, `bench`, `generate` and `demo`, and names in a recipe: `--config
recipe.yaml` reads them from a file of `name: value` lines, and flags win over it. A switch is on if it
is bare, `--packing`, or `true`; `--packing false` turns it off. `-1` and `auto` are the same number.
A setting that is left out has its default."""


def flags_page(own: list[type]) -> str:
    """The reference page: the settings of a run, then those that commands add to them (`own`)."""
    parts = [
        _PREFACE,
        *(_settings_table(group) for group in GROUPS),
        "# Flags of single commands\n\nThese are not for recipes.",
        *(_settings_table(g) for g in own),
    ]
    return "\n\n".join(parts) + "\n"


def _settings_table(group: type) -> str:
    """A group of settings as a Markdown table under its title."""
    rows = [
        f"| `--{f.name}` | {values(f, kind)} | {cell(shown(default_of(f)))} | "
        f"{f.metadata['help'].replace('|', chr(92) + '|')}{_also(f)} |"
        for f, kind in typed_fields(group)
    ]
    return "\n".join(
        [f"## {title(group)}", "", "| flag | takes | default | what |", "|---|---|---|---|", *rows]
    )


def _also(f) -> str:
    """The names of other trainers that a setting takes too."""
    others = names_elsewhere(f.name)
    return f"; also {', '.join(f'`--{name}`' for name in others)}" if others else ""


def values(f, kind: type) -> str:
    """What a setting takes, with unit and example."""
    choices = [cell(c) for c in usable_choices(f)]
    words = {bool: "true, false", int: "whole number", float: "number"}
    takes = ", ".join(choices) or words.get(kind, "text")
    if f.metadata["unit"]:
        takes += f", {f.metadata['unit']}"
    example = f.metadata["example"]
    return takes if example is None else f"{takes}; e.g. {cell(example)}"


def cell(value) -> str:
    """A value as code, or a dash where there is none."""
    return "-" if value in (None, "None", "") else f"`{value}`"
