"""Tables, objects that hold a list, nested folders and several data sets are read as files of lines are."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import subprocess

import pandas
import pyarrow
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset

from fsdp_qlora.cli import main
from fsdp_qlora.data import load_dataset, read_rows, reads_from
from fsdp_qlora.data.sources import open_source

from .test_data_tokenizers import make_tokenizer

RECORDS = [
    {"instruction": "Say hi", "output": 'hi, "you"'},
    {"instruction": "Two\nlines, one cell", "output": "ja\tnein"},
    {"instruction": "Grüße", "output": "ok"},
]


def lines(path, records=RECORDS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def told(dataset, **how) -> list[tuple]:
    """What of each row is trained on, and what is asked."""
    return [(row.messages, row.text, row.plain_prompt) for row in read_rows(str(dataset), **how)]


@pytest.mark.parametrize("suffix, delimiter", [("csv", ","), ("tsv", "\t")])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_table_has_the_rows_of_json_lines(tmp_path, suffix, delimiter, encoding):
    path = tmp_path / f"rows.{suffix}"
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, ["instruction", "output"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(RECORDS)
    assert told(path) == told(lines(tmp_path / "rows.jsonl"))
    assert told(tmp_path / f"*.{suffix}") == told(path)


def test_a_place_of_a_table_is_the_line_where_the_row_begins(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('text\n"a\nb"\nc\n')
    places = [place for place, _ in open_source(str(path)).records()]
    assert places == [f"{path}: line 2", f"{path}: line 4"]


@pytest.mark.parametrize(
    "text, says",
    [
        (b"a,b\n1,2\n1,2,3\n", ":3: 3 cells where the first line names 2 columns"),
        (b"a,a\n1,2\n", ":1: the first line must name each column once"),
        (b"", ":1: the first line must name each column once; it has nothing"),
        (b"a,b\n1,2\n1,\xe4\n", ":3: byte 0xe4 is not UTF-8"),
        (b'a,b\n1,"2\n3,4\n', "not valid CSV"),
    ],
)
def test_a_damaged_table_names_its_line_and_the_remedy(tmp_path, text, says):
    (tmp_path / "rows.csv").write_bytes(text)
    with pytest.raises(ValueError, match=says) as error:
        list(open_source(str(tmp_path / "rows.csv")).records())
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["data", "rows", "train"])
@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_that_holds_a_list_has_its_records(tmp_path, key, indent):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, key: RECORDS}, indent=indent))
    assert told(path) == told(lines(tmp_path / "rows.jsonl"))
    assert next(open_source(str(path)).records())[0] == f"{path}: {key}[0]"


NAMED = pandas.DataFrame(RECORDS, index=["x", "y", "z"])
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
FRAMES = {
    "numbered": pandas.DataFrame(RECORDS),
    "named": NAMED,
    "chosen": pandas.DataFrame(RECORDS).iloc[[2, 0]],
    "conversations": pandas.DataFrame({"messages": [TURNS, TURNS[:1] + TURNS]}),
}


@pytest.mark.parametrize("orient", ["columns", "records", "split", "table", "index"])
@pytest.mark.parametrize("frame", FRAMES)
def test_a_table_is_read_by_rows_however_pandas_writes_it(tmp_path, frame, orient):
    table, path = FRAMES[frame], tmp_path / "rows.json"
    wanted = told(lines(tmp_path / "rows.jsonl", table.to_dict("records")))
    for indent in (None, 2):
        table.to_json(path, orient=orient, indent=indent)
        assert told(path) == wanted
    table.to_json(path, orient="records", lines=True)
    assert told(path) == wanted


def test_columns_as_datasets_writes_them_are_rows(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(Dataset.from_list(RECORDS).to_dict()))
    assert told(path) == told(lines(tmp_path / "rows.jsonl"))
    assert next(open_source(str(path)).records())[0] == f"{path}: row 1"


def test_values_without_names_are_refused_with_the_way_to_write_them(tmp_path):
    path = tmp_path / "rows.json"
    NAMED.to_json(path, orient="values")
    with pytest.raises(ValueError, match=r'rows.json: element 1: .*found list; .*orient="records"'):
        told(path)


@pytest.mark.parametrize("orient", ["columns", "split", "table", "index"])
def test_a_table_in_a_file_of_lines_is_refused_with_the_name_that_it_should_have(tmp_path, orient):
    path = tmp_path / "rows.jsonl"
    NAMED.to_json(path, orient=orient)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: one table.*rename it to rows.json, or"):
        told(path)
    assert told(path.rename(tmp_path / "rows.json")) == told(lines(tmp_path / "lines.jsonl"))
    for record in ({"messages": TURNS}, {"question": "q", "answer": "a", "data": [1]}):
        assert len(told(lines(path, [record]))) == 1


def test_a_table_of_unknown_columns_is_refused_by_their_names(tmp_path):
    path = tmp_path / "rows.json"
    for orient in ("columns", "index", "split"):
        pandas.DataFrame({"a": ["1", "2"], "b": ["3", "4"]}).to_json(path, orient=orient)
        with pytest.raises(ValueError, match="the keys a, b match no format"):
            told(path)


def test_a_record_whose_fields_are_lists_is_no_table(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for record in ({"messages": turns}, {"prompt": turns[:1], "completion": turns[1:]}):
        path = tmp_path / "row.json"
        path.write_text(json.dumps(record, indent=1))
        assert told(path) == told(lines(tmp_path / "row.jsonl", [record]))


def test_json_lines_whose_rows_have_such_a_key_are_still_lines(tmp_path):
    path = lines(tmp_path / "rows.json", [{"data": [1], "text": "a"}, {"data": [2], "text": "b"}])
    assert [record["text"] for _, record in open_source(str(path)).records()] == ["a", "b"]


def test_folders_in_a_folder_are_read_and_may_be_named_after_splits(tmp_path):
    lines(tmp_path / "one/a.jsonl", RECORDS[:1])
    lines(tmp_path / "two/deep/b.jsonl", RECORDS[1:2])
    lines(tmp_path / ".hidden/c.jsonl", RECORDS)
    assert told(tmp_path) == told(lines(tmp_path / "../all.jsonl", RECORDS[:2]))
    assert open_source(str(tmp_path)).files[0] == "files read: one/a.jsonl, two/deep/b.jsonl"
    lines(tmp_path / "validation/d.jsonl", RECORDS[2:])
    assert len(told(tmp_path)) == 2 and len(told(tmp_path, split="validation")) == 1
    assert len(told(f"{tmp_path}/**/*.jsonl")) >= 3


@pytest.mark.parametrize(
    "dataset",
    [".", "own", "nested", "*.jsonl", "own/*.jsonl", "nested/**/*.jsonl", "own/rows.jsonl"],
)
@pytest.mark.parametrize("output", [".", "own", "own/out", "nested/out", "nested/.out", "out"])
def test_it_is_known_before_a_run_whether_its_files_would_be_rows(
    tmp_path, monkeypatch, dataset, output
):
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "own/rows.jsonl", "nested/a/rows.jsonl"):
        lines(tmp_path / name)
    for several in (dataset, f"own/rows.jsonl[:1],{dataset}*2"):
        foreseen = reads_from(several, "train", output)
        written = lines(tmp_path / output / "metrics.jsonl", [{"kind": "step"}])
        places = [place for place, _ in open_source(several).raw_records()]
        written.unlink()
        assert foreseen == any("metrics.jsonl" in place for place in places)


def test_an_output_folder_among_the_rows_is_refused(tmp_path, capsys):
    rows = lines(tmp_path / "data/rows.jsonl")
    flags = ["--dataset", str(rows), "--eval_dataset", str(rows.parent), "--output_dir"]
    assert main(["train", *flags, str(rows.parent), "--dry_run"]) == 2
    said = capsys.readouterr().err
    assert f"--output_dir {rows.parent}: a run that resumes would read" in said
    assert f"--eval_dataset {rows.parent}; give another folder" in said


def test_several_data_sets_are_read_one_after_the_other_each_to_its_limit(tmp_path):
    first, second = lines(tmp_path / "a.jsonl"), lines(tmp_path / "b.jsonl", RECORDS[::-1])
    assert told(f"{first}, {second}[:1]") == told(first) + told(second)[:1]
    assert told(f"{second}[:2]") == told(second)[:2]
    digests = {
        open_source(text).digest()
        for text in (f"{first},{second}", f"{second},{first}", f"{first},{second}[:1]")
    }
    assert len(digests) == 3
    with pytest.raises(ValueError, match="--dataset .*a name is missing between two commas"):
        read_rows(f"{first},,{second}")
    with pytest.raises(ValueError, match="--dataset .*nowhere.jsonl: no such file or folder"):
        read_rows(f"{first},nowhere.jsonl")


def test_a_file_whose_name_has_a_comma_is_itself(tmp_path):
    path = lines(tmp_path / "a,b.jsonl")
    assert len(told(path)) == len(RECORDS)


def test_a_weight_says_how_often_an_epoch_has_each_row_of_a_data_set(tmp_path):
    one = lines(tmp_path / "a.jsonl", [{"text": f"a{n}"} for n in range(400)])
    two = lines(tmp_path / "b.jsonl", [{"text": f"b{n}"} for n in range(400)])

    def texts(dataset: str, **how) -> list[str]:
        return [row.text for row in read_rows(dataset, **how)]

    for weight, least, most in ((2, 800, 800), (0.5, 150, 250), (1.25, 450, 550)):
        found = texts(f"{one}*{weight},{two}[:100]*3")
        ours = [text for text in found if text[0] == "a"]
        assert least <= len(ours) <= most and found[len(ours) :] == [
            f"b{n}" for n in range(100) for _ in range(3)
        ]
        assert all(abs(ours.count(f"a{n}") - weight) < 1 for n in range(400))
        streamed = open_source(f"{one}*{weight}", streaming=True)
        assert [row.text for row in streamed.rows()] == ours == texts(f"{one}*{weight}")
    half = texts(f"{one}*0.5")
    assert texts(f"{one}*0.5", seed=7) != half
    digests = [open_source(f"{one}{weight}").digest() for weight in ("*1", "*2", "*0.5")]
    assert len(set(digests)) == 3
    for wrong in ("*0", "*1001"):
        with pytest.raises(ValueError, match=r"--dataset .*how often.*leave the data set out"):
            read_rows(f"{one}{wrong}")


def test_a_glob_is_no_weight_and_a_file_of_such_a_name_is_read_as_it_is(tmp_path):
    lines(tmp_path / "part1.jsonl")
    lines(tmp_path / "part2.jsonl")
    assert len(read_rows(str(tmp_path / "*.jsonl"))) == 6
    assert len(read_rows(f"{tmp_path}/part[12].jsonl*2")) == 12
    folder = tmp_path / "rows*2"
    lines(folder / "a.jsonl")
    assert len(read_rows(str(folder))) == 3


# ---- what spreadsheets and scripts write ------------------------------------------------------


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_columns_are_told_apart_by_what_stands_between_their_names(tmp_path, mark, suffix):
    """Also where a cell holds other marks, or there is one column."""
    path = tmp_path / f"rows{suffix}"
    path.write_text(f'prompt{mark}completion\r\n"a, b; c"{mark}d\r\n')
    assert [record for _, record in open_source(str(path)).records()] == [
        dict(prompt="a, b; c", completion="d")
    ]
    path.write_text("text\nhello\n")
    assert [record for _, record in open_source(str(path)).records()] == [dict(text="hello")]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_is_refused_with_the_command_that_converts_it(tmp_path, suffix, encoding):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes("\ufefftext\nä\n".encode(encoding))
    with pytest.raises(ValueError, match=f"rows{suffix}:1: .*iconv -f UTF-16 -t UTF-8 rows"):
        list(open_source(str(path)).records())


@pytest.mark.parametrize("key", ["examples", "instances", "records", "items"])
def test_records_are_found_under_the_names_that_other_tools_give_them(tmp_path, key):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"type": "text2text", key: RECORDS}, indent=1))
    assert told(path) == told(lines(tmp_path / "rows.jsonl"))


TOKENS = {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]}


@pytest.mark.parametrize("name", ["one.jsonl", "two.jsonl", "one.json", "table.json", "a.parquet"])
def test_rows_that_are_tokens_already_are_refused_with_what_takes_them(tmp_path, name):
    path = tmp_path / name
    if name == "a.parquet":
        parquet.write_table(pyarrow.Table.from_pylist([TOKENS, TOKENS]), path)
    elif name == "table.json":
        path.write_text(json.dumps({key: [tokens] * 2 for key, tokens in TOKENS.items()}))
    else:
        lines(path, [TOKENS] * (1 + (name == "two.jsonl")))
    with pytest.raises(ValueError, match="input_ids are tokens already.*trl.SFTTrainer"):
        told(path)


def test_a_binary_column_of_texts_is_refused_with_what_makes_it_text(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": [b"a"], "completion": [b"b"]}), path)
    with pytest.raises(ValueError, match="'prompt' is bytes.*write it as a column of strings"):
        told(path)


def test_an_object_over_several_lines_is_a_record(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(RECORDS[0], indent=1))
    assert told(path) == told(lines(tmp_path / "rows.jsonl", RECORDS[:1]))
    path.write_text(json.dumps({"samples": RECORDS}, indent=1))
    with pytest.raises(ValueError, match="rows.json:1: the keys samples match no format"):
        told(path)


@pytest.mark.parametrize(
    "record, remedy",
    [
        (None, "(it is empty); give rows"),
        ({"prompt": "a " * 99, "completion": "b"}, "give rows whose answer fits within --context"),
        ({"messages": [{"role": "user", "content": "a"}]}, "give rows with an answer"),
        ({"messages": []}, "give rows with an answer"),
        ({"text": ""}, "give rows with an answer"),
        ({"text": "a", "w": 0}, "give rows of a weight above 0"),
    ],
)
def test_where_no_row_is_left_the_remedy_is_that_of_the_reason(tmp_path, record, remedy):
    path = lines(tmp_path / "rows.jsonl", [record] if record else [])
    column = "w" if "w" in (record or {}) else None
    with pytest.raises(ValueError, match="no row is left to train on") as error:
        load_dataset(str(path), make_tokenizer("chatml"), context_length=64, weight_column=column)
    assert remedy in str(error.value) and str(error.value).count("; give") == 1


def test_a_column_without_a_name_is_an_unused_field(tmp_path):
    """pandas writes its index so, and spreadsheets end lines with a comma."""
    path = tmp_path / "rows.csv"
    path.write_text(",instruction,output,\n0,a,b,\n1,c,d,\n")
    expected = [{"instruction": "a", "output": "b"}, {"instruction": "c", "output": "d"}]
    assert told(path) == told(lines(tmp_path / "rows.jsonl", expected))
    assert [row.unread for row in read_rows(path)] == [("column 1",)] * 2


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_row_is_of_the_format_whose_columns_it_fills(tmp_path, kind):
    """A table of several data sets has the columns of all, and nothing in those of the others."""
    given = [
        {"instruction": "i", "output": "o"},
        {"question": "q", "answer": "a"},
        {"instruction": "", "output": ""},
    ]
    columns = ["instruction", "output", "question", "answer"]
    full = [{name: record.get(name, "") for name in columns} for record in given]
    path = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(full), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(full)
    assert told(path) == told(lines(tmp_path / "rows.jsonl", given))
    assert not any(row.unread for row in read_rows(path))


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize("module, kind", [(gzip, "gzip"), (bz2, "bzip2"), (lzma, "xz")])
def test_a_compressed_file_is_refused_with_what_unpacks_it(tmp_path, suffix, module, kind):
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(module.compress(b"text\na\n"))
    command = f"{kind} -dc rows.{suffix} > plain-rows.{suffix}"
    with pytest.raises(ValueError) as error:
        read_rows(path)
    assert (
        str(error.value)
        == f"{path}:1: this is {kind}, not text; unpack, export or rename it: {command}"
    )
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / f"plain-rows.{suffix}").read_bytes() == b"text\na\n"
