"""What a row of training data is, and how a record of a file becomes one.

Data sets name their fields in a dozen ways. They are all brought to `Row` here, once, so that the
code that renders, masks and tokenises knows one shape only. A record that fits no format is the
user's mistake, and the error says which keys it has, where, and which keys would work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from .messages import TOOLS_KEYS, checked_text, message, read_messages, read_tools

# The prompts of https://github.com/tatsu-lab/stanford_alpaca, and those that the first fsdp_qlora
# used for questions. They serve tokenizers without a chat template.
_ALPACA_PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_INPUT_PROMPT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
QUESTION_PROMPT = "###Question:\n{question}\n###Answer:\n"
_CONTEXT_QUESTION_PROMPT = "###Context:\n{context}\n###Question:\n{question}\n###Answer:\n"
# How a question is asked where there is no chat template, by name.
PLAIN_PROMPTS = {"alpaca": _ALPACA_PROMPT, "question": QUESTION_PROMPT, "prompt": "{prompt}"}
TOKENS_KEY = "input_ids"  # of rows that another program has tokenised


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
    prompt_format: str | None = None  # the name in PLAIN_PROMPTS of what plain_prompt was made by
    tools: list | None = None  # JSON schemas that the chat template shows to the model
    excluded: frozenset[int] = frozenset()  # messages that their author took out of training
    asked: frozenset[int] = frozenset()  # messages of a prompt, whose answers are context
    weight: float = 1.0  # of its loss, relative to other rows; of 0, the row is left out
    unread: tuple[str, ...] = ()  # keys of the record that nothing is made of
    notes: tuple[str, ...] = ()  # what the data report should say of it


def row_from_record(record: dict, source: str, weight_column: str | None = None) -> Row:
    """The row of one record; ValueError names `source` and the key at fault.

    weight_column: the key of the row's weight, which every record must have; None weighs all alike.
    """
    if not isinstance(record, dict):
        raise ValueError(
            f"{source}: expected an object with named fields, found {type(record).__name__}; write each "
            'row as {"question": ..., "answer": ...} (pandas: to_json(..., orient="records"))'
        )
    # Tables give every row the columns of all, as nulls or empty cells: a format that is all null is
    # not there, and one that is all empty only if no other is.
    there = [
        (keys, build)
        for keys, build in FORMATS
        if all(key in record for key in keys) and any(record[key] is not None for key in keys)
    ]
    filled = [(keys, build) for keys, build in there if any(record[key] for key in keys)]
    for keys, build in (filled or there)[:1]:
        row = build(record, source, *keys)
        if weight_column is not None:
            row = replace(row, weight=_weight(record, source, weight_column))
        read = (*keys, *_READ_BESIDE[build], weight_column)
        unread = [
            str(key)
            for key, value in record.items()
            if value not in (None, "", []) and key not in read
        ]
        return replace(row, unread=tuple(unread)) if unread else row
    if {"chosen", "rejected"} <= record.keys():
        raise ValueError(
            f"{source}: chosen and rejected answers are for preference optimization, which is not "
            "supported (see TRL); to train only on the chosen ones, rename chosen to completion, "
            "or to messages if it is a whole conversation"
        )
    if TOKENS_KEY in record:
        raise ValueError(
            f"{source}: {TOKENS_KEY} are tokens already, and rows are read as text; give the text that they "
            "were made from, or train on these rows with fsdp_qlora.integrations.trl.SFTTrainer"
        )
    accepted = "; ".join(" + ".join(keys) for keys, _ in FORMATS)
    raise ValueError(
        f"{source}: the keys {', '.join(map(str, record)) or '(none)'} match no format; rename "
        f"them to one of: {accepted}"
    )


# ---- one builder per format -----------------------------------------------------------------


def _chat(record: dict, source: str, key: str) -> Row:
    return _conversation(record, source, *read_messages(record[key], source, key))


def _conversation(
    record: dict,
    source: str,
    messages: list[dict],
    excluded: frozenset[int],
    notes: list[str],
    asked: int = 0,
) -> Row:
    """The row of a conversation, with what stands beside the turns. asked: turns of the prompt."""
    system = _optional_text(record, source, "system")  # beside the turns in some ShareGPT files
    if system and not any(turn["role"] == "system" for turn in messages):
        messages, asked = [message("system", system), *messages], asked and asked + 1
        excluded = frozenset(turn + 1 for turn in excluded)
    return Row(
        source,
        messages=messages,
        tools=read_tools(record, source),
        excluded=excluded,
        asked=frozenset(range(asked)),
        notes=tuple(notes),
    )


def _prompt(record: dict, source: str, prompt_key: str, answer_key: str) -> Row:
    if record.get("label") is False:  # "unpaired preference" of TRL's formats, linked above
        raise ValueError(
            f"{source}: 'label' is false, which marks a rejected answer (KTO), but training uses "
            "every answer; drop such rows, or the key if it means something else"
        )
    prompt, answer = record[prompt_key], record[answer_key]
    if isinstance(prompt, list):
        if not isinstance(answer, list):
            answer = [message("assistant", _text(record, source, answer_key))]
        asked, off_asked, notes = read_messages(prompt, source, prompt_key)
        answers, off, more_notes = read_messages(answer, source, answer_key)
        excluded = off_asked | {turn + len(asked) for turn in off}
        return _conversation(
            record, source, asked + answers, excluded, notes + more_notes, len(asked)
        )
    asked = _text(record, source, prompt_key)
    return _question_and_answer(
        record, source, asked, _text(record, source, answer_key), asked, "prompt"
    )


def _instruction(record: dict, source: str, instruction_key: str, answer_key: str) -> Row:
    instruction = _text(record, source, instruction_key)
    # "context" is Dolly's name of the input
    extra = _optional_text(record, source, "input") or _optional_text(record, source, "context")
    template = _ALPACA_INPUT_PROMPT if extra else _ALPACA_PROMPT
    asked = f"{instruction}\n\n{extra}" if extra else instruction
    return _question_and_answer(
        record,
        source,
        asked,
        _text(record, source, answer_key),
        template.format(instruction=instruction, input=extra),
        "alpaca",
    )


def _question(record: dict, source: str, question_key: str, answer_key: str) -> Row:
    question = _text(record, source, question_key)
    context = _optional_text(record, source, "context")
    template = _CONTEXT_QUESTION_PROMPT if context else QUESTION_PROMPT
    asked = f"{context}\n\n{question}" if context else question
    return _question_and_answer(
        record,
        source,
        asked,
        _text(record, source, answer_key),
        template.format(context=context, question=question),
        "question",
    )


def _plain_text(record: dict, source: str, key: str) -> Row:
    return Row(source, text=_text(record, source, key))


def _question_and_answer(
    record: dict, source: str, asked: str, answer: str, plain_prompt: str, prompt_format: str
) -> Row:
    messages = [message("user", asked), message("assistant", answer)]
    if system := _optional_text(record, source, "system"):
        messages = [message("system", system), *messages]
        plain_prompt = f"{system}\n\n{plain_prompt}"
    return Row(
        source,
        messages=messages,
        plain_prompt=plain_prompt,
        prompt_format=prompt_format,
        tools=read_tools(record, source),
    )


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

# Keys that each reads beside those.
_READ_BESIDE: dict[Callable[..., Row], tuple[str, ...]] = {
    _chat: ("system", *TOOLS_KEYS),
    _prompt: ("system", "label", *TOOLS_KEYS),
    _instruction: ("system", "input", "context", *TOOLS_KEYS),
    _question: ("system", "context", *TOOLS_KEYS),
    _plain_text: (),
}


def _weight(record: dict, source: str, column: str) -> float:
    """The weight of a record, as fp32 has it; tables hold it as text."""
    if record.get(column) is None:
        raise ValueError(
            f"{source}: '{column}' (--weight_column) is missing; give every row a number of 0 or more"
        )
    value, weight = record[column], -1.0
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError), np.errstate(over="ignore"):
            weight = float(np.float32(float(value)))
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"{source}: '{column}' (--weight_column) is {value!r:.40}; expected a number of 0 or more"
        )
    return weight


def _optional_text(record: dict, source: str, key: str) -> str:
    return "" if record.get(key) is None else _text(record, source, key)


def _text(record: dict, source: str, key: str) -> str:
    return checked_text(record.get(key), source, key)
