"""Rows as token ids, with an exact mark on each token that the model must learn to write.

The marks come from positions in the rendered text, never from token ids: a mask made by comparing
ids with the pad id also hides the real EOS, and the tuned model never stops; a mask made by
searching for a marker breaks where the marker tokenises differently or stands in a user's text.

For each assistant turn the conversation is rendered once more with a sentinel in place of that
turn's content. What is the same before and after the sentinel is the template's; what lies between
is the model's, plus the token that closes the turn.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from .conversation_warnings import empty_answers, left_out, untrained_reasoning
from .formats import Row
from .marked_tokens import Encoded, Rendered, mark_tokens, missing_prefix, prefix_ids, tokenize
from .messages import check_encodable
from .template_bounds import DAY
from .templates import CUT, ChatTemplate, UnusableRow, sentinel

TRAIN_ON = ("completion", "all")


def encode_rows(
    rows: Sequence[Row], chat: ChatTemplate, train_on: str = "completion"
) -> Iterator[Encoded | UnusableRow]:
    """One result per row, in order; rows are tokenised together, which uses all cores."""
    if train_on not in TRAIN_ON:
        raise ValueError(f"--train_on {train_on}: choose one of {', '.join(TRAIN_ON)}")
    rendered = [_render_or_reason(row, chat) for row in rows]
    usable = [item for item in rendered if isinstance(item, Rendered)]
    tokens = tokenize([item.text for item in usable], chat.tokenizer)
    prefix = prefix_ids(chat.tokenizer)
    for row, item in zip(rows, rendered, strict=True):
        if isinstance(item, UnusableRow):
            yield item
            continue
        encoded = mark_tokens(item, *next(tokens), prefix, chat, train_on)
        encoded.notes, encoded.unread = (*row.notes, *item.notes), row.unread
        encoded.weight = row.weight
        if chat.is_fallback:
            encoded.prompt_format = "text" if row.text else row.prompt_format or "roles"
        yield encoded


def encode_prompt(row: Row | list[dict], tokenizer) -> list[int]:
    """Token ids that ask for the answer of `row`, exactly as they stand before it in training.

    row: a Row whose last assistant turn (if it is the last message) is left out, or messages.
    """
    chat = ChatTemplate(tokenizer)
    if isinstance(row, list):
        row = Row("prompt", messages=row)
    if row.text is not None:
        text = row.text
    elif (chat.is_fallback or _is_written(row, chat)) and row.plain_prompt is not None:
        text = row.plain_prompt
    else:
        text = _render_prompt(row, chat)
    pieces = list(tokenize(text.split(CUT), tokenizer))
    ids = [token for ids, _ in pieces for token in ids]
    return missing_prefix(ids, prefix_ids(tokenizer)) + ids


def stop_token_ids(tokenizer) -> list[int]:
    """Ids at which generation must stop: the EOS, and what closes a turn of the chat template."""
    tokens = [tokenizer.eos_token, *ChatTemplate(tokenizer).end_tokens]
    return sorted({tokenizer.convert_tokens_to_ids(token) for token in tokens if token})


# ---- text and spans -------------------------------------------------------------------------


def _render_row(row: Row, chat: ChatTemplate) -> Rendered:
    """The text of a row and what of it is the model's; UnusableRow says why there is none."""
    if row.text is not None:
        if not row.text:
            raise UnusableRow("empty text")
        return Rendered(row.text, [(0, len(row.text))], add_eos=True, notes=_kept(row.text, chat))
    if chat.is_fallback and row.plain_prompt is not None:
        text = row.plain_prompt + row.messages[-1]["content"]
        notes = [
            *_kept(text, chat),
            *empty_answers(row.messages, set()),
            *(["tools are left out, as there is no chat template"] if row.tools else []),
        ]
        return Rendered(text, [(len(row.plain_prompt), len(text))], add_eos=True, notes=notes)
    return _render_written(row, chat) if _is_written(row, chat) else _render_chat(row, chat)


def _is_written(row: Row, chat: ChatTemplate) -> bool:
    """Whether the prompt of a row is in the chat template already, so that it must not be written again."""
    return (
        row.prompt_format == "prompt"
        and len(row.messages) == 2
        and not row.tools
        and chat.has_written(row.plain_prompt)
    )


def _render_written(row: Row, chat: ChatTemplate) -> Rendered:
    """A prompt that is in the chat template, as it is, with its answer closed as the template does."""
    answer = row.messages[-1]["content"]
    closing = "" if answer.rstrip().endswith(chat.end_tokens) else "".join(chat.closings[:1])
    start, text = len(row.plain_prompt), f"{row.plain_prompt}{answer}{closing}"
    note = "prompts are in the chat template already, and stay as they are"
    return Rendered(text, [(start, len(text.rstrip()))], add_eos=not chat.closings, notes=[note])


def _kept(text: str, chat: ChatTemplate) -> list[str]:
    """A line on control tokens in the midst of a plain text, which stay what they are."""
    spelled = [token for token in chat.special_tokens if token in text.removesuffix(token)]
    return (
        [f"the text holds {', '.join(sorted(spelled))}, kept as control tokens"] if spelled else []
    )


def _render_or_reason(row: Row, chat: ChatTemplate) -> Rendered | UnusableRow:
    if not row.weight:
        return UnusableRow("weight 0 in --weight_column")
    try:
        rendered = _render_row(row, chat)
    except UnusableRow as reason:
        return reason
    check_encodable(rendered.text, f"{row.source}: its text in the chat template")
    return rendered


def _render_chat(row: Row, chat: ChatTemplate) -> Rendered:
    tools = chat.shield(row.tools)
    messages, text = chat.fit(chat.shield(row.messages), tools)
    first = len(row.messages) - len(messages)  # 1 where the system message is folded into the next
    excluded = {turn - first for turn in row.excluded}
    untrained = excluded | {turn - first for turn in row.asked}
    spans = {
        turn: span
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
        if (span := _turn_span(messages, turn, text, tools, chat)) is not None
    }
    ends_open = bool(spans) and messages[-1]["role"] == "assistant" and not chat.closings
    if ends_open:
        text = text[: spans[max(spans)][1]]
    notes = [
        *left_out(messages, tools, text, chat),
        *empty_answers(messages, untrained),
        *untrained_reasoning(messages, spans, text, untrained),
        *_spelled_tokens([*row.messages, *(row.tools or [])], chat),
        *(
            [f"the chat template asks for the date, and gets {DAY:%d %b %Y}"]
            if chat.is_dated
            else []
        ),
    ]
    cuts = _cuts(text)
    trained, not_trained = (
        [
            tuple(place - len(CUT) * bisect_left(cuts, place) for place in span)
            for turn, span in spans.items()
            if turn in turns
        ]
        for turns in (spans.keys() - untrained, excluded)
    )
    return Rendered(
        text.replace(CUT, ""),
        trained,
        folded_system=first > 0,
        excluded=not_trained,
        add_eos=ends_open and max(spans) not in untrained,
        notes=notes,
        cuts=[place - len(CUT) * number for number, place in enumerate(cuts)],
    )


def _cuts(text: str) -> list[int]:
    """Where CUT stands in `text`."""
    found, place = [], text.find(CUT)
    while place >= 0:
        found.append(place)
        place = text.find(CUT, place + len(CUT))
    return found


def _spelled_tokens(given: list[dict], chat: ChatTemplate) -> list[str]:
    """Lines on special tokens that turns and tools spell: as text where the text is cut, else as they are."""
    contents = "\n".join(json.dumps(part, ensure_ascii=False) for part in given)
    spelled = sorted(token for token in chat.special_tokens if token in contents)
    if not spelled:
        return []
    as_text = [token for token in spelled if token in chat.control_tokens and not chat.adds_space]
    kept = [token for token in spelled if token not in as_text]
    return [
        f"contents spell {', '.join(tokens)}, {what}"
        for tokens, what in (
            (as_text, "which is trained as text, not as a control token"),
            (kept, "which stays a special token there"),
        )
        if tokens
    ]


def _render_prompt(row: Row, chat: ChatTemplate) -> str:
    """The text before an answer, with a CUT where it is to be tokenised apart."""
    asked = row.messages
    if asked and asked[-1]["role"] == "assistant":
        asked = asked[:-1]
    if chat.asks_with:  # BOS is added as for rows: some tokenizers see a word behind it otherwise
        return chat.render(asked, template=chat.asks_with).removeprefix(
            chat.tokenizer.bos_token or ""
        )
    tools = chat.shield(row.tools)
    messages, _ = chat.fit(chat.shield(asked), tools)
    return chat.render(messages, tools, add_generation_prompt=True)


def _turn_span(
    messages: list[dict], turn: int, text: str, tools: list | None, chat: ChatTemplate
) -> tuple[int, int] | None:
    """Where `text` holds what the model wrote as messages[turn]; None if it was left out."""
    if messages[turn].get("tool_calls"):
        return _tool_call_span(messages, turn, text, tools, chat)
    around = _around_content(messages, turn, tools, chat)
    if around is None:
        return None
    before, after = around
    if not (text.startswith(before) and text.endswith(after)):
        raise UnusableRow("the chat template changes other turns depending on an answer")
    return len(before), _end_of_turn(text, max(len(before), len(text) - len(after)), chat)


def _around_content(
    messages: list[dict], turn: int, tools: list | None, chat: ChatTemplate
) -> tuple[str, str] | None:
    """The text before what the model writes in this turn, and the text after its content."""
    probe = chat.render(
        [*messages[:turn], {**messages[turn], "content": sentinel(turn)}, *messages[turn + 1 :]],
        tools,
    )
    copies = probe.count(sentinel(turn))
    if copies == 0:
        return None
    if copies > 1:
        raise UnusableRow("the chat template writes an answer more than once")
    before, _, after = probe.partition(sentinel(turn))
    return before.removesuffix(chat.lead(messages, turn, tools)), after


def _tool_call_span(
    messages: list[dict], turn: int, text: str, tools: list | None, chat: ChatTemplate
) -> tuple[int, int]:
    """The same for a turn that calls tools, where the template may write no content at all."""
    before = chat.render(messages[:turn], tools, add_generation_prompt=True)
    if not text.startswith(before):
        before, _ = _around_content(messages, turn, tools, chat) or ("", "")
    ends = [
        found + len(token)
        for token in chat.end_tokens
        if (found := text.find(token, len(before))) >= 0
    ]
    if not before or not text.startswith(before) or not ends:
        raise UnusableRow("tool calls can't be told apart in the chat template's text")
    names = [call.get("function", call).get("name", "") for call in messages[turn]["tool_calls"]]
    if any(name not in text[len(before) : min(ends)] for name in names):
        raise UnusableRow("the chat template leaves out tool calls")
    return len(before), min(ends)


def _end_of_turn(text: str, end: int, chat: ChatTemplate) -> int:
    """`end` of the content, moved past what closes the turn."""
    for closing in chat.closings or (chat.plain_closing,):
        if text.startswith(closing, end):
            return end + len(closing)
    return end
