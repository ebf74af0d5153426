"""Every error message of the program, read from its source; docs/messages.md is made of them.

A message is a text that ends a run in one line. What is filled in when it happens stands in capitals:
`--lr must be above 0, got LR`. A text that reaches an error through a variable, a parameter or a
function of this package is followed back to where it is written.
"""
from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fsdp_qlora"
ERRORS = {"ValueError", "OSError", "UnusableRow", "ArgumentTypeError"}
STEPS_BACK = 3  # how far a text is followed
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

    def add(self, file: str, tree: ast.Module):
        self.files[file] = tree
        self.visit(file, tree, tree)

    def visit(self, file: str, node: ast.AST, function: ast.AST):
        for child in ast.iter_child_nodes(node):
            self.places[child] = file, function
            if isinstance(child, FUNCTIONS): self.functions.setdefault(child.name, []).append(child)
            if isinstance(child, ast.Call): self.calls.setdefault(called(child), []).append(child)
            self.visit(file, child, child if isinstance(child, FUNCTIONS) else function)

    def texts(self, node: ast.AST, steps: int = STEPS_BACK) -> list[str]:
        """The texts that an expression can be; none where it is no text of this package."""
        if isinstance(node, ast.Constant): return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr): return self.filled_in(node.values, steps)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.filled_in([node.left, node.right], steps)
        if isinstance(node, ast.IfExp):
            return self.texts(node.body, steps) + self.texts(node.orelse, steps)
        if isinstance(node, ast.Call) and steps: return self.returned(node, steps)
        if isinstance(node, ast.Name) and steps: return self.assigned(node, steps)
        return []

    def filled_in(self, parts: list[ast.AST], steps: int) -> list[str]:
        """A text with a word for each value in it; one for each sentence that a value is known to be."""
        plain = [plain_text(part) for part in parts]
        found = []
        for place, part in enumerate(parts):
            value = part.value if isinstance(part, ast.FormattedValue) else part
            if isinstance(value, ast.Constant | ast.JoinedStr): continue
            found += ["".join([*plain[:place], text, *plain[place + 1:]])
                      for text in self.texts(value, steps)
                      if len(text.split()) > 2 or isinstance(value, ast.IfExp)]
        return found or ["".join(plain)]

    def returned(self, call: ast.Call, steps: int) -> list[str]:
        """The texts that a function of this package returns."""
        return [text for function in self.defined(called(call), call) for node in ast.walk(function)
                if isinstance(node, ast.Return) and node.value and self.places[node][1] is function
                for text in self.texts(node.value, steps - 1)]

    def assigned(self, name: ast.Name, steps: int) -> list[str]:
        """The texts of a variable: assigned in its function, or given by those who call it."""
        file, function = self.places[name]
        if not isinstance(function, FUNCTIONS): return []
        values = [node.value for node in ast.walk(function) if isinstance(node, ast.Assign)
                  and any(isinstance(t, ast.Name) and t.id == name.id for t in node.targets)]
        parameters = [a.arg for a in function.args.args if a.arg != "self"]
        if name.id in parameters:
            place = parameters.index(name.id)
            values += [call.args[place] for call in self.calls.get(function.name, [])
                       if len(call.args) > place and function in self.defined(function.name, call)]
        return [text for value in values for text in self.texts(value, steps - 1)]

    def defined(self, name: str, call: ast.Call) -> list[ast.FunctionDef]:
        """The functions that a call can mean: those of its file, else the only one of that name."""
        found, here = self.functions.get(name, []), self.places[call][0]
        if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") != "self":
            return [f for f in found if self.places[f][0] != here
                    and not isinstance(self.places[f][1], FUNCTIONS)]
        return [f for f in found if self.places[f][0] == here] or found


def called(node: ast.Call) -> str:
    """The name of the function that is called, without what it belongs to."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def plain_text(node: ast.AST) -> str:
    """A part of a text as written, or a word in capitals for what is filled in."""
    if isinstance(node, ast.Constant): return str(node.value)
    if isinstance(node, ast.JoinedStr): return "".join(map(plain_text, node.values))
    return placeholder(node.value if isinstance(node, ast.FormattedValue) else node)


def placeholder(node: ast.AST) -> str:
    """A word for a value: the name of its variable or attribute."""
    if isinstance(node, ast.Call):
        inner = [a for a in node.args if not isinstance(a, ast.Constant)]
        return placeholder(inner[-1] if inner else node.func)
    if isinstance(node, ast.BoolOp): return placeholder(node.values[-1])
    if isinstance(node, ast.Subscript): return placeholder(node.value)
    if isinstance(node, ast.GeneratorExp): return placeholder(node.generators[0].iter)
    if isinstance(node, ast.BinOp): return placeholder(node.left)
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
        if isinstance(node, ast.Call) and called(node) in ERRORS and node.args: yield node


def messages(source: Source) -> list[Message]:
    """Every message, in the order of the files."""
    found = [Message(file, text) for file, tree in source.files.items() for call in raised(tree)
             for text in source.texts(call.args[0])]
    return list(dict.fromkeys(found))


def without_text(source: Source) -> list[str]:
    """`file: expression` of each error that only passes on a text, which was not found."""
    return [f"{file}: {ast.unparse(call.args[0])}" for file, tree in source.files.items()
            for call in raised(tree) if not source.texts(call.args[0])]
