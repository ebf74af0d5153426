"""Rows as tokens: what is kept, cut, dropped and counted, and the cache that ranks share."""

import io
import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from fsdp_qlora.data import ChatTemplate, DataReport, Row, load_dataset, preview, tokenize_rows
from fsdp_qlora.data import dataset as dataset_module
from fsdp_qlora.data import tokenized as tokenized_module
from fsdp_qlora.data.masking import encode_rows
from tests.patience import patience

from .test_data_tokenizers import chat, make_tokenizer, trained_text


def rows_of(*conversations):
    return [
        Row(f"rows.jsonl:{number}", messages=messages)
        for number, messages in enumerate(conversations, 1)
    ]


def write_rows(path, *contents):
    path.write_text("\n".join(json.dumps({"messages": chat(*turns)}) for turns in contents))
    return str(path)


@pytest.fixture
def tokenizer():
    return make_tokenizer("chatml")


def test_items_are_ids_and_labels_of_each_row(tokenizer):
    tokenized = tokenize_rows(
        rows_of(chat("Hello", "I am"), chat("why?", "")), tokenizer, context_length=64
    )
    assert len(tokenized) == 2
    for row, answer in enumerate(["I am<|im_end|>", "<|im_end|>"]):
        input_ids, labels = tokenized[row]
        assert input_ids.dtype == labels.dtype == torch.int64
        assert trained_text((input_ids, labels), tokenizer) == answer
        assert (labels[labels != -100] == input_ids[labels != -100]).all() and labels[0] == -100
        assert tokenized.lengths[row] == len(input_ids)
        assert tokenized.trained_counts[row] == (labels[1:] != -100).sum()
    assert tokenized[-1][0].equal(tokenized[1][0])
    with pytest.raises(IndexError):
        tokenized[2]


def test_tokens_are_held_in_flat_arrays(tokenizer):
    tokenized = tokenize_rows(rows_of(chat("Hello", "I am")), tokenizer, context_length=64)
    assert tokenized.input_ids.dtype == np.int32 and tokenized.trained.dtype == np.bool_
    assert tokenized.input_ids.nbytes + tokenized.trained.nbytes == 5 * len(tokenized[0][0])


def test_eos_keeps_its_label_where_pad_is_eos():
    tokenizer = make_tokenizer(None, pad="</s>")
    rows = [Row("test", text=text) for text in ("Hello", "Hello, how are you?", "a</s>b")]
    tokenized = tokenize_rows(rows, tokenizer, context_length=64)
    for row in range(3):
        assert tokenized[row][1][-1] == tokenizer.eos_token_id
    assert (tokenized[2][1] == tokenizer.eos_token_id).sum() == 2


def test_long_rows_are_cut_and_counted(tokenizer):
    whole = tokenize_rows(rows_of(chat("Hello", "42. " * 20)), tokenizer, context_length=500)
    cut = tokenize_rows(rows_of(chat("Hello", "42. " * 20)), tokenizer, context_length=32)
    assert cut.lengths.tolist() == [32] and cut[0][0].equal(whole[0][0][:32])
    assert (whole.report.rows_truncated, cut.report.rows_truncated) == (0, 1)
    assert cut.report.tokens_cut == whole.lengths[0] - 32


def test_a_row_whose_prompt_fills_the_context_is_dropped_and_counted(tokenizer):
    rows = rows_of(chat("Hello " * 50, "I am"), chat("Hello", "I am"), chat("Hello " * 50, "no"))
    tokenized = tokenize_rows(rows, tokenizer, context_length=32)
    assert len(tokenized) == 1 and (tokenized.trained_counts > 0).all()
    [(reason, dropped)] = tokenized.report.dropped.items()
    assert reason == "no trained token within 32 tokens (--context_length)"
    assert dropped.rows == 2 and dropped.sources == ["rows.jsonl:1", "rows.jsonl:3"]


def test_unusable_rows_are_dropped_by_reason_with_their_source():
    rows = rows_of([], [*chat("a"), *chat("b")], chat("Hello"), chat("Hello", "I am", system="Hm"))
    report = tokenize_rows(rows, make_tokenizer("mistral"), context_length=64).report
    assert {reason: dropped.sources for reason, dropped in report.dropped.items()} == {
        "no messages": ["rows.jsonl:1"],
        "chat template: Conversation roles must alternate user/assistant": ["rows.jsonl:2"],
        "no answer to train on": ["rows.jsonl:3"],
    }
    assert (report.rows_read, report.rows_kept, report.rows_with_folded_system) == (4, 1, 1)


def test_rows_come_in_the_same_order_whatever_the_batch(tokenizer, monkeypatch):
    rows = rows_of(*[chat(f"Hello {i}", f"{i}" * (i % 5)) for i in range(20)], [])
    whole = tokenize_rows(rows, tokenizer, context_length=64)
    monkeypatch.setattr(dataset_module, "ROWS_PER_BATCH", 3)
    again = tokenize_rows(iter(rows), tokenizer, context_length=64)
    assert (whole.input_ids == again.input_ids).all() and (whole.trained == again.trained).all()
    assert whole.report == again.report


def test_token_ids_outside_the_models_embedding_are_refused(tokenizer):
    tokenized = tokenize_rows(rows_of(chat("Hello", "I am")), tokenizer, context_length=64)
    tokenized.check_vocab_size(len(tokenizer))
    with pytest.raises(ValueError, match="the model embeds ids below 4; use the tokenizer"):
        tokenized.check_vocab_size(4)


def test_a_tiny_context_is_refused(tokenizer):
    with pytest.raises(ValueError, match="--context_length 1"):
        tokenize_rows([], tokenizer, context_length=1)


def test_no_row_left_is_an_error_with_the_reasons(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", ["Hello " * 50, "I am"])
    with pytest.raises(ValueError) as error:
        load_dataset(path, tokenizer, context_length=16)
    assert str(error.value) == (
        f"--dataset {path}: no row is left to train on (1 read; dropped 1: no trained token within "
        f"16 tokens (--context_length) ({path}:1)); give rows whose answer fits within --context_length"
    )


def test_dummy_rows_fill_the_context(tokenizer):
    tokenized = load_dataset("dummy", tokenizer, samples=4, context_length=64)
    assert tokenized.lengths.tolist() == [64] * 4 and tokenized.trained_counts.tolist() == [63] * 4


# ---- the report ------------------------------------------------------------------------------


def test_the_report_states_what_was_done(tokenizer):
    rows = rows_of(chat("Hello", "I am"), chat("Hello", "42. " * 40), [], [], [], [])
    tokenized = tokenize_rows(rows, tokenizer, context_length=64)
    report = tokenized.report
    assert report.tokens_total == tokenized.lengths.sum()
    assert report.tokens_trained == tokenized.trained_counts.sum()
    text = report.format_report()
    assert text.startswith(f"data: 2 of 6 rows, {report.tokens_total} tokens")
    assert "dropped 4: no messages (rows.jsonl:3, rows.jsonl:4, rows.jsonl:5, ...)" in text
    assert "truncated 1 row to 64 tokens (--context_length)" in text
    assert "up to      64 tokens         1 ###" in text
    assert sum(report.lengths.values()) == 2


def test_the_report_survives_json(tokenizer):
    report = tokenize_rows(rows_of(chat("Hello", "I am"), []), tokenizer, context_length=64).report
    assert DataReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_the_report_plots(tmp_path, tokenizer):
    report = tokenize_rows(rows_of(chat("Hello", "I am")), tokenizer, context_length=64).report
    report.plot(tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_the_preview_marks_what_is_trained(tokenizer):
    tokenized = tokenize_rows(
        rows_of(chat("Hello", "I am"), chat("a", "b")), tokenizer, context_length=64
    )
    text = preview(tokenized, tokenizer, n=1, color=False)
    assert text.endswith(
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n[[I am<|im_end|>]]\n"
    )
    assert "\033[32mI am<|im_end|>\033[0m" in preview(tokenized, tokenizer, color=True)
    assert preview(tokenized, tokenizer, n=9, color=False).count("--- row") == 2


# ---- the cache -------------------------------------------------------------------------------


def test_a_cached_data_set_is_the_same_and_is_not_tokenised_again(tmp_path, tokenizer, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", ["Hello", "I am"], ["a", "b"])
    options = dict(context_length=64, cache_dir=tmp_path / "cache")
    fresh = load_dataset(path, tokenizer, context_length=64)
    load_dataset(path, tokenizer, **options)
    monkeypatch.setattr(dataset_module, "tokenize_rows", None)
    for is_writer in (True, False):
        cached = load_dataset(path, tokenizer, **options, is_writer=is_writer)
        assert (cached.input_ids == fresh.input_ids).all() and cached.report == fresh.report
        assert (cached.trained == fresh.trained).all() and cached[1][1].equal(fresh[1][1])


def test_other_data_options_or_templates_give_another_cache_file(tmp_path, tokenizer):
    path, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    write_rows(path, ["Hello", "I am"])

    def files_after(tokenizer=tokenizer, **options):
        load_dataset(str(path), tokenizer, cache_dir=cache, **options)
        return len(list(cache.iterdir()))

    assert [files_after(), files_after(), files_after(context_length=64)] == [1, 1, 2]
    assert [files_after(train_on="all"), files_after(make_tokenizer("llama3"))] == [3, 4]
    write_rows(path, ["Hello", "I was"])
    assert files_after() == 5


def test_other_ranks_wait_for_the_writer(tmp_path, tokenizer, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", ["Hello", "I am"])
    options = dict(context_length=64, cache_dir=tmp_path / "cache")
    results = []
    waiting = threading.Thread(
        target=lambda: results.append(load_dataset(path, tokenizer, **options, is_writer=False))
    )
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive()
    load_dataset(path, tokenizer, **options)
    waiting.join(timeout=patience(10))
    assert len(results[0]) == 1


def test_every_rank_raises_the_writers_error(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": 7}\n')
    options = dict(context_length=64, cache_dir=tmp_path / "cache")
    messages = []
    for is_writer in (True, False):
        with pytest.raises(ValueError) as error:
            load_dataset(str(path), tokenizer, **options, is_writer=is_writer)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and messages[0].startswith(f"{path}:2: 'text' is int 7")


def test_the_error_of_an_earlier_run_does_not_count(tmp_path, tokenizer, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", ["Hello", "I am"])
    options = dict(context_length=64, cache_dir=tmp_path / "cache")
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="once"):
        patch.setattr(dataset_module, "tokenize_rows", fail)
        load_dataset(path, tokenizer, **options)
    [note] = (tmp_path / "cache").glob("*.failed")
    os.utime(note, (time.time() - 1000,) * 2)
    with pytest.raises(ValueError, match="did not finish it within 0 s"):
        load_dataset(path, tokenizer, **options, is_writer=False, wait_timeout_s=0.1)
    load_dataset(path, tokenizer, **options)
    assert not note.exists()


def fail(*_, **__):
    raise ValueError("failed once")


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path, tokenizer):
    path = write_rows(tmp_path / "rows.jsonl", ["Hello", "I am"])
    with pytest.raises(ValueError, match=f"--data_cache {path}"):
        load_dataset(path, tokenizer, cache_dir=path)


FULL_DISK = """
import resource, signal, sys
from fsdp_qlora.data import load_dataset
from tests.test_data_tokenizers import make_tokenizer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error then
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
try:
    load_dataset(sys.argv[1], make_tokenizer("chatml"), cache_dir=sys.argv[2])
except ValueError as error:
    print(error)
"""


def test_a_cache_that_can_t_be_written_whole_is_named_with_the_remedy(tmp_path, tokenizer):
    path, cache = write_rows(tmp_path / "rows.jsonl", ["Hello", "I am" * 99]), tmp_path / "cache"
    asked = [sys.executable, "-c", FULL_DISK, path, str(cache)]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.stdout.startswith(f"--data_cache {cache}: "), done.stderr
    assert done.stdout.strip().endswith(
        "free some space there, give another folder, or leave it out"
    )
    [note] = cache.iterdir()  # so that the ranks that wait say it too
    assert note.suffix == ".failed" and note.read_text() == done.stdout.strip()


def damaged(data: bytes, kind: str) -> bytes:
    """A cache file after something befell it."""
    start = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:start]), bytearray(data[start:])
    first, metadata = header["input_ids"]["data_offsets"][0], header["__metadata__"]
    marks = slice(*header["trained"]["data_offsets"])
    if kind == "one id":
        body[first + 4] ^= 4
    elif kind == "two ids swapped":
        body[first : first + 8] = body[first + 4 : first + 8] + body[first : first + 4]
    elif kind == "trained marks":
        body[marks] = bytes(1 - mark for mark in body[marks])
    elif kind == "a row's end":
        body[header["offsets"]["data_offsets"][0] + 8] -= 1
    elif kind == "all zero":
        body = bytes(len(body))
    elif kind == "the report":
        metadata["report"] = metadata["report"].replace("rows", "rowz")
    elif kind == "a type":
        header["input_ids"]["dtype"] = "U32"
    elif kind == "no checksum":
        del metadata["checksum"]
    elif kind == "cut":
        return data[:-5]
    elif kind == "empty":
        return b""
    elif kind == "another name":
        header["ids"] = header.pop("input_ids")
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bytes(body)


KINDS = [
    "one id",
    "two ids swapped",
    "trained marks",
    "a row's end",
    "all zero",
    "the report",
    "a type",
    "no checksum",
    "cut",
    "empty",
    "another name",
]


@pytest.mark.parametrize("kind", [*KINDS, "another data set's"])
def test_a_damaged_cache_is_built_again_and_says_so(tmp_path, tokenizer, capsys, kind):
    path = write_rows(tmp_path / "rows.jsonl", ["Hello", "I am"], ["a", "b"], [])
    options = dict(context_length=64, cache_dir=tmp_path / "cache")
    fresh = load_dataset(path, tokenizer, **options)
    (file,) = (tmp_path / "cache").iterdir()
    good = file.read_bytes()
    if kind == "another data set's":
        load_dataset(write_rows(tmp_path / "other.jsonl", ["Hello", "I was"]), tokenizer, **options)
        (other,) = set((tmp_path / "cache").iterdir()) - {file}
        other.replace(file)
    else:
        file.write_bytes(damaged(good, kind))
    assert file.read_bytes() != good
    results = []
    waiting = threading.Thread(
        target=lambda: results.append(load_dataset(path, tokenizer, **options, is_writer=False))
    )
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive() and not results  # it does not train on it
    results.append(load_dataset(path, tokenizer, **options))
    waiting.join(timeout=patience(10))
    for found in results:
        assert found.digest() == fresh.digest() and found.report == fresh.report
    assert capsys.readouterr().out.startswith(f"--data_cache: rebuilding {file}: ")
    assert len(file.read_bytes()) == len(good)
    load_dataset(path, tokenizer, **options)
    assert not capsys.readouterr().out


def test_of_a_row_that_is_cut_the_rest_is_not_kept(tokenizer):
    [encoded] = encode_rows([Row("r", text="word " * 1000)], ChatTemplate(tokenizer))
    row = dataset_module.cut_and_count(encoded, "r", DataReport(16, "completion"))
    for kept in (row.input_ids, row.trained):
        assert len(kept) == 16 and kept.base is None


def test_a_disk_that_gives_back_other_bytes_is_an_error_on_every_rank(
    tmp_path, tokenizer, monkeypatch
):
    path = write_rows(tmp_path / "rows.jsonl", ["Hello", "I am"])
    options = dict(context_length=64, cache_dir=tmp_path / "cache")
    write_tensors = tokenized_module.write_tensors

    def saved_wrongly(tensors, path, metadata):
        write_tensors(tensors, path, metadata)
        path.write_bytes(damaged(path.read_bytes(), "one id"))

    monkeypatch.setattr(tokenized_module, "write_tensors", saved_wrongly)
    for is_writer in (True, False):
        with pytest.raises(
            ValueError, match="--data_cache .*right after it was written; check the "
        ):
            load_dataset(path, tokenizer, **options, is_writer=is_writer)


def test_the_package_exports_what_it_lists_and_imports_no_data_library():
    code = (
        "import sys, fsdp_qlora.data as data; "
        "assert all(hasattr(data, name) for name in data.__all__); "
        "assert not {'datasets', 'pyarrow', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_tokenizing_has_a_bar_on_a_terminal_for_the_rank_that_shows_it(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(dataset_module, "_BAR_AFTER_S", 0)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(300)))
    said = []
    for stderr, shows in ((Terminal(), True), (Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert len(load_dataset(path, make_tokenizer("chatml"), shows_progress=shows)) == 300
        said.append(stderr.getvalue())
    assert "tokenizing" in said[0] and "rows/s" in said[0] and said[1:] == ["", ""]
