"""The turns of a conversation: from the dialects of data sets to one form that chat templates know.

A turn is `role`, `content` (text, never null), and whatever else it carries: `tool_calls`, whose
arguments are objects, reasoning, a name. What a data set leaves out is absent, so that no template
writes "None". Where authors disagree on names or types, all of theirs are taken; what can't be taken is
an error that names the place and the key.
"""

from __future__ import annotations

import json

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")

# ShareGPT's names of the speakers: https://huggingface.co/docs/trl/dataset_formats#sharegpt
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}

# Authors take an assistant's turn out of training with one of these, set to 0 or false.
_SWITCHES = (
    "weight",
    "train",
    "trainable",
    "trained",
    "training",
    "train_on_turn",
    "calculate_loss",
    "loss",
    "loss_mask",
    "step_loss_mask",
    "loss_weight",
    "loss_scale",
)
# And parts of a turn with these, which can't be followed here.
_PARTIAL_SWITCHES = ("train_detail", "training_detail")

_TEXT_PARTS = ("text", "input_text", "output_text")  # as OpenAI's two APIs call parts of a content
TOOLS_KEYS = ("tools", "tool_defs", "functions")
# Names of the reasoning before an answer, under which templates look for it too.
REASONING = ("reasoning_content", "reasoning", "thinking")


def read_messages(turns, source: str, key: str) -> tuple[list[dict], frozenset[int], list[str]]:
    """The conversation under `key`, the turns that are not trained, and what is to be said of it.

    turns: a list with OpenAI's (role, content) or ShareGPT's (from, value), or that list as JSON text.
    """
    turns = unpacked(turns)
    if not isinstance(turns, list):
        raise ValueError(
            f"{source}: '{key}' is {type(turns).__name__}; expected a list of "
            '{"role": ..., "content": ...}'
        )
    messages, excluded, notes = [], set(), []
    for number, turn in enumerate(turns):
        place = f"{source}: {key}[{number}]"
        message, switches = _turn(turn, place)
        off = [name for name, value in switches.items() if not _is_on(value, name, place)]
        if off:
            excluded.add(number)
        elif switches and message["role"] != "assistant":
            notes.append(
                f"'{next(iter(switches))}' asks to train {message['role']} turns, but only assistant "
                "turns can be trained"
            )
        messages.append(message)
    return messages, frozenset(excluded), notes


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def read_tools(record: dict, source: str) -> list | None:
    """The tools of a record under any of their names, as lists of schemas or as JSON text."""
    given = {key: record[key] for key in TOOLS_KEYS if record.get(key)}
    if len(given) > 1:
        raise ValueError(f"{source}: {' and '.join(given)} all hold tools; keep one of them")
    for key, value in given.items():
        tools = unpacked(value)
        if isinstance(tools, dict):
            tools = [tools]
        if not isinstance(tools, list):
            raise ValueError(
                f"{source}: '{key}' is {type(tools).__name__}; expected a list of schemas"
            )
        tools = [unpacked(tool) for tool in tools]
        if strange := [tool for tool in tools if not isinstance(tool, dict)]:
            raise ValueError(
                f"{source}: '{key}' holds {strange[0]!r:.60}; expected schemas, as objects "
                "or as JSON text"
            )
        # OpenAI's older `functions` are what `tools` wrap.
        if key == "functions":
            tools = [_as_tool(tool) for tool in tools]
        return tools or None
    return None


def _as_tool(schema: dict) -> dict:
    return schema if "function" in schema else {"type": "function", "function": schema}


def unpacked(value):
    """What JSON text of a list or an object stands for; anything else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# ---- one turn -------------------------------------------------------------------------------


def _turn(turn: dict, source: str) -> tuple[dict, dict]:
    """A turn in the one form, and the switches that its author set."""
    if not isinstance(turn, dict) or not ({"role", "from"} & turn.keys()):
        raise ValueError(
            f'{source}: expected {{"role": ..., "content": ...}} or '
            f'{{"from": ..., "value": ...}}, found {turn!r:.80}'
        )
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    role = _SHAREGPT_ROLES.get(turn[role_key], turn[role_key])
    if role not in ROLES:
        raise ValueError(f"{source}: unknown role {role!r}; use one of {', '.join(ROLES)}")
    rest = {
        key: value
        for key, value in turn.items()
        if key not in (role_key, content_key) and value is not None
    }
    for key in _PARTIAL_SWITCHES:
        if rest.get(key):
            raise ValueError(
                f"{source}: '{key}' trains parts of a turn, which is not supported; split the turn, or "
                'set "train" for the whole turn'
            )
    switches = {key: rest.pop(key) for key in _SWITCHES if key in rest}
    rest |= {key: _content(rest[key], source, key) for key in REASONING if key in rest}
    if calls := _tool_calls(rest, source):
        rest["tool_calls"] = calls
    return {"role": role, "content": _content(turn.get(content_key), source), **rest}, switches


def _is_on(value, key: str, source: str) -> bool:
    """Whether a switch leaves its turn in training."""
    if isinstance(value, str):
        value = {"true": 1, "false": 0, "1": 1, "0": 0}.get(value.lower(), value)
    if value in (0, 1):
        return bool(value)
    raise ValueError(
        f"{source}: '{key}' is {value!r:.40}; expected 1 or true to train on the turn, 0 or "
        "false not to"
    )


def _content(content, source: str, key: str = "content") -> str:
    """Content as one string; the text parts of a list ([{"type": "text", ...}]) are joined."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return checked_text(content, source, key)
    if any(not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS for part in content):
        raise ValueError(f"{source}: '{key}' has parts other than text; only text is supported")
    return "".join(checked_text(part.get("text"), source, "text") for part in content)


def _tool_calls(fields: dict, source: str) -> list[dict]:
    """The calls of a turn, taken out of its fields, with arguments as objects."""
    calls = unpacked(fields.pop("tool_calls", None)) or []
    if not isinstance(calls, list) or any(not isinstance(call, dict) for call in calls):
        raise ValueError(
            f"{source}: 'tool_calls' is {calls!r:.60}; expected a list of "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}'
        )
    if older := unpacked(fields.pop("function_call", None)):  # OpenAI's, before there were several
        if not isinstance(older, dict):
            raise ValueError(
                f"{source}: 'function_call' is {older!r:.60}; expected "
                '{"name": ..., "arguments": {...}}'
            )
        calls = [*calls, _as_tool(older)]
    return [_call(call, f"{source}: tool_calls[{number}]") for number, call in enumerate(calls)]


def _call(call: dict, source: str) -> dict:
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], source)}
    return (
        {**call, "arguments": _arguments(call["arguments"], source)}
        if "arguments" in call
        else call
    )


def _arguments(arguments, source: str) -> dict:
    """The arguments of a call; OpenAI's wire format has them as JSON text."""
    found = unpacked(arguments)
    if isinstance(found, str) and not found.strip():
        return {}
    if isinstance(found, dict):
        return found
    raise ValueError(
        f"{source}: 'arguments' is {arguments!r:.60}; expected an object, or the JSON text of one"
    )


def checked_text(value, source: str, key: str) -> str:
    """`value`, if it is text that can be encoded."""
    if not isinstance(value, str):
        found = "null" if value is None else f"{type(value).__name__} {str(value)[:40]}"
        remedy = 'drop the row, or write "" if it is empty'
        if isinstance(value, int | float) and value == value:
            remedy = f'write it as text: "{value}"'
        elif isinstance(value, bytes):
            remedy = "its column is binary; write it as a column of strings"
        raise ValueError(f"{source}: '{key}' is {found}; expected text in quotes ({remedy})")
    check_encodable(value, f"{source}: '{key}'")
    return value


def check_encodable(text: str, what: str):
    """Refuse text that no tokenizer can encode: JSON allows "\\ud83d" alone."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds a lone surrogate (half of a character) at position "
            f"{error.start}; remove it, or export with errors='replace'"
        ) from None
