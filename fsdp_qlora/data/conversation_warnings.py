"""What a careful reader should be told of a conversation: what its template leaves out or twists.

A template says nothing of the fields that it does not know, and a model trained without them is worse
for no visible reason. So whatever a row holds is looked for in the row's text.
"""

from __future__ import annotations

import json

from .messages import REASONING
from .templates import ESCAPED_CUT, ChatTemplate

# Fields that only tie messages together; an answer does not depend on their text.
_LINKS = ("tool_call_id", "id")


def left_out(messages: list[dict], tools: list | None, text: str, chat: ChatTemplate) -> list[str]:
    """What of a conversation is not in its `text`, a line for each kind."""
    found = []
    for turn in messages:
        role, content = turn["role"], turn["content"].strip()
        if content and not _is_written(content, text):
            found.append(f"the chat template leaves out or changes the content of {role} turns")
        found += [
            f"the chat template leaves out '{key}' of {role} turns"
            for key, value in turn.items()
            if key not in ("role", "content", "tool_calls", *_LINKS)
            and value not in ("", [], {})
            and not _is_written(value, text)
        ]
    if tools and chat.render(messages) == text:
        found.append("the chat template leaves out the tools")
    return list(dict.fromkeys(found))


def _is_written(value, text: str) -> bool:
    if isinstance(value, str):
        forms = (value.strip(), json.dumps(value.strip())[1:-1])
    else:
        forms = (json.dumps(value, ensure_ascii=False), str(value))
    return any(form.replace(ESCAPED_CUT, "") in text for form in forms)


def empty_answers(messages: list[dict], excluded: set[int]) -> list[str]:
    """A line if an answer that is trained holds nothing but its end."""
    found = any(
        turn["role"] == "assistant"
        and number not in excluded
        and len(turn) == 2
        and not turn["content"].strip()
        for number, turn in enumerate(messages)
    )
    return ["an answer is empty, so only its end token is trained"] if found else []


def untrained_reasoning(
    messages: list[dict], spans: dict[int, tuple[int, int]], text: str, excluded: set[int]
) -> list[str]:
    """A line if reasoning is in the text and not in what is trained. spans: of each answer in it."""
    for turn, (start, end) in spans.items():
        for key in REASONING:
            thought = str(messages[turn].get(key) or "").strip()
            if (
                turn not in excluded
                and thought
                and thought in text
                and thought not in text[start:end]
            ):
                return [
                    f"'{key}' is context only: the chat template writes it differently from its generation "
                    "prompt"
                ]
    return []
