"""Where a tokenizer has no chat template, whoever asks the tuned model asks as its rows did."""

import pytest
from transformers import AutoTokenizer

from fsdp_qlora.data import (
    ChatTemplate,
    DataReport,
    Row,
    encode_prompt,
    keep_prompt_format,
    row_from_record,
    stop_token_ids,
    tokenize_rows,
)
from fsdp_qlora.data.formats import QUESTION_PROMPT

from .test_data_tokenizers import (
    chat,
    make_sentencepiece_tokenizer,
    make_tokenizer,
    trained_text,
)

RECORDS = {
    "alpaca": {"instruction": "Hello, how are you?", "output": "I am"},
    "question": {"question": "Hello, how are you?", "answer": "I am"},
    "prompt": {"prompt": "Hello, how are you?", "completion": "I am"},
    "roles": {"messages": chat("Hello, how are you?", "I am")},
    "text": {"text": "Hello, how are you?"},
}
MAKERS = {
    "byte-level": lambda: make_tokenizer(None),
    "byte-level with BOS": lambda: make_tokenizer(None, adds_bos=True),
    "SentencePiece": lambda: make_sentencepiece_tokenizer(None),
}


def tuned(tmp_path, make: str, *records):
    """The report of rows, and a tokenizer as it is saved beside what they trained."""
    tokenizer = MAKERS[make]()
    tokenizer.save_pretrained(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    rows = [row_from_record(record, f"f:{number}") for number, record in enumerate(records, 1)]
    data = tokenize_rows(rows, tokenizer, context_length=256)
    name = keep_prompt_format(tokenizer, data.report)
    tokenizer.save_pretrained(tmp_path / "saved")
    return data, AutoTokenizer.from_pretrained(tmp_path / "saved"), name


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", RECORDS)
def test_a_prompt_is_what_stood_before_the_answer_in_training(tmp_path, name, make):
    data, tokenizer, kept = tuned(tmp_path, make, RECORDS[name])
    assert kept == name
    (ids, labels), asked = data[0], chat("Hello, how are you?")
    before = ids[labels == -100].tolist() if name != "text" else ids[:-1].tolist()
    assert encode_prompt(asked, tokenizer) == before
    if make != "SentencePiece":  # whose tokens differ behind a BOS that a template writes
        by_template = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=False
        )
        assert by_template == before
    assert tokenizer.eos_token_id in stop_token_ids(tokenizer)


@pytest.mark.parametrize("name", RECORDS)
def test_rows_that_are_trained_on_after_that_have_the_tokens_they_had(tmp_path, name):
    more = [
        {"instruction": "Add.", "input": "1, 2", "output": "3"},
        {"messages": chat("a", "b", "c", "d", system="Be brief.")},
    ]
    data, tokenizer, _ = tuned(tmp_path, "byte-level", RECORDS[name], *more)
    assert ChatTemplate(tokenizer).is_fallback
    rows = [row_from_record(record, "f:1") for record in (RECORDS[name], *more)]
    again = tokenize_rows(rows, tokenizer, context_length=256)
    for i in range(3):
        assert again[i][0].tolist() == data[i][0].tolist()
    assert again.report.prompt_formats == data.report.prompt_formats


def test_a_conversation_goes_on_and_a_system_text_stands_first(tmp_path):
    _, tokenizer, _ = tuned(tmp_path, "byte-level", RECORDS["question"])
    text = tokenizer.apply_chat_template(chat("a", "b", "c", system="Be brief."), tokenize=False)
    assert text == (
        "Be brief.\n\n"
        + QUESTION_PROMPT.format(question="a")
        + "b</s>"
        + QUESTION_PROMPT.format(question="c")
    )


def test_the_form_of_most_rows_is_kept_and_a_template_of_ones_own_stays(tmp_path):
    question = RECORDS["question"]
    _, _, name = tuned(tmp_path, "byte-level", RECORDS["prompt"], question, question)
    assert name == "question"
    tokenizer = make_tokenizer("chatml")
    report = tokenize_rows(
        [row_from_record(RECORDS["alpaca"], "f:1")], tokenizer, context_length=256
    ).report
    assert keep_prompt_format(tokenizer, report) is None and not report.prompt_formats
    assert keep_prompt_format(make_tokenizer(None), DataReport(256)) is None


def test_a_control_token_in_a_plain_prompt_is_asked_as_it_was_trained(tmp_path):
    record = {"prompt": "one</s>two", "completion": "I am"}
    data, tokenizer, _ = tuned(tmp_path, "byte-level", record)
    ids, labels = data[0]
    assert encode_prompt(chat("one</s>two"), tokenizer) == ids[labels == -100].tolist()
    assert trained_text((ids, labels), tokenizer) == "I am</s>"
    assert encode_prompt(Row("f:1", text="one</s>"), tokenizer) == tokenizer.encode("one</s>")
