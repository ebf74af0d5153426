"""Facts about chat templates: found by rendering, stored for the families whose models ship them."""

import json

import pytest

from .chat_templates import facts_of, of_family, stored_facts
from .families import EVERY_FAMILY
from .template_sources import SOURCES, text_of

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


IN_PARTS = """{% for m in messages %}{{ m.content[0]['text'] + '\\n' }}{% endfor %}"""


@pytest.mark.parametrize(
    "template,facts",
    [
        (IN_PARTS, dict(tools="no definitions, no calls", besides="texts are given in parts")),
        (LAST_THOUGHT, dict(thoughts="the last answer only", inline="cut")),
        (LAST_THOUGHT, dict(besides="answers are stripped", tools="no definitions, no calls")),
        (PYTHON_CALLS, dict(thoughts="never", inline="kept", tools="written", arguments="objects")),
        (STRICT, dict(thoughts="every answer (field `thinking`)", tools="not written")),
        (STRICT, dict(besides="a system message is refused")),
        (
            STRICT.replace("m.thinking", "m.thought"),
            dict(thoughts="every answer (field `thought`)"),
        ),
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


TWO_MODELS = [
    {"model_name": "other", "chat_template": "wrong"},
    {"model_name": "m", "chat_template": STRICT},
]
HISTORY = dict(status="ok", _templates=[dict(template="older"), dict(template=STRICT)])


@pytest.mark.parametrize(
    "source,file,template",
    [
        ("llama.cpp", STRICT, STRICT),
        ("axolotl", STRICT, STRICT),
        ("openvino.genai", f"def configs():\n return {{'m': {TWO_MODELS[1]}, 'n': {{}}}}", STRICT),
        ("xinference", json.dumps(TWO_MODELS), STRICT),
        ("chat-template-drift", json.dumps(HISTORY), STRICT),
        ("MiniMax-M1", json.dumps(dict(chat_template=STRICT)), STRICT),
        ("chat-template-drift", json.dumps(dict(status="no_template_in_any_revision")), None),
    ],
)
def test_a_template_is_found_in_a_checkout_of_its_source(tmp_path, source, file, template):
    path = tmp_path / SOURCES[source].path.format("m")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file)
    assert text_of({"from": source, "template": "m"}, tmp_path) == template


def test_each_family_has_one_template_or_none_or_is_not_known():
    named = [family for row in stored_facts() for family in row["families"]]
    assert len(named) == len(set(named)) and set(named) <= EVERY_FAMILY.keys()
    assert of_family("Trinity (Arcee)") == "not known"
    assert of_family("OPT") == "none"
    assert all(
        row.items() >= facts_of(None).items() for row in stored_facts() if not row["thoughts"]
    )
    assert of_family("Qwen3") == (
        "thoughts: the last answer only; tools: written (arguments: either)"
    )
