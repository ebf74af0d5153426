"""How one setting of a run is described, and shown. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, field, fields
from typing import Any

AUTO = -1  # an integer setting that is derived; the derived value is printed once

# What a resume does where a setting is another than the checkpoint's.
MAY_CHANGE = "may change"  # layout, speed, paths and display: nothing
MUST_MATCH = "must match"  # it decides the losses: refused, but --resume PATH warns and resumes
DEFINES_WEIGHTS = "defines weights"  # it says what the tensors mean: refused in any case
RUN_LENGTH = "run length"  # must match under a schedule that goes by the length, else may change


def opt(
    default: Any,
    help: str,
    *,
    choices=None,
    unit: str | None = None,
    example=None,
    later: tuple = (),
    bare=None,
    several: bool = False,
    on_resume: str | None = None,
    least: int | None = None,
    or_auto: bool = False,
    is_path: bool = False,
    per_rank: bool = False,
    no_effect: Callable[[Any], str | None] | None = None,
):
    """A setting: `later` holds values of the original script that this version refuses by name.

    bare: the value of the flag given without one. several: choices may be joined with commas.
    on_resume: one of the four above; a setting of a run has it. least: the smallest value, beside
    AUTO with `or_auto`. is_path: ~ and variables are expanded. per_rank: ranks may be started with
    different values, as of a folder on each machine. no_effect: of a configuration, why the setting does
    nothing in it, or None (`without_effect.py`).
    """
    meta = dict(
        help=help,
        choices=choices,
        unit=unit,
        example=example,
        later=later,
        bare=bare,
        several=several,
        on_resume=on_resume,
        least=least,
        or_auto=or_auto,
        is_path=is_path,
        per_rank=per_rank,
        no_effect=no_effect,
    )
    return field(default=default, metadata=meta)


def parts_of(text: str) -> list[str]:
    """What a setting of several choices names."""
    return [part.strip() for part in text.split(",")]


def type_name(hint) -> str:
    """A type as help and errors show it."""
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        float | None: "a number or nothing",
    }
    return names.get(hint, "text or nothing")


def shown(value) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def counted(number: int, unit: str) -> str:
    """A number of things in words: 1 step, 2,000 steps."""
    return f"{number:,} {unit}" + ("" if number == 1 else "s")


def one_of(names: Iterable[str]) -> str:
    """Names among which one is chosen: a, b or c."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def title(group: type) -> str:
    """The title of a group of settings: the first line of its docstring."""
    return (group.__doc__ or group.__name__).splitlines()[0]


def default_of(f) -> Any:
    """A field's default."""
    return f.default_factory() if f.default is MISSING else f.default


def changed_settings(config) -> dict[str, Any]:
    """Settings that differ from their default, as the run's summary prints them."""
    return {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if getattr(config, f.name) != default_of(f)
    }
