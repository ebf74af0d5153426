"""Settings whose text lists several things: names, blocks, tokens, ranks of modules, policies of blocks.

Each is read by one function, which raises ValueError naming the flag for a text that it can't read.
Pure: no torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..choices import POLICIES

TERMINAL_FORMS = ("tqdm", "stdout", "jsonl")  # of --log_to; the rest are trackers


def names_in(text: str | None) -> list[str]:
    """`name,...` as a list; none is empty."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def module_pattern(flag: str, text: str | None) -> dict[str, int]:
    """`name=number,...` as a dict; none is empty. Raises ValueError naming the flag."""
    found = {}
    for part in text.split(",") if text else ():
        name, _, number = map(str.strip, part.partition("="))
        if not name or not number.isdecimal() or not int(number):
            raise ValueError(
                f"--{flag} {text}: {part.strip()!r} is not MODULE=N with N of 1 or more; write "
                "q_proj=16,down_proj=128"
            )
        try:
            re.compile(name)
        except re.error as error:
            raise ValueError(
                f"--{flag} {text}: {name!r} is not a regular expression ({error}); give the ends of "
                "modules' names"
            ) from None
        found[name] = int(number)
    return found


def whole_path(flag: str, text: str) -> str:
    """A path with ~ and the environment's variables written out, which a recipe has as they are.

    Raises ValueError naming the flag for a variable that is not set. A file of that very name is itself.
    """
    if Path(text).exists():
        return text
    found = os.path.expandvars(os.path.expanduser(text))
    if missing := re.search(r"\$(\w+|\{\w+\})", found):
        raise ValueError(
            f"--{flag} {text}: {missing[0]} is not set in the environment; set it, or write the path out"
        )
    return found


def block_numbers(text: str | None) -> list[int] | None:
    """--layers_to_transform as sorted numbers; none is None. Raises ValueError naming the flag."""
    if text is None:
        return None
    found = set()
    for part in text.split(","):
        first, _, last = (p.strip() for p in part.partition("-"))
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise ValueError(
                f"--layers_to_transform {text}: {part.strip()!r} is neither a number nor a range; write "
                "for example 0,24-31"
            )
        found |= set(range(int(first), int(last) + 1))
    return sorted(found)


def token_list(text: str | None) -> list[str]:
    """--added_tokens as a list; none is empty. Raises ValueError for an empty or absent file."""
    if text is None:
        return []
    path = Path(text).expanduser()
    try:
        is_file = path.is_file() or path.suffix == ".txt"
        parts = path.read_text(encoding="utf-8").splitlines() if is_file else text.split(",")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", error)
        raise ValueError(
            f"--added_tokens {text}: {why}; give a text file with one token per line, or tokens "
            "separated by commas"
        ) from None
    found = list(dict.fromkeys(part for part in (p.strip("\r\n") for p in parts) if part.strip()))
    if not found:
        raise ValueError(f"--added_tokens {text}: contains no token; give one, or leave it out")
    return found


def policy_names(config) -> set[str]:
    """The names in --activation_policy."""
    return {part.partition(":")[0].strip() for part in config.activation_policy.split(",")}


def block_policies(text: str, blocks: int) -> list[str]:
    """The activation policy of each block: one name, or `name:count,...` from the first block on.

    Raises ValueError naming the flag if a name is unknown or the counts do not add up to `blocks`.
    """
    policies: list[str] = []
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        if name not in POLICIES:
            raise ValueError(
                f"--activation_policy {text}: {name!r} is not one of {', '.join(POLICIES)}"
            )
        if count and not count.isdecimal():
            raise ValueError(f"--activation_policy {text}: {count!r} is not a number of blocks")
        policies += [name] * (int(count) if count else blocks - len(policies))
    if len(policies) != blocks:
        raise ValueError(
            f"--activation_policy {text} is for {len(policies)} blocks, but the model has {blocks}"
        )
    return policies
