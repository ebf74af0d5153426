"""Conversations as text: the tokenizer's chat template, and what must be known about it.

A template is a Jinja program that may strip, reorder, rewrite or refuse turns. Nothing here reads
its source; everything is learned by rendering. What a model must write of a turn begins where the
generation prompt ends and ends with the token that closes the turn, so those two are learned:

- `closings`: the text that ends an assistant turn ("<|im_end|>"), often not the tokenizer's EOS;
- `leads`: the text that the model writes before the content (Llama-2's space, an empty <think>).

A tokenizer without a template gets FALLBACK_TEMPLATE, plain "role: content" lines.
"""

from __future__ import annotations

import json
import re
from functools import cached_property

from . import template_bounds
from .message_forms import (
    arguments_of,
    fold_system,
    in_parts,
    with_reasoning_as,
    with_text_arguments,
)
from .messages import REASONING

_OVERRUNS = 20  # of a template's bounds, before the run stops
_REASON_LENGTH = 200

# Every assistant turn ends with EOS, so that the model learns to stop at each.
FALLBACK_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if not loop.first %}{{ '\\n' }}{% endif -%}"
    "{{ message['role'] + ': ' + message['content'] }}"
    "{%- if message['role'] == 'assistant' %}{{ eos_token }}{% endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '\\nassistant:' }}{% endif -%}"
)

# Begins a template that this package gave a tokenizer without one (prompt_format.py).
MADE_HERE = "{#- how fsdp_qlora asked in training -#}"

# Llama 3.1 ends a call of a built-in tool with this token in place of <|eot_id|>.
_TOOL_CALL_END = "<|eom_id|>"


class UnusableRow(ValueError):
    """A row that cannot be trained on; the message is the reason, as counted in the report."""


class ChatTemplate:
    """The chat template of a tokenizer, with what was learned about it."""

    def __init__(self, tokenizer):
        if not tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no tokenizer.json, "
                "which is needed to find the answers' tokens exactly; convert it with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...) on a recent transformers"
            )
        self.tokenizer = tokenizer
        given = tokenizer.chat_template
        made_here = isinstance(given, str) and given.startswith(MADE_HERE)
        self.template = None if given and not made_here else FALLBACK_TEMPLATE
        # What asks in the form of rows that no template rendered.
        self.asks_with = given if made_here and not given.endswith(FALLBACK_TEMPLATE) else None
        self.overruns, self.is_dated = 0, False
        self._leads: dict[tuple[str, ...], list[str]] = {}

    @property
    def is_fallback(self) -> bool:
        return self.template is not None

    def render(
        self,
        messages: list[dict],
        tools: list | None = None,
        add_generation_prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Text of a conversation; UnusableRow if the template refuses it."""
        if not messages:
            raise UnusableRow("no messages")
        if self._takes_parts:
            messages = [in_parts(turn) for turn in messages]
        return self._render(messages, tools, add_generation_prompt, template)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template knows contents as lists of parts alone, as MiniMax M1's."""
        asked = {"role": "user", "content": sentinel(0)}
        for turn, written in ((asked, False), (in_parts(asked), True)):
            try:
                text = self._render([turn], None, False, None)
            except UnusableRow:
                text = ""
            if (sentinel(0) in text) != written:
                return False
        return "'type'" not in text  # else it writes any value as Python does

    def _render(self, messages: list[dict], tools, add_generation_prompt, template) -> str:
        """`render` of messages in the form that the template takes."""
        source = self.tokenizer.get_chat_template(template or self.template, tools)
        try:
            text = template_bounds.render(
                source,
                **self.tokenizer.special_tokens_map,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
            self.is_dated = self.is_dated or template_bounds.is_dated()
            return text.replace(ESCAPED_CUT, "")
        except Exception as error:  # a program of others may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:_REASON_LENGTH]
            if isinstance(error, template_bounds.OverBudget):
                self._count_overrun(reason)
            raise UnusableRow(f"chat template: {reason}") from None

    def _count_overrun(self, reason: str):
        """Stop at a template that runs out of bounds again and again: each time takes long."""
        self.overruns += 1
        if self.overruns > _OVERRUNS:
            raise ValueError(
                f"the chat template of --model_name exceeds its limits on row after row ({reason}); use "
                "another tokenizer or template"
            ) from None

    def fit(self, messages: list[dict], tools: list | None = None) -> tuple[list[dict], str]:
        """The messages as the template takes them, and their text.

        A leading system message that the template refuses, or silently leaves out, is folded into
        the first user turn. Reasoning gets the name that the template knows, and arguments of tool
        calls are JSON text for a template that can't write objects. Any other refusal is UnusableRow
        with the template's own message.
        """
        messages = [
            {**turn, "content": turn.get("content") or ""}
            for turn in self._with_known_reasoning(messages)
        ]
        try:
            fitted, text = self._folded(messages, tools)
            if not _writes_python(messages, text):
                return fitted, text
        except UnusableRow:
            if not any(turn.get("tool_calls") for turn in messages):
                raise
        return self._folded(with_text_arguments(messages), tools)

    def _folded(self, messages: list[dict], tools: list | None) -> tuple[list[dict], str]:
        folded = fold_system(messages)
        try:
            text = self.render(messages, tools)
        except UnusableRow:
            if folded is None:
                raise
            return folded, self.render(folded, tools)
        if folded is not None and messages[0]["content"].strip() not in text:
            return folded, self.render(folded, tools)
        return messages, text

    def _with_known_reasoning(self, messages: list[dict]) -> list[dict]:
        if not any(key in turn for turn in messages for key in REASONING):
            return messages
        return [with_reasoning_as(turn, self._reasoning_key) for turn in messages]

    @cached_property
    def _reasoning_key(self) -> str | None:
        """The name under which the template writes reasoning; None if it writes none."""
        for key in REASONING:
            asked = {"role": "user", "content": sentinel(0)}
            answer = {"role": "assistant", "content": sentinel(1), key: sentinel(2)}
            try:
                if sentinel(2) in self.render([asked, answer]):
                    return key
            except UnusableRow:
                continue
        return None

    def has_written(self, prompt: str) -> bool:
        """Whether a prompt ends with what this template asks for an answer with."""
        return bool(self._asking) and prompt.rstrip().endswith(self._asking)

    @cached_property
    def _asking(self) -> str:
        """What stands behind the last question; empty if no control token is in it."""
        if self.is_fallback:
            return ""
        try:
            asked = self.render([dict(role="user", content=sentinel(0))], None, True)
        except UnusableRow:
            return ""
        behind = asked.partition(sentinel(0))[2].strip()
        return behind if any(token in behind for token in self.special_tokens) else ""

    # ---- control tokens in contents ----

    @cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """What shapes a conversation: tokens that the template writes around turns, BOS, EOS and pad."""
        tokenizer = self.tokenizer
        named = {
            str(t) for t in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) if t
        }
        roles = ("user", "assistant", "user", "assistant", "user")
        turns = [{"role": role, "content": sentinel(turn)} for turn, role in enumerate(roles)]
        try:
            text = self.render(turns, add_generation_prompt=True)
        except UnusableRow:
            text = "".join(self.closings)
        return tuple(named | set(self.end_tokens) | {t for t in self.special_tokens if t in text})

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Every special token, as text."""
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple(
            {*self.tokenizer.all_special_tokens, *(str(t) for t in added if t.special)} - {""}
        )

    @cached_property
    def _spelled(self) -> re.Pattern | None:
        longest_first = sorted(
            (t for t in self.control_tokens if len(t) > 1), key=len, reverse=True
        )
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def shield(self, given):
        """Messages or tools with a CUT inside each control token that a text in them spells, at any depth.

        Such a token would end an answer in its middle, or forge a turn. Where text is cut it is
        tokenised apart, so that the control token is not seen.
        """
        if self._spelled is None or self.adds_space:
            return given
        if isinstance(given, dict):
            return {self.shield(key): self.shield(value) for key, value in given.items()}
        if isinstance(given, list):
            return [self.shield(part) for part in given]
        if not isinstance(given, str) or CUT in given:
            return given
        return self._spelled.sub(lambda found: found[0][0] + CUT + found[0][1:], given)

    @cached_property
    def adds_space(self) -> bool:
        """Whether every text gets a space in front (SentencePiece), which cutting would multiply."""
        return self.tokenizer.tokenize("a")[0][0] in "▁Ġ"

    def lead(self, messages: list[dict], turn: int, tools: list | None = None) -> str:
        """What stands between the generation prompt and the content of messages[turn]."""
        plain = tools is None and all(len(message) == 2 for message in messages)
        if not plain:
            return self._find_leads(messages, tools)[turn]
        roles = tuple(message["role"] for message in messages)
        if roles not in self._leads:
            self._leads[roles] = self._find_leads(messages)
        return self._leads[roles][turn]

    def _find_leads(self, messages: list[dict], tools: list | None = None) -> list[str]:
        blank = [{**message, "content": sentinel(turn)} for turn, message in enumerate(messages)]
        text = self.render(blank, tools)
        return [
            self._find_lead(blank, turn, text, tools) if message["role"] == "assistant" else ""
            for turn, message in enumerate(messages)
        ]

    def _find_lead(self, blank: list[dict], turn: int, text: str, tools: list | None) -> str:
        try:
            prompt = self.render(blank[:turn], tools, add_generation_prompt=True)
        except UnusableRow:
            return ""
        # Not a prefix where a template writes old turns otherwise than it prompts for new ones.
        if not text.startswith(prompt):
            return ""
        before, found, _ = text[len(prompt) :].partition(sentinel(turn))
        return before if found else ""

    @cached_property
    def closings(self) -> tuple[str, ...]:
        """Texts that may close an assistant turn, each ending with a token of its own.

        Two, for templates that close the last turn otherwise (<|return|> beside <|end|>). Empty if
        nothing after an answer is a token of its own: then EOS has to be added.
        """
        last, middle = self._tails
        closing = self._up_to_first_token(last)
        if closing is None:
            return ()
        return tuple({closing: None, self._up_to_first_token(middle) or closing: None})

    @property
    def plain_closing(self) -> str:
        """What follows the last answer, for templates without an end-of-turn token."""
        return self._tails[0]

    @property
    def end_tokens(self) -> tuple[str, ...]:
        """The end-of-turn tokens of `closings`, and that of a tool call if there is one."""
        ends = [self._first_token(closing)[1] for closing in self.closings]
        if ends and _TOOL_CALL_END in self._own_tokens:
            ends.append(_TOOL_CALL_END)
        return tuple(ends)

    @cached_property
    def _tails(self) -> tuple[str, str]:
        """The text after an answer at the end of a conversation, and in the middle of one."""
        roles = ("user", "assistant", "user", "assistant")
        messages = [{"role": role, "content": sentinel(turn)} for turn, role in enumerate(roles)]
        try:
            last = self.render(messages[:2]).partition(sentinel(1))[2]
            middle = self.render(messages).partition(sentinel(1))[2].partition(sentinel(2))[0]
        except UnusableRow:
            return "", ""
        return last, middle

    @cached_property
    def _own_tokens(self) -> list[str]:
        """Strings that are one token wherever they stand; not the runs of spaces of some models."""
        tokenizer = self.tokenizer
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        return [token for token in {*added, *tokenizer.all_special_tokens} if token.strip()]

    def _first_token(self, text: str) -> tuple[int, str] | None:
        """Position and string of the first token of its own in `text`; the longer one at a tie."""
        found = [
            (text.find(token), -len(token), token) for token in self._own_tokens if token in text
        ]
        if not found:
            return None
        position, _, token = min(found)
        return position, token

    def _up_to_first_token(self, text: str) -> str | None:
        found = self._first_token(text)
        return None if found is None else text[: found[0] + len(found[1])]


CUT = "\ue0f0CUT\ue0f1"  # as `sentinel`, to mark a place in a text
# Where a template writes an object as Python does: no place to cut at.
ESCAPED_CUT = repr(CUT)[1:-1]


def sentinel(turn: int) -> str:
    """A content that no data hold and no template alters: private-use characters, no spaces."""
    return f"\ue0f0TURN{turn}\ue0f1"


def _writes_python(messages: list[dict], text: str) -> bool:
    """Whether `text` has the arguments of a tool call as Python writes a dict, and not as JSON."""
    return any(
        str(arguments).replace(ESCAPED_CUT, "") in text
        and json.dumps(arguments, ensure_ascii=False) not in text
        for arguments in arguments_of(messages)
    )
