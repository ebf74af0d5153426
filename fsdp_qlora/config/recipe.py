"""Recipes: a run's settings in a YAML file, `--config recipe.yaml`, with flags on top of them.

A recipe becomes flags, so that a value in a file is read and checked as on the command line, and
`lr: 1e-5` is a number, which YAML 1.1 takes for text (https://yaml.org/type/float.html). An error
names the line of the file. Pure: no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from .defaults import DEFAULTS
from .migration import SAME, hint
from .run import RunConfig
from .settings import default_of, opt


@dataclass
class RecipeOptions:
    """Recipe"""

    config: str | None = opt(
        None,
        "YAML file of settings, one `name: value` a line; flags of the command line win",
        example="examples/recipes/7b-1x24gb.yaml",
    )
    defaults: str | None = opt(
        None,
        "defaults of another trainer, below those of a recipe and flags: classic = the original "
        "fsdp_qlora script's learning rate, schedule, decay, alpha, dropout, rows of a step and "
        "clipping",
        choices=tuple(DEFAULTS),
    )


@dataclass(frozen=True)
class Recipe:
    """The settings of a file as flags, and where each is written."""

    flags: tuple[str, ...] = ()
    places: tuple[tuple[str, str], ...] = ()  # (name, "file:line")

    def with_place(self, message: str, typed: Iterable[str]) -> str:
        """An error message, with the line of the setting that it names if the file gave that."""
        places = {name: place for name, place in self.places if name not in typed}
        named = [places[name] for name in re.findall(r"--(\w+)", message) if name in places]
        return f"{message} ({named[0]})" if named else message


def read_recipe(path: str) -> Recipe:
    """The flags that a YAML file stands for. Raises ValueError with file and line of a mistake."""
    flags: list[str] = []
    places: dict[str, str] = {}
    for name, value, place in entries(path):
        if name in places:
            raise ValueError(f"{place}: {name} appears twice, first at {places[name]}")
        places[name] = place
        if value is not None:
            flags.append(f"--{name}={value}")
    return Recipe(tuple(flags), tuple(places.items()))


def entries(path: str) -> Iterable[tuple[str, str | None, str]]:
    """(name, text of the value, "file:line") of each setting of a file; None is no value."""
    known = {f.name: default_of(f) for f in fields(RunConfig)}
    named = {f.name for f in fields(RunConfig) if "=" in str(f.metadata["example"])}
    for key, value in pairs(path):
        place = f"{path}:{key.start_mark.line + 1}"
        if key.id != "scalar":
            raise ValueError(f"{place}: write settings as `name: value`, one per line")
        name = SAME.get(key.value, key.value)
        if name not in known:
            raise ValueError(f"{place}: {_unknown_name(name, known)}")
        text = _value_text(value, f"{place}: {key.value}", name in named)
        if text is None and known[name] is not None:
            raise ValueError(
                f"{place}: {key.value} has no value; leave it out for the default, {known[name]}"
            )
        yield name, text, place


def pairs(path: str) -> list:
    """The (key, value) nodes of a YAML mapping."""
    import yaml

    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise ValueError(
            f"--config {path}: {error.strerror or error}; give a YAML file of settings, like those "
            "in examples/recipes"
        ) from None
    except UnicodeDecodeError:
        raise ValueError(
            f"--config {path}: not a text file; give a YAML file of settings"
        ) from None
    except RecursionError:
        raise ValueError(
            f"--config {path}: nested too deeply; write settings as `name: value`, one per line"
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else f"--config {path}"
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{place}: not valid YAML: {reason}") from None
    if root is None:
        return []  # nothing but comments
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"--config {path}: write settings as `name: value`, one per line")
    return root.value


def _value_text(node, where: str, takes_names: bool) -> str | None:
    """A value as it is typed on the command line; a list is joined with commas, null is None.

    takes_names: it may also be a block of `name: number`, as PEFT has patterns of ranks.
    """
    if node.id == "scalar":
        return None if node.tag.endswith(":null") else node.value
    if node.id == "sequence" and all(item.id == "scalar" for item in node.value):
        return ",".join(item.value for item in node.value)
    if takes_names and node.id == "mapping":
        if all(key.id == value.id == "scalar" for key, value in node.value):
            return ",".join(f"{key.value}={value.value}" for key, value in node.value)
    raise ValueError(f"{where} takes a single value, not a block of settings")


def as_recipe(settings: dict) -> str:
    """Settings as the text of a recipe."""
    import yaml

    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True, width=1000).rstrip()


def _unknown_name(name: str, known: Iterable[str]) -> str:
    """An error for a setting that does not exist, with the one that is meant."""
    lists = "fsdp-qlora train --help all lists them"
    return f"unknown setting {name!r}; {hint(name, known, lists, mark='')}"
