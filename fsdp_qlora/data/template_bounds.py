"""Chat templates run within bounds: steps, size of text, recursion, and at last time.

A template is a program of whoever made the model. Jinja's sandbox keeps it from files and code, and lets
it run for ever, or fill the memory. Here loops and calls are counted, and no text may grow beyond what a
row could hold, so the same rows are refused on every rank; the clock is the last resort. All else is
transformers' own environment: https://huggingface.co/docs/transformers/chat_templating

But for the date: a template that writes today's (Llama 3.2, gpt-oss) gets DAY, so that rows have the same
tokens on every day, and a run resumes after midnight.
"""

from __future__ import annotations

import operator
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import lru_cache, wraps

from jinja2 import Template, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

STEPS = 300_000  # rounds of loops and calls; a step more for every STEP_SIZE characters
_STEP_SIZE = 1_000
LARGEST = 2**26  # characters of a text, or items of a list
_LARGEST_BITS = 10_000  # of a whole number
SECONDS = 20.0
DAY = datetime(2024, 7, 26)  # which Llama 3's templates write where they are told no date


class OverBudget(Exception):
    """A template ran out of what one row may take."""


class _Budget(threading.local):
    steps = 0
    deadline = float("inf")
    is_dated = False

    def start(self):
        self.is_dated = False
        self.steps, self.deadline = STEPS, time.monotonic() + SECONDS

    def spend(self, value=None):
        """Count a step that made `value`. Raises OverBudget."""
        size = len(value) if isinstance(value, str | list | tuple | dict) else 0
        if size > LARGEST:
            raise OverBudget(f"it builds a text or list of over {LARGEST:,}")
        self.steps -= 1 + size // _STEP_SIZE
        if self.steps < 0:
            raise OverBudget(f"it takes over {STEPS:,} steps")
        if time.monotonic() > self.deadline:
            raise OverBudget(f"it takes over {SECONDS:g} seconds")


_budget = _Budget()


def render(source: str, **values) -> str:
    """What a template makes of `values`. Raises OverBudget, or whatever the template raises."""
    _budget.start()
    parts, size = [], 0
    for part in compiled(source).generate(**values):
        size += len(part)
        if size > LARGEST:
            raise OverBudget(f"it writes over {LARGEST:,} characters")
        parts.append(part)
    return "".join(parts)


def is_dated() -> bool:
    """Whether this thread's last `render` asked for the date."""
    return _budget.is_dated


def _strftime_now(form: str) -> str:
    """transformers' function of this name, on DAY."""
    _budget.is_dated = True
    return DAY.strftime(form)


@lru_cache
def compiled(source: str) -> Template:
    """A template as transformers compiles it, with what grows or repeats counted."""
    env = _compile_jinja_template("").environment.overlay()
    parse, call = env._parse, env.call

    def counting(*args):
        tree = parse(*args)
        for loop in tree.find_all(nodes.For):
            loop.iter = _through("_each", loop.iter)
        for assigned in tree.find_all(nodes.Assign):
            assigned.node = _through("_held", assigned.node)
        return tree

    env._parse = counting
    env.globals = {**env.globals, "strftime_now": _strftime_now}
    env.call = _counted(call)
    env.filters = {name: _counted(made) for name, made in env.filters.items()}
    env.filters |= {"_each": _each, "_held": _held}
    env.intercepted_binops = frozenset(_BINARY)
    env.binop_table = {**env.binop_table, **_BINARY}
    return env.from_string(source)


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    """A node that passes the value of another through a filter."""
    made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    return made.set_environment(node.environment)


def _each(items: Iterable) -> Iterator:
    for item in items:
        _budget.spend()
        yield item


def _held(value):
    _budget.spend(value)
    return value


def _counted(function: Callable) -> Callable:
    """A function whose calls and results are counted, and that gets no number larger than a text."""

    @wraps(function)
    def called(*args, **named):
        for value in (*args, *named.values()):
            if isinstance(value, int) and abs(value) > LARGEST:
                raise OverBudget(f"it passes a number over {LARGEST:,} to a function")
            if isinstance(value, str):
                _budget.spend(value)
        made = function(*args, **named)
        _budget.spend(made)
        return made

    return called


def _times(left, right):
    for many, number in ((left, right), (right, left)):
        if hasattr(many, "__len__") and isinstance(number, int) and len(many) * number > LARGEST:
            raise OverBudget(f"it builds a text or list of over {LARGEST:,}")
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    return _held(left * right)


def _power(left, right):
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    return left**right


def _check_bits(bits: int):
    if bits > _LARGEST_BITS:
        raise OverBudget("it computes a number with thousands of digits")


def _remainder(left, right):
    if isinstance(left, str) and re.search(r"\*|\d{6}", left):
        raise OverBudget("it pads a text too much")
    return _held(left % right)


_BINARY = {
    "*": _times,
    "**": _power,
    "%": _remainder,
    "+": lambda *pair: _held(operator.add(*pair)),
}
