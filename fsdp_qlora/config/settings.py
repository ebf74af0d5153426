"""How one setting of a run is described, and shown. Pure: no torch."""
from __future__ import annotations

from dataclasses import MISSING, field, fields
from typing import Any

AUTO = -1  # an integer setting that is derived; the derived value is printed once


def opt(default: Any, help: str, *, choices=None, unit: str | None = None, example=None,
        later: tuple = (), bare=None, several: bool = False):
    """A setting: `later` holds values of the original script that this version refuses by name.

    bare: the value of the flag given without one. several: choices may be joined with commas.
    """
    meta = dict(help=help, choices=choices, unit=unit, example=example, later=later, bare=bare,
                several=several)
    return field(default=default, metadata=meta)


def parts_of(text: str) -> list[str]:
    """What a setting of several choices names."""
    return [part.strip() for part in text.split(",")]


def type_name(hint) -> str:
    """A type as help and errors show it."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text",
             float | None: "a number or nothing"}
    return names.get(hint, "text or nothing")


def shown(value) -> str:
    """A value as it is typed on the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def counted(number: int, unit: str) -> str:
    """A number of things in words: 1 step, 2,000 steps."""
    return f"{number:,} {unit}" + ("" if number == 1 else "s")


def title(group: type) -> str:
    """The title of a group of settings: the first line of its docstring."""
    return (group.__doc__ or group.__name__).splitlines()[0]


def default_of(f) -> Any:
    """A field's default."""
    return f.default_factory() if f.default is MISSING else f.default


def changed_settings(config) -> dict[str, Any]:
    """Settings that differ from their default, as the run's summary prints them."""
    return {f.name: getattr(config, f.name) for f in fields(config)
            if getattr(config, f.name) != default_of(f)}
