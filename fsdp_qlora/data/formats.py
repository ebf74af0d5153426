"""What a row of training data is, and how a record of a file becomes one.

Data sets name their fields in a dozen ways. They are all brought to `Row` here, once, so that the
code that renders, masks and tokenises knows one shape only. A record that fits no format is the
user's mistake, and the error says which keys it has, where, and which keys would work.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")

# ShareGPT's names of the speakers: https://huggingface.co/docs/trl/dataset_formats#sharegpt
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant",
                  "observation": "tool", "function_response": "tool", "function_call": "assistant"}

# The prompts of https://github.com/tatsu-lab/stanford_alpaca, and those that the first fsdp_qlora
# used for questions. They serve tokenizers without a chat template.
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n")
ALPACA_INPUT_PROMPT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n")
QUESTION_PROMPT = "###Question:\n{question}\n###Answer:\n"
CONTEXT_QUESTION_PROMPT = "###Context:\n{context}\n###Question:\n{question}\n###Answer:\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One example: a conversation (`messages`) or plain `text`, never both.

    `plain_prompt` is what precedes the answer when the tokenizer has no chat template; it is set
    for rows of one prompt and one answer, whose last message is then the answer.
    """

    source: str  # where it came from, for people: "train.jsonl:17"
    messages: list[dict] | None = None  # [{"role": ..., "content": ..., ...}]
    text: str | None = None
    plain_prompt: str | None = None
    tools: list | None = None  # JSON schemas that the chat template shows to the model


def row_from_record(record: dict, source: str) -> Row:
    """The row of one record; ValueError names `source` and the key at fault."""
    if not isinstance(record, dict):
        raise ValueError(f"{source}: expected an object with named fields, "
                         f"found {type(record).__name__}")
    for keys, build in FORMATS:
        if all(key in record for key in keys): return build(record, source, *keys)
    if {"chosen", "rejected"} <= record.keys():
        raise ValueError(f"{source}: chosen and rejected answers are for preference optimisation, which "
                         "is not done here (TRL does it); to train on the chosen ones alone, rename "
                         "chosen to completion, or to messages where it is a whole conversation")
    accepted = "; ".join(" + ".join(keys) for keys, _ in FORMATS)
    raise ValueError(f"{source}: keys {', '.join(map(str, record)) or '(none)'} fit no format; "
                     f"rename them to one of: {accepted}")


# ---- one builder per format -----------------------------------------------------------------

def _chat(record: dict, source: str, key: str) -> Row:
    messages = _messages(record, source, key)
    system = _optional_text(record, source, "system")  # beside the turns in some ShareGPT files
    if system and not any(turn["role"] == "system" for turn in messages):
        messages = [_message("system", system), *messages]
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{source}: 'tools' is {type(tools).__name__}; expected a list of schemas")
    return Row(source, messages=messages, tools=tools or None)


def _prompt(record: dict, source: str, prompt_key: str, answer_key: str) -> Row:
    if record.get("label") is False:  # "unpaired preference" of TRL's formats, linked above
        raise ValueError(f"{source}: 'label' is false, as for an answer that is not wanted (KTO), and "
                         "every answer is trained here; drop such rows, or the key if it means more")
    if isinstance(record[prompt_key], list):
        answer = record[answer_key]
        completion = (_messages(record, source, answer_key) if isinstance(answer, list)
                      else [_message("assistant", _text(record, source, answer_key))])
        return Row(source, messages=_messages(record, source, prompt_key) + completion)
    prompt = _text(record, source, prompt_key)
    return _question_and_answer(source, prompt, _text(record, source, answer_key), prompt)


def _instruction(record: dict, source: str, instruction_key: str, answer_key: str) -> Row:
    instruction = _text(record, source, instruction_key)
    # "context" is Dolly's name of the input
    extra = _optional_text(record, source, "input") or _optional_text(record, source, "context")
    template = ALPACA_INPUT_PROMPT if extra else ALPACA_PROMPT
    asked = f"{instruction}\n\n{extra}" if extra else instruction
    return _question_and_answer(source, asked, _text(record, source, answer_key),
                                template.format(instruction=instruction, input=extra))


def _question(record: dict, source: str, question_key: str, answer_key: str) -> Row:
    question = _text(record, source, question_key)
    context = _optional_text(record, source, "context")
    template = CONTEXT_QUESTION_PROMPT if context else QUESTION_PROMPT
    asked = f"{context}\n\n{question}" if context else question
    return _question_and_answer(source, asked, _text(record, source, answer_key),
                                template.format(context=context, question=question))


def _plain_text(record: dict, source: str, key: str) -> Row:
    return Row(source, text=_text(record, source, key))


def _question_and_answer(source: str, asked: str, answer: str, plain_prompt: str) -> Row:
    messages = [_message("user", asked), _message("assistant", answer)]
    return Row(source, messages=messages, plain_prompt=plain_prompt)


# Tried in this order: Alpaca files also carry a ready-made "text", which is then left alone.
FORMATS: tuple[tuple[tuple[str, ...], Callable[..., Row]], ...] = (
    (("messages",), _chat),
    (("conversations",), _chat),
    (("prompt", "completion"), _prompt),
    (("prompt", "response"), _prompt),
    (("instruction", "output"), _instruction),
    (("instruction", "response"), _instruction),
    (("question", "answer"), _question),
    (("text",), _plain_text),
)


# ---- fields ---------------------------------------------------------------------------------

def _messages(record: dict, source: str, key: str) -> list[dict]:
    """The conversation under `key`, with OpenAI's (role, content) or ShareGPT's (from, value)."""
    turns = record[key]
    if not isinstance(turns, list):
        raise ValueError(f"{source}: '{key}' is {type(turns).__name__}; expected a list of "
                         '{"role": ..., "content": ...}')
    return [_turn(turn, f"{source}: {key}[{number}]") for number, turn in enumerate(turns)]


def _turn(turn: dict, source: str) -> dict:
    if not isinstance(turn, dict) or not ({"role", "from"} & turn.keys()):
        raise ValueError(f'{source}: expected {{"role": ..., "content": ...}} or '
                         f'{{"from": ..., "value": ...}}, found {turn!r:.80}')
    role_key, content_key = ("role", "content") if "role" in turn else ("from", "value")
    role = SHAREGPT_ROLES.get(turn[role_key], turn[role_key])
    if role not in ROLES:
        raise ValueError(f"{source}: role {role!r} is not known; use one of {', '.join(ROLES)}")
    content = turn.get(content_key)
    if content is not None or not turn.get("tool_calls"):  # None is right beside tool calls
        content = _content({"content": content}, source)
    # Arrow fills absent fields of a struct with None; a template must not see those.
    rest = {key: value for key, value in turn.items()
            if key not in (role_key, content_key) and value is not None}
    return {"role": role, "content": content, **rest}


def _content(turn: dict, source: str) -> str:
    """Content as one string; the text parts of a list ([{"type": "text", ...}]) are joined."""
    parts = turn["content"]
    if not isinstance(parts, list): return _text(turn, source, "content")
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
        raise ValueError(f"{source}: 'content' holds parts other than text; only text is trained")
    return "".join(_text(part, source, "text") for part in parts)


def _message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def _optional_text(record: dict, source: str, key: str) -> str:
    return "" if record.get(key) is None else _text(record, source, key)


def _text(record: dict, source: str, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        found = "null" if value is None else f"{type(value).__name__} {str(value)[:40]}"
        raise ValueError(f"{source}: '{key}' is {found}; expected text in quotes (drop the row, "
                         "or write \"\" where it is empty)")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON allows "\ud83d" alone, but no tokenizer can encode it.
        raise ValueError(
            f"{source}: '{key}' holds a lone surrogate (half of a character) at position "
            f"{error.start}; remove it, or export with errors='replace'") from None
    return value
