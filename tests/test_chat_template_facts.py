"""Facts about chat templates: found by rendering, stored for the families whose models ship them."""

import pytest

from .chat_templates import facts_of, of_family, stored_facts, text_of
from .families import EVERY_FAMILY

LAST_THOUGHT = """{% for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content.split('</think>')[-1] | trim }}{% endfor %}"""
PYTHON_CALLS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }}({% for k, v in
call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}"""
STRICT = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}
{%- if m.role != 'tool' %}<|{{ m.role }}|>{{ m.thinking or '' }}{{ m.content }}{% endif %}{% endfor %}"""
PREAMBLE = """You are a helpful model of nobody. {% for m in messages %}{% if m.role != 'system' %}
{{- m.content }}{{ (m.tool_calls[0].function.arguments) if m.tool_calls }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    "template,facts",
    [
        (LAST_THOUGHT, dict(thoughts="the last answer only", inline="cut")),
        (LAST_THOUGHT, dict(besides="answers are stripped", tools="no definitions, no calls")),
        (PYTHON_CALLS, dict(thoughts="never", inline="kept", tools="written", arguments="objects")),
        (STRICT, dict(thoughts="every answer (field `thinking`)", tools="not written")),
        (STRICT, dict(besides="a system message is refused")),
        (PREAMBLE, dict(tools="no definitions", arguments="either")),
        (
            PREAMBLE,
            dict(
                besides="a system message is left out; "
                "a system message is made up where there is none"
            ),
        ),
    ],
)
def test_facts_are_what_a_template_does(template, facts):
    assert facts_of(template).items() >= facts.items()


@pytest.mark.parametrize(
    "row", [r for r in stored_facts() if r["from"] == "trl"], ids=lambda r: r["model"]
)
def test_stored_facts_are_those_of_the_templates_in_trl(row):
    assert row.items() >= facts_of(text_of(row)).items()


def test_each_family_has_one_template_or_is_not_known():
    named = [family for row in stored_facts() for family in row["families"]]
    assert len(named) == len(set(named)) and set(named) <= EVERY_FAMILY.keys()
    assert of_family("OPT") == "not known"
    assert of_family("Qwen3") == (
        "thoughts: the last answer only; tools: written (arguments: either)"
    )
