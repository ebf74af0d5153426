"""What is trained is what the model must write: every answer, and the token that ends it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_qlora.data import ChatTemplate, Row, encode_prompt, marked_tokens, stop_token_ids
from fsdp_qlora.data.formats import row_from_record
from fsdp_qlora.data.masking import encode_rows
from fsdp_qlora.data.templates import UnusableRow

from .test_data_tokenizers import (
    CHATML,
    SILENT,
    TEMPLATES,
    chat,
    make_sentencepiece_tokenizer,
    make_tokenizer,
    trained_text,
)


def encode(row, tokenizer, train_on="completion"):
    if isinstance(row, list):
        row = Row("test", messages=row)
    [encoded] = encode_rows([row], ChatTemplate(tokenizer), train_on)
    if isinstance(encoded, UnusableRow):
        raise encoded
    return encoded


def expected_text(name: str, answers: list[str]) -> str:
    """What each template of the tests lets the model write, from reading the template."""

    def turn(number, answer):
        last = number == len(answers) - 1
        return {
            "chatml": f"{answer}<|im_end|>",
            "llama3": f"{answer.strip()}<|eot_id|>",
            "mistral": f" {answer}</s>",
            "thinking": ("<think>\n\n</think>\n\n" if last else "") + f"{answer}<|im_end|>",
            "plain_roles": f"{answer}\n" + ("</s>" if last else ""),
            "spaced": f"{answer}</s>",
            "last_differs": answer + ("</s>" if last else "<|im_end|>"),
            "fallback": f" {answer}</s>",
        }[name]

    return "".join(turn(number, answer) for number, answer in enumerate(answers))


# Any text that keeps the special tokens out; the markers of roles are let in, and so is emptiness.
PIECES = [
    "assistant",
    "\n",
    "\n\n",
    " ",
    "### assistant\n",
    "assistant: ",
    "user",
    "</think",
    "42.",
    "é",
    "日本",
    "🙂",
    "\ufeff",
    "\t",
    "Hello, how are you?",
    "[",
    "|im_end|>",
]
TEXTS = st.lists(
    st.sampled_from(PIECES)
    | st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), max_size=4),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_trained_tokens_decode_to_the_answers_and_their_ends(name, trim_offsets, turns):
    tokenizer = make_tokenizer(name, adds_bos=True, trim_offsets=trim_offsets)
    messages = chat(*[text for turn in turns for text in turn])
    answers = [answer for _, answer in turns]
    assert trained_text(encode(messages, tokenizer), tokenizer) == expected_text(name, answers)


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "thinking", "spaced", "fallback"])
@settings(max_examples=30, deadline=None)
@given(question=TEXTS, answer=TEXTS)
def test_the_prompt_of_generation_is_what_stands_before_the_answer(name, question, answer):
    tokenizer = make_tokenizer(name, adds_bos=True)
    messages = chat(question, answer)
    prompt = encode_prompt(messages, tokenizer)
    encoded = encode(messages, tokenizer)
    assert encoded.input_ids[: len(prompt)].tolist() == prompt
    assert not encoded.trained[: len(prompt)].any() and encoded.trained[len(prompt)]


@pytest.mark.parametrize(
    "marker",
    [
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
        "assistant\n",
        "<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n",
    ],
)
@pytest.mark.parametrize("around", ["{}", "\n{}", "Say. {}", "日本{}🙂", "{}x"])
def test_a_marker_in_a_user_turn_is_not_trained(marker, around):
    tokenizer = make_tokenizer("chatml")
    messages = chat(around.format(marker), "Yes.", marker, "", "Why?", "So.")
    encoded = encode(messages, tokenizer)
    assert trained_text(encoded, tokenizer) == "Yes.<|im_end|><|im_end|>So.<|im_end|>"


def test_thoughts_that_a_template_removes_from_earlier_turns_leave_the_mask_exact():
    tokenizer = make_tokenizer("thinking")
    messages = chat("Q1", "<think>\nold\n</think>\n\nA1", "Q2", "<think>\nnew\n</think>\n\nA2")
    assert trained_text(encode(messages, tokenizer), tokenizer) == (
        "A1<|im_end|><think>\nnew\n</think>\n\nA2<|im_end|>"
    )


def test_a_sentencepiece_tokenizer_trains_the_answer_with_its_leading_space():
    tokenizer = make_sentencepiece_tokenizer("mistral")
    encoded = encode(chat("Hello", "the answer", "why?", "I am"), tokenizer)
    assert trained_text(encoded, tokenizer) == " the answer</s> I am</s>"


@pytest.mark.parametrize("make", [make_tokenizer, make_sentencepiece_tokenizer])
@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML, None])
@pytest.mark.parametrize("row", [chat("Hello", "I am"), "Hello", "<s>Hello"], ids=str)
def test_a_row_starts_with_exactly_one_bos_if_the_tokenizer_adds_it(make, template, row):
    tokenizer = make(template, adds_bos=True)
    row = Row("test", text=row) if isinstance(row, str) else Row("test", messages=row)
    ids = encode(row, tokenizer).input_ids.tolist()
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    prompt = encode_prompt(row, tokenizer)
    assert prompt[0] == tokenizer.bos_token_id and prompt.count(tokenizer.bos_token_id) == 1


def test_bos_follows_the_template_and_is_not_invented():
    with_bos = make_tokenizer("{{ bos_token }}" + CHATML)
    ids = encode(chat("Hello", "I am"), with_bos).input_ids.tolist()
    assert ids[0] == with_bos.bos_token_id and ids.count(with_bos.bos_token_id) == 1
    without = make_tokenizer("chatml")  # neither the template nor the tokenizer writes one
    assert without.bos_token_id not in encode(chat("Hello", "I am"), without).input_ids


@pytest.mark.parametrize("text", ["Hello, how are you?", "Hello</s>"])
def test_plain_text_is_trained_whole_and_ends_with_one_eos(text):
    tokenizer = make_tokenizer("chatml", adds_bos=True)
    encoded = encode(Row("test", text=text), tokenizer)
    assert encoded.trained.tolist() == [False] + [True] * (len(encoded.trained) - 1)
    assert trained_text(encoded, tokenizer) == text.removesuffix("</s>") + "</s>"


def test_without_a_template_an_instruction_is_asked_in_alpaca_style():
    tokenizer = make_tokenizer(None)
    record = {"instruction": "Translate this.", "input": "Hello", "output": "Bonjour"}
    row = row_from_record(record, "test")
    encoded = encode(row, tokenizer)
    text = tokenizer.decode(encoded.input_ids.tolist())
    assert text.startswith("Below is an instruction") and "### Input:\nHello\n\n" in text
    assert trained_text(encoded, tokenizer) == "Bonjour</s>"
    assert text.endswith("### Response:\nBonjour</s>")


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    "prompt, answer", [("2 + 2 =", " 4. "), ("2 + 2 = ", "four"), ("\n", "\n")]
)
def test_without_a_template_prompt_and_completion_are_joined_as_they_are(
    prompt, answer, trim_offsets
):
    tokenizer = make_tokenizer(None, trim_offsets=trim_offsets)
    row = row_from_record({"prompt": prompt, "completion": answer}, "test")
    encoded = encode(row, tokenizer)
    assert tokenizer.decode(encoded.input_ids.tolist()) == f"{prompt}{answer}</s>"
    assert trained_text(encoded, tokenizer) == f"{answer}</s>"


def test_train_on_all_trains_every_token_but_the_first():
    tokenizer = make_tokenizer("chatml")
    encoded = encode(chat("Hello", "I am"), tokenizer, train_on="all")
    assert encoded.trained.tolist() == [False] + [True] * (len(encoded.trained) - 1)


def test_unknown_train_on_names_the_flag():
    with pytest.raises(ValueError, match="--train_on answers: choose one of completion, all"):
        encode(chat("Hello", "I am"), make_tokenizer("chatml"), train_on="answers")


# ---- templates that refuse -------------------------------------------------------------------


@pytest.mark.parametrize("template", ["mistral", SILENT], ids=["refuses", "leaves out"])
def test_a_system_message_that_the_template_does_not_take_is_folded_into_the_user_turn(template):
    tokenizer = make_tokenizer(template)
    encoded = encode(chat("Hello", "I am", system="Be brief."), tokenizer)
    folded = encode(chat("Be brief.\n\nHello", "I am"), tokenizer)
    assert encoded.folded_system and not folded.folded_system
    assert encoded.input_ids.tolist() == folded.input_ids.tolist()
    assert encoded.trained.tolist() == folded.trained.tolist()


def test_a_system_message_that_the_template_takes_stays():
    tokenizer = make_tokenizer("chatml")
    encoded = encode(chat("Hello", "I am", system="Be brief."), tokenizer)
    assert not encoded.folded_system
    assert "<|im_start|>system\nBe brief.<|im_end|>" in tokenizer.decode(encoded.input_ids.tolist())


@pytest.mark.parametrize(
    "messages",
    [
        [*chat("Hello"), *chat("Hello", "I am")],
        chat("Hello", "I am")[1:],
        [*chat("Hello", "I am"), {"role": "system", "content": "late"}],
    ],
    ids=["two users", "assistant first", "system last"],
)
def test_a_refused_conversation_is_unusable_with_the_templates_message(messages):
    with pytest.raises(UnusableRow, match="chat template: Conversation roles must alternate"):
        encode(messages, make_tokenizer("mistral"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_empty_conversation_is_unusable(name):
    with pytest.raises(UnusableRow, match="no messages"):
        encode([], make_tokenizer(name))


def test_a_refused_prompt_is_one_clear_line():
    with pytest.raises(ValueError, match="^chat template: Conversation roles must alternate"):
        encode_prompt([*chat("Hello"), *chat("Hello")], make_tokenizer("mistral"))


# ---- tools -----------------------------------------------------------------------------------

TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}


# As Llama 3.1's: content beside a call is not written.
CALLS_ONLY = TOOLS.replace(
    "m['content'] }}", "'' }}{% if not m.tool_calls %}{{ m['content'] }}{% endif %}"
)


@pytest.mark.parametrize(
    "template, content, written",
    [
        (TOOLS, "", ""),
        (TOOLS, "Let me see. ", "Let me see. "),
        (CALLS_ONLY, None, ""),
        (CALLS_ONLY, "Let me see. ", ""),
    ],
)
def test_a_tool_call_is_trained_with_its_end(template, content, written):
    tokenizer = make_tokenizer(template)
    messages = [
        *chat("1 + 1?"),
        {**CALL, "content": content},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is 2."},
    ]
    assert trained_text(encode(messages, tokenizer), tokenizer) == (
        written + '<tool_call>add{"a": 1}</tool_call><|im_end|>It is 2.<|im_end|>'
    )


def test_a_tool_call_that_the_template_leaves_out_is_unusable():
    with pytest.raises(UnusableRow, match="leaves out tool calls"):
        encode([*chat("1 + 1?"), CALL], make_tokenizer("chatml"))


# ---- ends ------------------------------------------------------------------------------------


def test_generation_stops_at_the_end_of_turn_and_at_eos():
    def stops(name):
        tokenizer = make_tokenizer(name)
        return set(tokenizer.convert_ids_to_tokens(stop_token_ids(tokenizer)))

    assert stops("chatml") == {"<|im_end|>", "</s>"}
    assert stops("llama3") == {"<|eot_id|>", "</s>"}
    assert stops("last_differs") == {"<|im_end|>", "</s>"}
    assert stops("plain_roles") == stops("fallback") == {"</s>"}


def test_text_without_an_eos_token_is_refused():
    with pytest.raises(ValueError, match="no eos_token, so the model can't learn to stop"):
        encode(Row("test", text="Hello"), make_tokenizer("chatml", eos=None))


@pytest.mark.parametrize("template", ["chatml", "llama3", "mistral"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_prompt_that_is_in_the_template_already_is_not_written_in_it_again(template, ended):
    """As scripts for other trainers prepare their rows: the tokens are those of the conversation."""
    tokenizer = make_tokenizer(template, adds_bos=True)
    asked, whole = (
        tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=asks)
        for turns, asks in ((chat("Hello"), True), (chat("Hello", "I am"), False))
    )
    answer = whole[len(asked) :].rstrip()
    answer = answer if ended else answer.partition("I am")[0] + "I am"
    row = row_from_record({"prompt": asked, "completion": answer}, "test")
    plain = row_from_record({"messages": chat("Hello", "I am")}, "test")
    found, expected = encode_rows([row, plain], ChatTemplate(tokenizer))
    assert trained_text(found, tokenizer) == trained_text(expected, tokenizer)
    ids = found.input_ids.tolist()
    assert expected.input_ids.tolist()[: len(ids)] == ids
    assert list(found.notes) == ["prompts are in the chat template already, and stay as they are"]
    assert encode_prompt(row, tokenizer) == encode_prompt(plain, tokenizer)


@pytest.mark.parametrize("make", [make_tokenizer, make_sentencepiece_tokenizer])
def test_long_rows_are_tokenized_few_together_and_to_the_same_tokens(make, monkeypatch):
    tokenizer = make()
    tokenized = type(tokenizer).__call__
    rows = [Row("r", text="some words " * n) for n in (1, 40, 2, 3, 100, 1, 1)]
    alone = [next(encode_rows([row], ChatTemplate(tokenizer))) for row in rows]
    together = []

    def seen(self, texts, **how):
        together.append([len(text) for text in texts] if isinstance(texts, list) else [])
        return tokenized(self, texts, **how)

    monkeypatch.setattr(type(tokenizer), "__call__", seen)
    monkeypatch.setattr(marked_tokens, "_CHARACTERS_TOGETHER", 60)
    found = list(encode_rows(rows, ChatTemplate(tokenizer)))
    assert [sizes for sizes in together if sizes] == [[11], [440], [22, 33], [1100], [11, 11]]
    for one, other in zip(alone, found, strict=True):
        assert (one.input_ids == other.input_ids).all() and (one.trained == other.trained).all()


def in_parts(content: str) -> str:
    """A template of ours that reads `content` of m in place of a text."""
    assert "m['content']" in CHATML
    return CHATML.replace("m['content']", f"({content})")


FIRST_PART = in_parts("m['content'][0]['text']")  # refuses a text
ALL_PARTS = in_parts(
    "m['content'] | selectattr('type') | join('', attribute='text')"
)  # leaves it out
OF_TOOLS = in_parts("(m['content'][0]['name'] or '') ~ m['content'][0]['text']")


@pytest.mark.parametrize("template", [FIRST_PART, ALL_PARTS])
def test_a_template_that_takes_lists_of_parts_alone_is_given_them(template):
    turns = chat("Hello", "I am <|im_end|> no end", "And you?", "Fine", system="Be kind.")
    by_text, by_parts = make_tokenizer(CHATML), make_tokenizer(template)
    wanted, found = encode(turns, by_text), encode(turns, by_parts)
    assert (found.input_ids == wanted.input_ids).all() and (found.trained == wanted.trained).all()
    assert encode_prompt(turns, by_parts) == encode_prompt(turns, by_text)


def test_a_tools_result_in_parts_names_the_tool():
    result = dict(role="tool", name="look_up", content="RESULT")
    text = ChatTemplate(make_tokenizer(OF_TOOLS)).render([*chat("Hello"), result])
    assert "tool\nlook_upRESULT<" in text
