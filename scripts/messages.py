"""Every error message of the program, read from its source; docs/messages.md is made of them.

A message is a text that ends a run in one line. What is filled in when it happens stands in capitals:
`--lr must be above 0, got LR`. A text that reaches an error through a variable, a collection, a
parameter or a function of this package is followed back to where it is written.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

PACKAGE = Path(__file__).parents[1] / "fsdp_qlora"
ERRORS = {"ValueError", "OSError", "WriteError", "UnusableRow", "ArgumentTypeError"}
STEPS_BACK = 4  # how far a text is followed
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Message:
    """One message: the file that has it, below fsdp_qlora/, and its text."""

    file: str
    text: str


@dataclass
class Source:
    """The package's syntax: files, the place of each node, functions and calls by name."""

    files: dict[str, ast.Module] = field(default_factory=dict)
    places: dict[ast.AST, tuple[str, ast.AST]] = field(default_factory=dict)  # file, function
    functions: dict[str, list[ast.FunctionDef]] = field(default_factory=dict)
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)
    imported: dict[tuple[str, str], str] = field(default_factory=dict)  # file, name -> from where

    def add(self, file: str, tree: ast.Module):
        self.files[file] = tree
        self.visit(file, tree, tree)

    def visit(self, file: str, node: ast.AST, function: ast.AST):
        for child in ast.iter_child_nodes(node):
            self.places[child] = file, function
            if isinstance(child, FUNCTIONS):
                self.functions.setdefault(child.name, []).append(child)
            if isinstance(child, ast.Call):
                self.calls.setdefault(called(child), []).append(child)
            if isinstance(child, ast.ImportFrom) and child.level:
                there = (
                    PurePosixPath(file)
                    .parents[child.level - 1]
                    .joinpath(*(child.module or "").split("."))
                )
                self.imported |= {(file, a.asname or a.name): there.as_posix() for a in child.names}
            self.visit(file, child, child if isinstance(child, FUNCTIONS) else function)

    def texts(self, node: ast.AST, steps: int = STEPS_BACK) -> list[str | None]:
        """The texts that an expression can be; None among them for what this package does not show."""
        if isinstance(node, ast.Constant):
            return [node.value if isinstance(node.value, str) else None]
        if pieces := pieces_of(node):
            return self.filled_in(pieces, steps)
        if choices := choices_of(node):
            return [text for choice in choices for text in self.texts(choice, steps)]
        if isinstance(node, ast.Call) and steps:
            return self.returned(node, steps) or [None]
        if isinstance(node, ast.Name) and steps:
            return self.assigned(node, steps) or [None]
        return [None]

    def filled_in(self, pieces: list[ast.AST], steps: int) -> list[str]:
        """A text with a word for each value in it; one for each sentence that a value is known to be."""
        plain = [plain_text(piece) for piece in pieces]
        found = []
        for place, piece in enumerate(pieces):
            if isinstance(piece, ast.Constant):
                continue
            is_choice = isinstance(piece, ast.IfExp)  # any other value of two words is no sentence
            known = [
                text
                if text is not None and (is_choice or len(text.split()) not in (1, 2))
                else plain[place]
                for text in self.texts(piece, steps)
            ]
            if plain[place - 1].endswith(": "):
                known = [text for text in known if text]
            if set(known) != {plain[place]}:
                found += ["".join([*plain[:place], text, *plain[place + 1 :]]) for text in known]
        return found or ["".join(plain)]

    def returned(self, call: ast.Call, steps: int) -> list[str]:
        """The texts that a function of this package returns or yields."""
        return [
            text
            for function in self.defined(called(call), call)
            for node in ast.walk(function)
            if isinstance(node, ast.Return | ast.Yield)
            and node.value
            and self.places[node][1] is function
            for text in self.texts(node.value, steps - 1)
        ]

    def assigned(self, name: ast.Name, steps: int) -> list[str]:
        """The texts of a variable: put into it in its function, or given by those who call it."""
        file, function = self.places[name]
        if not isinstance(function, FUNCTIONS):
            return []
        values = [value for node in ast.walk(function) for value in put_into(node, name.id)]
        parameters = [a.arg for a in function.args.args if a.arg != "self"]
        if name.id in parameters:
            place = parameters.index(name.id)
            for call in self.calls.get(function.name, []):
                if function not in self.defined(function.name, call):
                    continue
                values += call.args[place : place + 1]
                values += [k.value for k in call.keywords if k.arg == name.id]
        return [text for value in values for text in self.texts(value, steps - 1)]

    def defined(self, name: str, call: ast.Call) -> list[ast.FunctionDef]:
        """The functions that a call can mean: those of its file, else those that it imports."""
        found, here = self.functions.get(name, []), self.places[call][0]
        if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") != "self":
            return [
                f
                for f in found
                if self.places[f][0] != here and not isinstance(self.places[f][1], FUNCTIONS)
            ]
        if own := [f for f in found if self.places[f][0] == here]:
            return own
        module = self.imported.get((here, name), "")
        return [f for f in found if self.places[f][0].startswith(module)]


def pieces_of(node: ast.AST) -> list[ast.AST]:
    """The pieces that a text is put together from, in their order; none if it is not."""
    if isinstance(node, ast.FormattedValue):
        return pieces_of(node.value)
    if isinstance(node, ast.JoinedStr):
        whole = node.values
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        whole = [node.left, node.right]
    else:
        return []
    pieces = [
        piece
        for part in whole
        for piece in pieces_of(part)
        or [part.value if isinstance(part, ast.FormattedValue) else part]
    ]
    is_text = any(isinstance(p, ast.Constant) and isinstance(p.value, str) for p in pieces)
    return pieces if is_text else []  # else numbers that are added


def choices_of(node: ast.AST) -> list[ast.AST]:
    """The expressions of which one is the text, or several, joined."""
    if isinstance(node, ast.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, ast.BoolOp | ast.Dict):
        return node.values
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]  # lists, or dicts
    if isinstance(node, ast.List | ast.Set):
        return node.elts
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return [node.elt]
    if isinstance(node, ast.DictComp):
        return [node.value]
    if isinstance(node, ast.Subscript | ast.NamedExpr):
        return [node.value]
    if isinstance(node, ast.Call) and called(node) == "join":
        return node.args
    if isinstance(node, ast.Call) and called(node) == "values":
        return [node.func.value]
    return []


def put_into(node: ast.AST, name: str) -> list[ast.AST]:
    """What a statement or expression puts into the variable of that name, or into what it holds."""

    def is_it(target: ast.AST) -> bool:
        if isinstance(target, ast.Subscript):
            return is_it(target.value)
        return isinstance(target, ast.Name) and target.id == name

    if isinstance(node, ast.Assign) and any(map(is_it, node.targets)):
        return [node.value]
    if isinstance(node, ast.AugAssign | ast.NamedExpr) and is_it(node.target):
        return [node.value]
    if isinstance(node, ast.For | ast.comprehension) and is_it(node.target):
        return [node.iter]
    if (
        isinstance(node, ast.Call)
        and called(node) in ("append", "extend")
        and is_it(node.func.value)
    ):
        return node.args
    return []


def called(node: ast.Call) -> str:
    """The name of the function that is called, without what it belongs to."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def plain_text(node: ast.AST) -> str:
    """A part of a text as written, or a word in capitals for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return placeholder(node)


def placeholder(node: ast.AST) -> str:
    """A word for a value: the name of its variable or attribute."""
    if isinstance(node, ast.Call):
        inner = [a for a in node.args if not isinstance(a, ast.Constant)]
        return placeholder(inner[-1] if inner else node.func)
    if isinstance(node, ast.BoolOp):
        return placeholder(node.values[-1])
    if isinstance(node, ast.Subscript):
        return placeholder(node.value)
    if isinstance(node, ast.GeneratorExp):
        return placeholder(node.generators[0].iter)
    if isinstance(node, ast.BinOp):
        return placeholder(node.left)
    name = getattr(node, "attr", getattr(node, "id", "value"))
    return {"error": "REASON", "args": "VALUE"}.get(name, name.upper().strip("_"))


def read_source() -> Source:
    """The syntax of the whole package."""
    source = Source()
    for path in sorted(PACKAGE.rglob("*.py")):
        source.add(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text()))
    return source


def raised(tree: ast.Module) -> Iterator[ast.Call]:
    """The calls in a file that make an error with a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in ERRORS and node.args:
            yield node


def messages(source: Source) -> list[Message]:
    """Every message, in the order of the files."""
    found = [
        Message(file, text)
        for file, tree in source.files.items()
        for call in raised(tree)
        for text in source.texts(call.args[0])
        if text is not None
    ]
    return list(dict.fromkeys(found))


def without_text(source: Source) -> list[str]:
    """`file: expression` of each error that only passes on a text, which was not found."""
    return [
        f"{file}: {ast.unparse(call.args[0])}"
        for file, tree in source.files.items()
        for call in raised(tree)
        if set(source.texts(call.args[0])) == {None}
    ]
