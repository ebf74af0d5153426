"""Command-line flags, made from the fields of dataclasses and nothing else.

Pure: no torch, so that --help answers at once.
"""
from __future__ import annotations

import argparse
import difflib
from dataclasses import fields
from typing import get_args, get_type_hints

from fastcore.basics import listify, str2bool

from .checks import check_choices
from .config import GROUPS, RunConfig
from .settings import AUTO, default_of, shown


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ValueErrors, so that all mistakes end in one place."""

    def error(self, message: str):
        raise ValueError(message)


def boolean(text: str) -> bool:
    """true, false, True, False, 1, 0, yes, no."""
    try:
        if not text.strip(): raise TypeError  # fastcore takes it for false
        return str2bool(text)
    except TypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false") from None


def whole_or_auto(text: str) -> int:
    """A whole number, or `auto`, which is -1."""
    return AUTO if text.strip().lower() == "auto" else int(text)


def number_or_auto(text: str) -> float:
    """A number, or `auto`, which is -1."""
    return AUTO if text.strip().lower() == "auto" else float(text)


CONVERT = {bool: boolean, int: whole_or_auto, float: number_or_auto}


def add_fields(parser: argparse.ArgumentParser, group: type):
    """One flag per field of a dataclass, under its docstring as a title."""
    section = parser.add_argument_group(group.__doc__.splitlines()[0])
    hints = get_type_hints(group)
    for f in fields(group):
        kind = next((t for t in get_args(hints[f.name]) if t is not type(None)), hints[f.name])
        bare = True if kind is bool else f.metadata["bare"]
        how = dict(type=CONVERT.get(kind, kind))
        if bare is not None: how |= dict(nargs="?", const=bare)
        section.add_argument(f"--{f.name}", default=argparse.SUPPRESS, help=help_text(f),
                             metavar=metavar(f, kind), **how)


def metavar(f, kind: type) -> str:
    """What stands for a value in --help."""
    choices = [c for c in listify(f.metadata["choices"]) if c not in f.metadata["later"]]
    if choices: return "{" + ",".join(map(str, choices)) + "}"
    return {bool: "true|false", int: "N", float: "X"}.get(kind, "TEXT")


def help_text(f) -> str:
    """A setting's help line with its unit, example and default."""
    extra = [f"in {f.metadata['unit']}"] if f.metadata["unit"] else []
    if f.metadata["example"] is not None: extra.append(f"e.g. {f.metadata['example']}")
    extra.append(f"default {shown(default_of(f))}")
    return f"{f.metadata['help']} ({'; '.join(extra)})".replace("%", "%%")


def parse(argv: list[str], *extra_groups: type, prog: str = "fsdp-qlora train") -> list:
    """The RunConfig that `argv` asks for, and one object per group in `extra_groups`.

    Raises ValueError for an unknown flag, with the nearest known one, or a value that is not one.
    """
    parser = Parser(prog=prog, usage=f"{prog} [--flag value ...]", allow_abbrev=False)
    for group in (*extra_groups, *GROUPS): add_fields(parser, group)
    known, unknown = parser.parse_known_args(argv)
    if unknown: raise ValueError(unknown_flag(unknown[0], parser))
    values = vars(known)
    extras = [g(**{f.name: values.pop(f.name) for f in fields(g) if f.name in values})
              for g in extra_groups]
    for extra in extras: check_choices(extra)
    return [RunConfig(**values), *extras]


def parse_own(argv: list[str], group: type) -> tuple:
    """One command's own settings, and the arguments that are left for RunConfig."""
    parser = Parser(allow_abbrev=False, add_help=False)
    add_fields(parser, group)
    known, rest = parser.parse_known_args(argv)
    return group(**vars(known)), rest


def parse_alone(argv: list[str], group: type, prog: str):
    """The settings of a command that has none of RunConfig's.

    Raises ValueError as `parse` does.
    """
    parser = Parser(prog=prog, usage=f"{prog} [--flag value ...]", allow_abbrev=False)
    add_fields(parser, group)
    known, unknown = parser.parse_known_args(argv)
    if unknown: raise ValueError(unknown_flag(unknown[0], parser))
    options = group(**vars(known))
    check_choices(options)
    return options


def unknown_flag(flag: str, parser: argparse.ArgumentParser) -> str:
    """An error for a flag that does not exist."""
    if not flag.startswith("-"): return f"unexpected argument {flag!r}; settings are --name value"
    flags = [s for a in parser._actions for s in a.option_strings]
    near = difflib.get_close_matches(flag.split("=")[0].replace("-", "_").replace("__", "--", 1),
                                     flags, n=1)
    return f"unknown flag {flag}" + (f"; did you mean {near[0]}?" if near else "; see --help")
