"""What chat templates do with thoughts, tools and texts, found by rendering them.

`chat_templates.json` has the facts, with the families whose models ship each template and where its text
was read (template_sources.py). scripts/template_facts.py finds them again, and scripts/families_page.py
writes both tables of docs/families.md from them.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

from .template_sources import source_of

FACTS = Path(__file__).with_name("chat_templates.json")
_THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought")  # fields that templates read
_TOOL = dict(
    type="function",
    function=dict(
        name="look_up",
        description="Looks up.",
        parameters=dict(
            type="object",
            properties=dict(city=dict(type="string", description="A city.")),
            required=["city"],
        ),
    ),
)
_NO_FACT = "not known"
_NO_TEMPLATE = dict(thoughts="", inline="", tools="", arguments="", besides="no chat template")


def facts_of(template: str | None) -> dict[str, str]:
    """What a template does: `thoughts`, `inline`, `tools`, `arguments` and `besides`."""
    if template is None:
        return _NO_TEMPLATE
    facts = dict(thoughts=_thoughts(template), inline=_inline(template), **_tools(template))
    return facts | dict(besides="; ".join(_besides(template)))


def _render(template: str, *messages: dict, tools: list | None = None) -> str | None:
    """The text of a conversation, in parts if the template takes no other; None if it refuses it."""
    if _takes_parts(template):
        messages = tuple(map(_in_parts, messages))
    return _rendered(template, *messages, tools=tools)


@cache
def _takes_parts(template: str) -> bool:
    """Whether contents must be lists of parts."""
    turns = _user("a"), _answer("b")
    in_parts = _rendered(template, *map(_in_parts, turns))
    return in_parts is not None and _rendered(template, *turns) is None


def _in_parts(turn: dict) -> dict:
    part = dict(type="text", text=turn["content"])
    if turn["role"] == "tool":
        part["name"] = turn["name"]
    return turn | dict(content=[part])


def _rendered(template: str, *messages: dict, tools: list | None = None) -> str | None:
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>")
    try:
        texts, _ = render_jinja_template(
            [list(messages)], tools=tools, chat_template=template, **special
        )
    except Exception:  # jinja's own errors, and those that a template raises
        return None
    return texts[0]


def _user(text: str) -> dict:
    return dict(role="user", content=text)


def _answer(text: str, **more) -> dict:
    return dict(role="assistant", content=text, **more)


def _thoughts(template: str) -> str:
    """In which answers thoughts that have a field of their own are written."""
    for field in _THOUGHTS:
        first, last = _answer("one", **{field: "EARLY"}), _answer("two", **{field: "LATE"})
        text = _render(template, _user("a"), first, _user("b"), last) or ""
        if "LATE" in text:
            kept = "every answer" if "EARLY" in text else "the last answer only"
            return kept if field == _THOUGHTS[0] else f"{kept} (field `{field}`)"
    return "never"


def _inline(template: str) -> str:
    """What becomes of `<think>` in the text of answers."""
    first, last = (_answer(f"<think>{t}</think>an answer") for t in ("EARLY", "LATE"))
    text = _render(template, _user("a"), first, _user("b"), last)
    if text is None:
        return "refused"
    return {(True, True): "kept", (False, True): "cut from earlier answers"}.get(
        ("EARLY" in text, "LATE" in text), "cut"
    )


def _tools(template: str) -> dict[str, str]:
    """Whether definitions, calls and results are written, and how arguments must be given."""
    shown = _render(template, _user("a"), tools=[_TOOL]) or ""
    texts = {kind: _called(template, given) for kind, given in _ARGUMENTS.items()}
    if set(texts.values()) == {None}:
        return dict(tools="calls are refused", arguments="")
    texts = {kind: text or "" for kind, text in texts.items()}
    right = [k for k, text in texts.items() if "PARIS" in text and '\\"city' not in text]
    whole = next((texts[k] for k in (*right, *texts) if texts[k]), "")
    parts = dict(definitions="look_up" in shown, calls="PARIS" in whole, results="RESULT" in whole)
    missing = [part for part, found in parts.items() if not found]
    if len(missing) == len(parts):
        return dict(tools="not written", arguments="")
    written = f"no {', no '.join(missing)}" if missing else "written"
    both = len(right) == len(_ARGUMENTS)
    return dict(tools=written, arguments="either" if both else right[0] if right else "")


_ARGUMENTS = {"objects": {"city": "PARIS"}, "JSON text": '{"city": "PARIS"}'}


def _called(template: str, arguments) -> str | None:
    """The text of a call and its result; None if the template refuses it."""
    call = dict(name="look_up", arguments=arguments)
    calls = [dict(id="call00001", type="function", function=call)]
    result = dict(role="tool", tool_call_id="call00001", name="look_up", content="RESULT")
    called = dict(_answer(""), tool_calls=calls)
    return _render(template, _user("a"), called, result, _answer("b"), tools=[_TOOL])


def _besides(template: str) -> list[str]:
    """What else changes a conversation."""
    found = []
    text = _render(template, dict(role="system", content="SYSTEM"), _user("a"), _answer("  one  "))
    alone = _render(template, _user("QUESTION"), _answer("  one  ")) or ""
    if text is None:
        found.append("a system message is refused")
    elif "SYSTEM" not in text:
        found.append("a system message is left out")
    if len(_words(alone.partition("QUESTION")[0])) > 2:
        found.append("a system message is made up where there is none")
    if "  one  " not in alone:
        found.append("answers are stripped")
    if _takes_parts(template):
        found.append("texts are given in parts")
    if "{% generation %}" in template or "{%- generation" in template:
        found.append("marks what the assistant writes")
    return found


def _words(text: str) -> list[str]:
    """The words of a text but special tokens and names of roles."""
    words = re.findall(r"[A-Za-z]+", re.sub(r"<[^>]*>|\[[A-Z_/]+\]", " ", text))
    return [word for word in words if word.lower() not in ("user", "system", "assistant")]


@cache
def stored_facts() -> list[dict]:
    """Each template's row of chat_templates.json."""
    return json.loads(FACTS.read_text())


def of_family(family: str) -> str:
    """A family's cell of the table of types: what becomes of thoughts and tools, or "none"."""
    row = next((row for row in stored_facts() if family in row["families"]), None)
    if row is None:
        return _NO_FACT
    if row.items() >= _NO_TEMPLATE.items():
        return "none"
    arguments = f" (arguments: {row['arguments']})" if row["arguments"] else ""
    return f"thoughts: {row['thoughts']}; tools: {row['tools']}{arguments}"


def templates_table() -> str:
    """The table of templates in docs/families.md."""
    lines = [
        "| template of | families | thoughts | `<think>` in an answer | tools | arguments | besides |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in stored_facts():
        cells = (
            f"[{row['model']}]({source_of(row)})",
            ", ".join(row["families"]),
            *(row[fact] for fact in ("thoughts", "inline", "tools", "arguments", "besides")),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
