"""A conversation's messages in the forms that chat templates ask for."""

from __future__ import annotations

import json

from .messages import REASONING


def in_parts(turn: dict) -> dict:
    """A turn whose content is a list of one part; of a tool's result with the tool's name."""
    named = {"name": turn["name"]} if turn["role"] == "tool" and turn.get("name") else {}
    return {**turn, "content": [{"type": "text", "text": turn.get("content") or "", **named}]}


def fold_system(messages: list[dict]) -> list[dict] | None:
    """The conversation with its leading system message put before the first user turn's text."""
    roles = [message["role"] for message in messages[:2]]
    if roles != ["system", "user"]:
        return None
    system, user, *rest = messages
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]


def with_reasoning_as(turn: dict, key: str | None) -> dict:
    """The turn with its reasoning, whatever it is called, under `key`; as it is for None."""
    given = [name for name in REASONING if turn.get(name)]
    if key is None or not given or key in given:
        return turn
    return {
        **{name: value for name, value in turn.items() if name != given[0]},
        key: turn[given[0]],
    }


def arguments_of(messages: list[dict]) -> list[dict]:
    """The arguments of all tool calls that are objects."""
    calls = [
        call.get("function", call) for turn in messages for call in turn.get("tool_calls") or []
    ]
    return [call["arguments"] for call in calls if isinstance(call.get("arguments"), dict)]


def with_text_arguments(messages: list[dict]) -> list[dict]:
    """The messages with the arguments of tool calls as JSON text, as OpenAI's API gives them."""

    def call_as_text(call: dict) -> dict:
        if "function" in call:
            return {**call, "function": call_as_text(call["function"])}
        if "arguments" not in call:
            return call
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}

    return [
        {**turn, "tool_calls": [call_as_text(call) for call in turn["tool_calls"]]}
        if turn.get("tool_calls")
        else turn
        for turn in messages
    ]
