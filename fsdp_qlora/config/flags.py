"""Command-line flags, made from the fields of dataclasses and nothing else; recipes become flags too.

Pure: no torch, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import fields, replace
from itertools import takewhile
from typing import get_args, get_type_hints

from fastcore.basics import listify, str2bool

from .checks import check_choices
from .defaults import default_flags
from .migration import hint, names_elsewhere, with_own_names
from .recipe import Recipe, RecipeOptions, read_recipe
from .run import GROUPS, RunConfig
from .settings import AUTO, default_of, shown, title


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ValueErrors, so that all mistakes end in one place.

    It takes other trainers' names for a setting too (`migration.SAME`).
    """

    rare: set[str] = set()  # settings that only `--help all` shows

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -7B is a value too, and a wrong one

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        return super().parse_known_args(args and with_own_names(list(args)), namespace)

    def error(self, message: str):
        message = message.removeprefix("argument ")
        flag = message.removesuffix(": expected one argument")
        if flag != message:
            raise ValueError(f"{flag}: the value is missing; see --help")
        raise ValueError(message)


def boolean(text: str) -> bool:
    """true, false, True, False, 1, 0, yes, no."""
    try:
        if not text.strip():
            raise TypeError  # fastcore takes it for false
        return str2bool(text)
    except TypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false") from None


def _whole_or_auto(text: str) -> int:
    """A whole number, or `auto`, which is -1."""
    try:
        return AUTO if text.strip().lower() == "auto" else int(text)
    except ValueError:
        share = "; a share of the run is not taken" if re.fullmatch(r"0?\.\d+", text) else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number{share}") from None


def _number_or_auto(text: str) -> float:
    """A number, or `auto`, which is -1."""
    try:
        return AUTO if text.strip().lower() == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


EXAMPLES = {
    "train": [
        "--model_name ./my-model --dataset rows.jsonl --dry_run",
        "--config examples/recipes/7b-1x24gb.yaml --dataset rows.jsonl --lr 2e-4",
    ],
    "estimate": [
        "--model_name llama-2-70b --gpu 'RTX 3090' --gpus 2 --use_cpu_offload --examples 1000"
    ],
    "plan": ["--params 34B --gpu 'RTX 4090' --gpus 2 --context_length 2048 --global_batch_size 32"],
    "data": ["--model_name ./my-model --dataset rows.jsonl --context_length 2048 --preview 5"],
    "generate": ["--model_name ./my-model --adapter_folder output/adapter --prompt 'Who are you?'"],
    "bench": [
        "--model_name llama-3.1-8b --random_weights --context_length 8192 --results rows.jsonl"
    ],
}

# The settings that --help shows; `--help all` shows every one.
COMMON = set(
    """
    model_name train_type quant lora_rank lora_alpha lora_dropout lora_target_modules
    dataset context_length train_on preview packing eval_dataset eval_share eval_every
    batch_size gradient_accumulation_steps global_batch_size num_epochs max_steps seed
    sharding_strategy activation_policy use_cpu_offload use_activation_cpu_offload
    lr lr_scheduler output_dir log_to resume
    """.split()
)

_CONVERT = {bool: boolean, int: _whole_or_auto, float: _number_or_auto}


class _Help(argparse.Action):
    """--help: what a command does, its own flags and the most common settings; `--help all`: all."""

    def __call__(self, parser, namespace, values, option_string=None):
        everything = values == "all" or not parser.rare
        for action in parser._actions:
            if action.dest in parser.rare and not everything:
                action.help = argparse.SUPPRESS
        if not everything:
            parser.epilog = (
                f"{len(parser.rare)} more settings: {parser.prog} --help all\n\n{parser.epilog}"
            )
        parser.print_help()
        parser.exit()


def _command_parser(
    prog: str, about: str | None, own: tuple[type, ...], groups: tuple[type, ...] = ()
) -> Parser:
    """The parser of a command with `own` settings and those of a run in `groups`."""
    recipe = "[--config recipe.yaml] " if groups else ""
    parser = Parser(
        prog=prog,
        usage=f"{prog} {recipe}[--flag value ...]",
        description=about,
        allow_abbrev=False,
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=examples(prog),
    )
    parser.rare = {f.name for group in groups for f in fields(group)} - COMMON
    parser.add_argument(
        "-h",
        "--help",
        action=_Help,
        nargs="?",
        choices=["all"],
        metavar="all",
        default=argparse.SUPPRESS,
        help="show this help and exit; all: with every setting"
        if groups
        else "show this help and exit",
    )
    for group in (*own, *groups):
        _add_fields(parser, group)
    return parser


def _add_fields(parser: argparse.ArgumentParser, group: type):
    """One flag per field of a dataclass, under its docstring as a title."""
    section = parser.add_argument_group(title(group))
    for f, kind in typed_fields(group):
        bare = True if kind is bool else f.metadata["bare"]
        how = dict(type=_CONVERT.get(kind, kind))
        if bare is not None:
            how |= dict(nargs="?", const=bare)
        section.add_argument(
            f"--{f.name}",
            default=argparse.SUPPRESS,
            help=_help_text(f),
            metavar=_metavar(f, kind),
            **how,
        )


def typed_fields(group: type) -> list[tuple]:
    """(field, type of its value where one is given) of a dataclass."""
    hints = get_type_hints(group)
    return [
        (f, next((t for t in get_args(hints[f.name]) if t is not type(None)), hints[f.name]))
        for f in fields(group)
    ]


def usable_choices(f) -> list:
    """A setting's choices without those that this version refuses."""
    return [c for c in listify(f.metadata["choices"]) if c not in f.metadata["later"]]


def _metavar(f, kind: type) -> str:
    """What stands for a value in --help."""
    choices = usable_choices(f)
    more = ",..." if f.metadata["several"] else ""
    if choices:
        return "{" + ",".join(map(str, choices)) + "}" + more
    return {bool: "true|false", int: "N", float: "X"}.get(kind, "TEXT")


def _help_text(f) -> str:
    """A setting's help line with its unit, example and default."""
    unit = f.metadata["unit"]
    extra = [unit if unit.startswith("share") else f"in {unit}"] if unit else []
    if f.metadata["example"] is not None:
        extra.append(f"e.g. {f.metadata['example']}")
    if default_of(f) not in (None, ""):
        extra.append(f"default {shown(default_of(f))}")
    if others := names_elsewhere(f.name):
        extra.append(f"also {', '.join(f'--{name}' for name in others)}")
    details = f" ({'; '.join(extra)})" if extra else ""
    return (f.metadata["help"] + details).replace("%", "%%")


def parse(
    argv: list[str],
    *extra_groups: type,
    prog: str = "fsdp-qlora train",
    about: str | None = None,
) -> list:
    """The RunConfig that `argv` and its --config ask for, and one object per group in `extra_groups`.

    about: what the command does, for --help.

    Raises ValueError for an unknown flag, with the nearest known one, or a value that is not one; it
    names the line of the recipe where the value is from there.
    """
    parser = _command_parser(prog, about, (*extra_groups, RecipeOptions), GROUPS)
    recipe = recipe_of(argv)
    try:
        config, *extras = _parse_flags(parser, [*recipe.flags, *argv], extra_groups)
        config.typed = frozenset(typed_flags(argv))
        return [config, *extras]
    except ValueError as error:
        raise ValueError(recipe.with_place(str(error), typed_flags(argv))) from error


def examples(prog: str) -> str:
    """The end of --help: commands as people type them."""
    lines = [f"  {prog} {flags}" for flags in EXAMPLES.get(prog.split()[-1], ())]
    return "\n".join(["examples:", *lines]) if lines else ""


def _parse_flags(parser: Parser, argv: list[str], extra_groups: tuple[type, ...]) -> list:
    """The RunConfig and the objects of `extra_groups` that flags ask for."""
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(_unknown_flag(unknown[0], parser))
    values = vars(known)
    for f in fields(RecipeOptions):
        values.pop(f.name, None)
    extras = [
        g(**{f.name: values.pop(f.name) for f in fields(g) if f.name in values})
        for g in extra_groups
    ]
    for extra in extras:
        check_choices(extra)
    return [RunConfig(**values), *extras]


def recipe_of(argv: list[str]) -> Recipe:
    """The recipe of --config, or an empty one, above the settings of --defaults."""
    options, typed = parse_own(argv, RecipeOptions)
    check_choices(options)
    recipe = Recipe() if options.config is None else read_recipe(options.config)
    below = default_flags(options.defaults, typed_flags([*recipe.flags, *typed]))
    return replace(recipe, flags=(*below, *recipe.flags))


def typed_flags(argv: list[str]) -> set[str]:
    """Names of the flags in a list of arguments."""
    flags = (a for a in with_own_names(argv) if a.startswith("--"))
    return {a.split("=")[0].removeprefix("--") for a in flags}


def given_settings(argv: list[str]) -> set[str]:
    """Names of the settings that were given, as flags or in a recipe."""
    return typed_flags([*recipe_of(argv).flags, *argv])


def parse_own(argv: list[str], group: type) -> tuple:
    """One command's own settings, and the arguments that are left for RunConfig."""
    parser = Parser(allow_abbrev=False, add_help=False)
    _add_fields(parser, group)
    known, rest = parser.parse_known_args(argv)
    return group(**vars(known)), rest


def parse_alone(argv: list[str], group: type, prog: str, about: str | None = None):
    """The settings of a command that has none of RunConfig's.

    Raises ValueError as `parse` does.
    """
    parser = _command_parser(prog, about, (group,))
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(_unknown_flag(unknown[0], parser))
    options = group(**vars(known))
    check_choices(options)
    return options


def with_named_words(argv: list[str], *names: str) -> list[str]:
    """The arguments, with the flags of `names` for the words that come before all flags.

    Raises ValueError for a word beside its own flag, if that says something else.
    """
    words = list(takewhile(lambda part: not part.startswith("-"), argv))[: len(names)]
    rest, parser = argv[len(words) :], Parser(allow_abbrev=False, add_help=False)
    for name in names:
        parser.add_argument(f"--{name}")
    typed, named = vars(parser.parse_known_args(rest)[0]), []
    for name, word in zip(names, words, strict=False):
        if typed[name] not in (None, word):
            raise ValueError(
                f"--{name} {typed[name]}: {word} before the flags contradicts it; give only one"
            )
        named += [f"--{name}", word]
    return named + rest


def _unknown_flag(flag: str, parser: argparse.ArgumentParser) -> str:
    """An error for a flag that does not exist."""
    if not flag.startswith("-"):
        return f"unexpected argument {flag!r}; settings are --name value"
    names = [s.lstrip("-") for a in parser._actions for s in a.option_strings]
    return f"unknown flag {flag}; {hint(flag.split('=')[0], names, 'see --help all')}"
