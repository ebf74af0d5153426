"""What `make test` leaves to other targets is no feature: each is named in a quick test."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import fsdp_qlora
from fsdp_qlora.cli import COMMANDS
from fsdp_qlora.config import RunConfig

TESTS = Path(__file__).parent


class _Quick(ast.NodeTransformer):
    """A test module without what `make test` leaves out, and without what is only said."""

    def __init__(self, tree: ast.Module):
        self.left_out: set[int] = set()  # ids of nodes
        lists = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.Tuple))
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(tree):
            if _is_call(call, "in_parts") and getattr(call.args[0], "id", "") in lists:
                quick = {place.value for place in call.args[1:]}
                cases = enumerate(lists[call.args[0].id].elts)
                self.left_out |= {id(case) for i, case in cases if i not in quick}

    def visit(self, node):
        marks = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
        is_slow = any("mark.slow" in mark or "mark.exhaustive" in mark for mark in marks)
        is_said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_slow or is_said or _is_for_later(node) or id(node) in self.left_out:
            return ast.Pass() if isinstance(node, ast.stmt) else ast.Constant(None)
        return self.generic_visit(node)


def _is_for_later(node: ast.AST) -> bool:
    return _is_call(node, "slow") or _is_call(node, "rest")


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == name


def words_of(source: str) -> set[str]:
    """Names, keywords and words of strings in what `make test` runs of a module."""
    tree = ast.parse(source)
    return set(re.findall(r"\w+", ast.unparse(_Quick(tree).visit(tree))))


@pytest.fixture(scope="module")
def words() -> set[str]:
    files = [p for p in TESTS.rglob("*.py") if "gpu" not in p.parts and p != Path(__file__)]
    return set().union(*(words_of(path.read_text()) for path in files))


def test_each_setting_command_and_public_name_is_in_a_quick_test(words):
    named = {field.name for field in fields(RunConfig)} | set(COMMANDS) | set(fsdp_qlora.__all__)
    assert not named - words


def test_what_is_slow_or_only_said_does_not_count():
    source = '''
"""said"""
CASES = [dict(first=1), dict(second=2)]
@pytest.mark.slow
def test_slow(): slowly
@pytest.mark.parametrize("cases", in_parts(CASES, 0))
@pytest.mark.parametrize("value", ["taken", slow("kept"), rest("left")])
def test_quick(): quickly
'''
    found = words_of(source)
    assert {"first", "taken", "quickly"} <= found
    assert not {"said", "second", "slowly", "kept", "left"} & found
