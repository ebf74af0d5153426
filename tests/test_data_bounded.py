"""A hostile chat template ends in a counted row or one line, soon, and any other renders as ever."""

import time
from datetime import datetime
from types import SimpleNamespace

import pytest
from transformers.utils import chat_template_utils

from fsdp_qlora.data import (
    ChatTemplate,
    encode_prompt,
    row_from_record,
    template_bounds,
    tokenize_rows,
)
from fsdp_qlora.data.templates import UnusableRow
from tests.patience import patience

from .test_data_messages import HEAD, TAIL, WRITERS, conversation, openai
from .test_data_tokenizers import CHATML, TEMPLATES, chat, make_tokenizer

HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": "{% for a in x %}{% for b in x %}{% for c in x %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "range": "{% for a in range(10**9) %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion in two": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(99) }}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "long text": "{{ 'a' * 10**10 }}",
    "long list": "{{ ([1] * 10**9) | length }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "doubling": "{% set n = namespace(t='ab') %}{% for i in range(99) %}{% set n.t = n.t ~ n.t %}"
    "{% endfor %}",
    "adding": "{% set n = namespace(t='ab') %}{% for i in range(99) %}{% set n.t = n.t + n.t %}"
    "{% endfor %}",
    "padding": "{{ 'a' | center(10000000000) }}",
    "padding in a call": "{{ 'a'.ljust(10000000000) }}",
    "padding in a format": "{{ '%9999999999d' % 1 }}",
    "long output": "{% set t = 'a' * 999999 %}{% for i in range(9999) %}{{ t }}{% endfor %}",
    "division": "{{ 1 / 0 }}",
    "wrong key": "{{ messages[0]['x']['y'] }}",
    "cut off": "{% if",
    "filter": "{{ 1 | no }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "attribute": "{{ ''.__class__.__mro__ }}",
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_drops_its_rows_soon_with_a_short_reason(body):
    tokenizer = make_tokenizer("{% set x = 'a' * 99999 %}" + body)
    started = time.monotonic()
    with pytest.raises(UnusableRow) as caught:
        ChatTemplate(tokenizer).render(chat("Q", "A"))
    assert str(caught.value).startswith("chat template: ") and len(str(caught.value)) < 250
    assert "\n" not in str(caught.value) and time.monotonic() - started < patience(
        60
    )  # a hang, not a speed


def test_a_template_that_runs_out_of_bounds_again_and_again_stops_the_run():
    tokenizer = make_tokenizer(CHATML + HOSTILE["power"])
    rows = [row_from_record({"messages": chat("Q", "A")}, f"f:{i}") for i in range(100)]
    with pytest.raises(ValueError, match="exceeds its limits on row after row"):
        tokenize_rows(rows, tokenizer, context_length=64)


@pytest.mark.parametrize("name", [name for name in TEMPLATES if TEMPLATES[name]])
@pytest.mark.parametrize("prompt", [False, True])
def test_other_templates_render_as_in_transformers(name, prompt):
    tokenizer, messages = make_tokenizer(name), chat("Hello", "I am", "a\n" * 3000, " 日本🙂 ")
    text = ChatTemplate(tokenizer).render(messages, add_generation_prompt=prompt)
    assert text == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )


@pytest.mark.parametrize(
    "template",
    [
        HEAD + WRITERS["items"] + TAIL,
        HEAD + WRITERS["tojson"] + TAIL,
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% if loop.last %}!"
        "{% endif %}{{ loop.length }}{% if loop.index0 == 2 %}{% break %}{% endif %}{% endfor %}",
        "{% set n = namespace(i=0) %}{% for m in messages[::-1] if m.content %}"
        "{% set n.i = n.i + 2 * 3 %}"
        "{{ '%s-%d' % (m.role, n.i) }}{{ m.content.split(' ')[-1] | upper | trim }}"
        "{% else %}none{% endfor %}"
        "{{ messages | map(attribute='role') | join(',') }}{{ tools | length if tools else bos_token }}",
    ],
)
def test_what_templates_use_of_jinja_and_transformers_is_there(template):
    tokenizer = make_tokenizer(template)
    for messages in (conversation(openai({"city": "Oslo", "days": 2})), chat("Hello you", "I am")):
        for tools in (None, [{"type": "function", "function": {"name": "weather"}}]):
            assert ChatTemplate(tokenizer).render(messages, tools) == tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False
            )


def test_a_template_that_writes_the_date_gives_the_same_tokens_on_every_day(monkeypatch):
    """A run that is stopped before midnight has the same rows, and resumes, after it."""
    template = (
        "{%- if strftime_now is defined %}{{ 'Today is ' + strftime_now('%d %b %Y %H:%M') + '\n' }}"
        "{%- endif %}" + CHATML
    )
    tokenizer, messages = make_tokenizer(template), chat("Hello", "I am")
    rows = [row_from_record({"messages": messages}, "f:1")]
    found = []
    for today in (template_bounds.DAY, datetime(2031, 1, 2, 3, 4)):
        monkeypatch.setattr(
            chat_template_utils, "datetime", SimpleNamespace(now=lambda today=today: today)
        )
        plain = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = tokenize_rows(rows, tokenizer, context_length=512)
        found.append((ChatTemplate(tokenizer).render(messages) == plain, tokens.digest()))
        assert "the chat template asks for the date" in tokens.report.format_report()
    assert found == [(True, tokens.digest()), (False, tokens.digest())]
    asked = encode_prompt(rows[0], tokenizer)
    assert tokens.input_ids[: len(asked)].tolist() == asked
    undated = tokenize_rows(rows, make_tokenizer("chatml"), context_length=512)
    assert "date" not in undated.report.format_report()
