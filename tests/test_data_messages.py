"""Rows in the dialects of data sets have the text of the same row in the plain form.

The reference is transformers' own rendering of OpenAI's form with arguments as objects, or the same row
read from JSON lines.
"""

import json
import re

import datasets
import pyarrow
import pyarrow.parquet as parquet
import pytest

from fsdp_qlora.data import ChatTemplate, encode_prompt, read_rows, row_from_record, tokenize_rows
from fsdp_qlora.data.masking import _render_row, encode_rows
from fsdp_qlora.data.templates import UnusableRow

from .test_data_tokenizers import CHATML, make_tokenizer, trained_text

HEAD = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
)
TAIL = (
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# How templates write the arguments of a call.
WRITERS = {
    "tojson": "{{ c.function.arguments | tojson }}",
    "items": "{% for k, v in c.function.arguments | items %}<{{ k }}={{ v }}>{% endfor %}",
    "whole call": "{{ c.function | tojson }}",
    "either": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}",
}
# Templates for arguments that are text: they break, or write Python, where these are objects.
TEXT_WRITERS = {
    "joined": "{{ 'json: ' + c.function.arguments }}",
    "as it is": "{{ c.function.arguments }}",
}

ARGUMENTS = {"city": "Oslo", "days": 2, "units": {"wind": "m/s"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def conversation(call: dict) -> list[dict]:
    return [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", **call},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]


def openai(arguments) -> dict:
    function = {"name": "weather", "arguments": arguments}
    return {"tool_calls": [{"type": "function", "function": function}]}


def text_of(record: dict, template: str) -> str:
    return _render_row(row_from_record(record, "row"), ChatTemplate(make_tokenizer(template))).text


def reference(template: str, messages: list[dict], tools=None) -> str:
    return make_tokenizer(template).apply_chat_template(messages, tools=tools, tokenize=False)


def trained(record: dict, template: str = CHATML, train_on: str = "completion") -> str:
    tokenizer = make_tokenizer(template)
    [encoded] = encode_rows([row_from_record(record, "row")], ChatTemplate(tokenizer), train_on)
    if isinstance(encoded, UnusableRow):
        raise encoded
    return trained_text(encoded, tokenizer)


# ---- tool calls --------------------------------------------------------------------------------

[CALL] = openai(ARGUMENTS)["tool_calls"]
CALLS = {
    "object": openai(ARGUMENTS),
    "JSON text": openai(json.dumps(ARGUMENTS)),
    "JSON text in another layout": openai(json.dumps(ARGUMENTS, indent=2)),
    "all calls as JSON text": {"tool_calls": json.dumps([CALL])},
    "nulls beside it": {"tool_calls": [{**CALL, "id": None, "index": None}]},
    "the older function_call": {
        "function_call": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}
    },
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_written_as_an_object_however_its_arguments_are_given(writer, call):
    template = HEAD + WRITERS[writer] + TAIL
    wanted = reference(template, conversation(openai(ARGUMENTS)))
    assert text_of({"messages": conversation(CALLS[call])}, template) == wanted
    assert "It rains." in trained({"messages": conversation(CALLS[call])}, template)


@pytest.mark.parametrize("writer", TEXT_WRITERS)
@pytest.mark.parametrize("call", CALLS)
def test_a_template_for_arguments_as_text_gets_json(writer, call):
    template = HEAD + TEXT_WRITERS[writer] + TAIL
    text = text_of({"messages": conversation(CALLS[call])}, template)
    assert text == reference(template, conversation(openai(json.dumps(ARGUMENTS))))


def test_a_call_without_arguments_has_an_empty_object():
    template = HEAD + WRITERS["tojson"] + TAIL
    for arguments in ("", "{}", {}):
        assert "<tool_call>weather {}</tool_call>" in text_of(
            {"messages": conversation(openai(arguments))}, template
        )


@pytest.mark.parametrize("arguments", ['{"city": "Os', "Oslo", "[1]", 7, [1], "[" * 100_000])
def test_arguments_that_are_no_object_name_the_place(arguments):
    place = r"f:3: messages\[1\]: tool_calls\[0\]: "
    with pytest.raises(ValueError, match=f"{place}'arguments' is .*expected"):
        row_from_record({"messages": conversation(openai(arguments))}, "f:3")


# ---- nulls -------------------------------------------------------------------------------------


def use(tool: str, schema: dict, arguments: dict, **more) -> dict:
    """A row that calls `tool`."""
    parameters = {"type": "object", "properties": schema}
    return {
        "messages": [
            {"role": "user", "content": f"Call {tool}"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "function": {"name": tool, "arguments": arguments}}
                ],
            },
            {"role": "assistant", "content": "done", **more},
        ],
        "tools": [{"type": "function", "function": {"name": tool, "parameters": parameters}}],
    }


TABLES = {
    "other parameters": [
        use("weather", {"city": {"type": "string"}}, {"city": "Oslo"}),
        use("clock", {"zone": {"type": "string"}}, {"zone": "CET"}),
    ],
    "parameters in parameters": [
        use(
            "go",
            {"to": {"type": "object", "properties": {"x": {"type": "number"}}}},
            {"to": {"x": 1.0}},
        ),
        use(
            "see",
            {"at": {"type": "array", "items": {"type": "string", "enum": ["a", None]}}},
            {"at": ["a", "b"]},
        ),
    ],
    "no parameters": [
        use("stop", {}, {}),
        use("clock", {"zone": {"type": "string"}}, {"zone": "CET"}),
    ],
    "lists of objects": [
        use("add", {"items": {"type": "array"}}, {"items": [{"a": 1}, {"b": 2}]}),
        use("drop", {"items": {"type": "array"}}, {"items": [{"c": 3}]}),
    ],
    "a field of few turns": [
        use("a", {"p": {"type": "string"}}, {"p": "1"}, name="Ann"),
        use("b", {"p": {"type": "string"}}, {"p": "2"}),
    ],
    "columns of other formats": [
        {"question": "Q", "answer": "A"},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
    ],
}


@pytest.mark.parametrize("records", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("table", ["parquet", "datasets on disk"])
def test_rows_of_a_table_have_the_text_of_the_same_rows_in_json_lines(tmp_path, records, table):
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, records)))
    path = tmp_path / "rows.parquet"
    columns = {key: None for record in records for key in record}
    arrow = pyarrow.Table.from_pylist([{**columns, **record} for record in records])
    if table == "parquet":
        parquet.write_table(arrow, path)
    else:
        path = tmp_path / "saved"
        datasets.Dataset(arrow).save_to_disk(str(path))
    chat = ChatTemplate(make_tokenizer(HEAD + WRITERS["tojson"] + TAIL))
    plain, read = ([_render_row(row, chat) for row in read_rows(place)] for place in (lines, path))
    assert [row.text for row in read] == [row.text for row in plain]
    assert [row.spans for row in read] == [row.spans for row in plain]
    assert not any("None" in row.text for row in read)


def test_a_map_column_is_an_object(tmp_path):
    text = pyarrow.string()
    call = pyarrow.struct({"name": text, "arguments": pyarrow.map_(text, text)})
    calls = pyarrow.list_(pyarrow.struct({"function": call}))
    turn = pyarrow.struct({"role": text, "tool_calls": calls})
    turns = [
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
        }
    ]
    table = pyarrow.table({"messages": pyarrow.array([turns], pyarrow.list_(turn))})
    parquet.write_table(table, tmp_path / "rows.parquet")
    [row] = read_rows(tmp_path / "rows.parquet")
    assert row.messages[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


def test_nulls_that_an_author_wrote_in_json_lines_stay():
    record = {"messages": conversation(openai({"city": None}))}
    assert '{"city": null}' in text_of(record, HEAD + WRITERS["tojson"] + TAIL)


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None},
        {},
        {"content": "", "name": None, "tool_calls": None},
        {"content": None, "refusal": None, "audio": None, "function_call": None},
    ],
)
def test_null_content_equals_empty_content_and_null_fields_are_absent(turn):
    naive = CHATML.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{% if 'name' in m %}BAD{% endif %}"
    )

    def row(turn):
        return {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", **turn}]}

    assert text_of(row(turn), naive) == text_of(row({"content": ""}), naive)


# ---- turns that are not trained -----------------------------------------------------------------

SWITCHED_OFF = [
    ("weight", 0),
    ("weight", 0.0),
    ("train", False),
    ("trainable", False),
    ("loss", 0),
    ("loss", False),
    ("loss_mask", 0),
    ("step_loss_mask", 0),
    ("trained", "false"),
    ("training", False),
    ("train_on_turn", False),
    ("calculate_loss", 0),
    ("loss_scale", 0.0),
]


def with_wrong_answer(key, value) -> list[dict]:
    return [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "WRONG", key: value},
        {"role": "user", "content": "Check."},
        {"role": "assistant", "content": "4"},
    ]


@pytest.mark.parametrize("key, off", SWITCHED_OFF)
def test_an_answer_that_its_author_took_out_is_context_only(key, off):
    messages, on = with_wrong_answer(key, off), type(off)(1) if not isinstance(off, str) else "true"
    plain = text_of({"messages": with_wrong_answer("content", "WRONG")}, CHATML)
    assert text_of({"messages": messages}, CHATML) == plain
    assert trained({"messages": messages}) == "4<|im_end|>"
    assert trained({"messages": with_wrong_answer(key, on)}) == "WRONG<|im_end|>4<|im_end|>"
    assert "WRONG" not in trained({"messages": messages}, train_on="all")
    assert "2+2?" in trained({"messages": messages}, train_on="all")
    speakers = {"user": "human", "assistant": "gpt"}
    sharegpt = [
        {"from": speakers[turn.pop("role")], "value": turn.pop("content"), **turn}
        for turn in with_wrong_answer(key, off)
    ]
    assert trained({"conversations": sharegpt}) == "4<|im_end|>"
    assert trained({"conversations": sharegpt, "system": "Be brief."}) == "4<|im_end|>"
    pair = {"prompt": messages[:2], "completion": messages[2:]}
    assert trained(pair) == "4<|im_end|>"


@pytest.mark.parametrize(
    "template", ["mistral", "fallback", "plain_roles", "last_differs", "llama3"]
)
def test_excluded_answers_stay_out_with_every_kind_of_template(template):
    messages = with_wrong_answer("weight", 0)
    system = [{"role": "system", "content": "Be brief."}]  # which Mistral's refuses
    for turns in (messages, system + messages):
        written = trained({"messages": turns}, template)
        assert "WRONG" not in written and "4" in written
        swapped = [dict(turn) for turn in turns]
        swapped[-1]["weight"] = 0
        del swapped[-3]["weight"]
        written = trained({"messages": swapped}, template)
        assert "WRONG" in written and "4" not in written


def test_an_excluded_tool_call_is_not_trained_and_a_row_of_none_is_dropped():
    template = HEAD + WRITERS["tojson"] + TAIL
    messages = conversation({**openai(ARGUMENTS), "weight": 0})
    assert trained({"messages": messages}, template) == "It rains.<|im_end|>"
    rows = [
        row_from_record(
            {
                "messages": [
                    {"role": "user", "content": "Q"},
                    {"role": "assistant", "content": "A", "weight": 0},
                ]
            },
            "f:1",
        )
    ]
    for train_on, kept in (("completion", 0), ("all", 1)):
        data = tokenize_rows(rows, make_tokenizer(CHATML), context_length=64, train_on=train_on)
        assert len(data) == kept
    assert tokenize_rows(rows, make_tokenizer(CHATML), context_length=64).report.dropped[
        "no answer to train on"
    ].sources == ["f:1"]


@pytest.mark.parametrize(
    "key, value", [("weight", 0.5), ("loss", 2), ("train", "later"), ("weight", [0])]
)
def test_a_switch_that_is_neither_on_nor_off_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"f:3: messages\[1\]: '{key}' is .*expected 1 or true"):
        row_from_record({"messages": with_wrong_answer(key, value)}, "f:3")


def test_parts_of_a_turn_that_are_excluded_are_refused_by_name():
    detail = [{"begin_offset": 0, "end_offset": 3, "train": False}]
    with pytest.raises(ValueError, match="'train_detail' trains parts of a turn"):
        row_from_record({"messages": with_wrong_answer("train_detail", detail)}, "f:3")


# ---- other names, other types --------------------------------------------------------------------

TURNS = conversation(openai(ARGUMENTS))


@pytest.mark.parametrize(
    "record",
    [
        {"messages": json.dumps(TURNS), "tools": [TOOL]},
        {"messages": TURNS, "tools": json.dumps([TOOL])},
        {"messages": TURNS, "tools": [json.dumps(TOOL)]},
        {"messages": TURNS, "tools": TOOL},
        {"messages": TURNS, "tool_defs": [TOOL]},
        {"messages": TURNS, "functions": [TOOL["function"]]},
        {"messages": TURNS, "functions": json.dumps([TOOL["function"]]), "tools": None},
        {"prompt": TURNS[:1], "completion": TURNS[1:], "tools": [TOOL]},
    ],
    ids=lambda record: ", ".join(f"{key} {type(value).__name__}" for key, value in record.items()),
)
def test_messages_and_tools_are_read_under_every_name_and_as_json_text(record):
    template = HEAD + WRITERS["tojson"] + TAIL
    assert text_of(record, template) == reference(template, TURNS, [TOOL])


@pytest.mark.parametrize(
    "record, fault",
    [
        ({"tools": [TOOL], "functions": [TOOL["function"]]}, "tools and functions all hold tools"),
        ({"tools": "weather"}, "'tools' is str; expected a list of schemas"),
        ({"tools": ["weather"]}, "'tools' holds 'weather'; expected schemas"),
        ({"tool_defs": 7}, "'tool_defs' is int"),
    ],
)
def test_tools_that_are_no_schemas_are_refused(record, fault):
    with pytest.raises(ValueError, match=f"f:3: {fault}"):
        row_from_record({"messages": TURNS, **record}, "f:3")


@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_trained_under_whichever_name_the_template_reads(read, given):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{% if m.{read} %}}<think>{{{{ m.{read} }}}}</think>{{% endif %}}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", given: "Easy."},
    ]
    assert trained({"messages": messages}, template) == "<think>Easy.</think>4<|im_end|>"


HALF = "\ud83d"
HALF_CALL = {"tool_calls": [{"function": {"name": "f", "arguments": {"x": HALF}}}]}


@pytest.mark.parametrize(
    "fields, tools, says",
    [
        ({"reasoning_content": HALF}, None, "f:1: messages[1]: 'reasoning_content' holds a lone"),
        (HALF_CALL, None, "f:1: its text in the chat template holds a lone surrogate"),
        ({}, [{**TOOL, "description": HALF}], "f:1: its text in the chat template holds a lone"),
        ({"reasoning": 5}, None, "f:1: messages[1]: 'reasoning' is int 5; expected text"),
        ({"thinking": ["a"]}, None, "f:1: messages[1]: 'thinking' has parts other than text"),
    ],
)
def test_what_is_no_text_outside_of_contents_is_refused_with_its_place(fields, tools, says):
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", **fields}]
    with pytest.raises(ValueError, match=re.escape(says)):
        row = row_from_record({"messages": messages, "tools": tools}, "f:1")
        list(encode_rows([row], ChatTemplate(make_tokenizer(HEAD + WRITERS["tojson"] + TAIL))))


def test_reasoning_in_parts_is_its_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = {"role": "assistant", "content": "A", "reasoning": parts}
    row = row_from_record({"messages": [{"role": "user", "content": "Q"}, answer]}, "f:1")
    assert row.messages[1]["reasoning"] == "ab"


@pytest.mark.parametrize("system", [{}, {"system": "S"}])
def test_answers_inside_of_a_prompt_are_context(system):
    """As in TRL, whose form this is: only the completion has a loss, unless every token has."""
    turns = [{"role": role, "content": role[0]} for role in ("user", "assistant") * 2]
    row = row_from_record({"prompt": turns[:3], "completion": turns[3:], **system}, "f:1")
    tokenizer = make_tokenizer("chatml")
    (only,) = encode_rows([row], ChatTemplate(tokenizer))
    (whole,) = encode_rows([row], ChatTemplate(tokenizer), "all")
    assert trained_text(only, tokenizer) == "a<|im_end|>"
    assert whole.trained[1:].all()
    assert encode_prompt(row, tokenizer) == only.input_ids[: only.trained.argmax()].tolist()
