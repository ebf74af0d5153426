"""Files, folders, names and record formats; a fault names its file, line and remedy."""

import builtins
import json
from pathlib import Path

import datasets
import pyarrow.parquet as parquet
import pytest

from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import NAMES, load_dataset, read_rows, row_from_record
from fsdp_qlora.data.files import find_files
from fsdp_qlora.data.formats import FORMATS
from fsdp_qlora.data.hub_datasets import _guanaco_record
from fsdp_qlora.preflight.run_data import _first_rows, _open_stream

from .test_data_tokenizers import make_tokenizer

RECORD = {"instruction": "Say hi.", "output": "hi"}
LINE = json.dumps(RECORD).encode()


def write(path, *lines):
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)
    )
    return str(path)


def contents(row):
    return [message["content"] for message in row.messages]


# ---- record formats --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Q", "input": "", "output": "A"},
        {"instruction": "Q", "input": None, "output": "A", "text": "ready-made"},
        {"instruction": "Q", "response": "A"},
        {"prompt": "Q", "completion": "A"},
        {
            "prompt": [{"role": "user", "content": "Q"}],
            "completion": [{"role": "assistant", "content": "A"}],
        },
        {"question": "Q", "answer": "A"},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Q"}], "name": None},
                {"role": "assistant", "content": "A", "tool_calls": None},
            ]
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_text", "text": "Q"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
            ]
        },
    ],
    ids=lambda record: "+".join(record),
)
def test_every_format_becomes_the_same_conversation(record):
    assert row_from_record(record, "test").messages == [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
    ]


def test_input_and_context_are_part_of_what_is_asked():
    assert contents(row_from_record({**RECORD, "input": "more"}, "test"))[0] == "Say hi.\n\nmore"
    asked = {"context": "CREATE TABLE t (a)", "question": "How many?", "answer": "SELECT"}
    row = row_from_record(asked, "test")
    assert contents(row) == ["CREATE TABLE t (a)\n\nHow many?", "SELECT"]
    assert row.plain_prompt == (
        "###Context:\nCREATE TABLE t (a)\n###Question:\nHow many?\n###Answer:\n"
    )


def test_a_system_text_beside_the_turns_leads_the_conversation():
    record = {"system": "Be brief.", "conversations": [{"from": "human", "value": "Q"}]}
    assert row_from_record(record, "test").messages[0] == {"role": "system", "content": "Be brief."}


def test_plain_text_stays_text():
    row = row_from_record({"text": "once"}, "test")
    assert row.text == "once" and row.messages is None


def test_unknown_keys_are_named_with_the_formats_that_work():
    with pytest.raises(ValueError) as error:
        row_from_record({"ask": "Q", "reply": "A"}, "rows.jsonl:3")
    assert "rows.jsonl:3: the keys ask, reply match no format" in str(error.value)
    assert all(" + ".join(keys) in str(error.value) for keys, _ in FORMATS)


@pytest.mark.parametrize(
    "record, fault",
    [
        ({"instruction": "Q", "output": None}, "'output' is null; expected text"),
        (
            {"instruction": "Q", "output": 7},
            "'output' is int 7; expected text .*write it as text: \"7\"",
        ),
        ({"instruction": "Q", "output": True}, 'write it as text: "True"'),
        ({"messages": "Q"}, "'messages' is str; expected a list"),
        ({"messages": [{"content": "Q"}]}, r"messages\[0\]: expected"),
        ({"messages": [{"role": "critic", "content": "Q"}]}, "unknown role 'critic'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "only text is supported",
        ),
        (["Q", "A"], "expected an object with named fields, found list"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(record, fault):
    with pytest.raises(ValueError, match=f"rows.jsonl:3: .*{fault}|rows.jsonl:3: {fault}"):
        row_from_record(record, "rows.jsonl:3")


# ---- faults of files -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, fault",
    [
        (b'{"instruction": "a\nb", "output": "c"}', "the line ends inside a string"),
        (b'{"instruction": "a\tb", "output": "c"}', "control character inside a string"),
        (b'{"instruction": "caf\xe9", "output": "c"}', "byte 0xe9 is not UTF-8; convert the file"),
        (b'{"instruction": "a\\ud83d", "output": "c"}', "'instruction' holds a lone surrogate"),
        (b'{"instruction": "a", "output": NaN}', "'output' is float nan"),
        (b'{"instruction": "a", "output": "c"', "not JSON"),
        (LINE + LINE, "write one JSON object per line"),
        (b"7", "expected an object"),
    ],
    ids=[
        "raw newline",
        "raw tab",
        "bad UTF-8",
        "lone surrogate",
        "NaN",
        "cut off",
        "two",
        "number",
    ],
)
def test_a_fault_names_file_line_and_remedy(tmp_path, line, fault):
    path = write(tmp_path / "rows.jsonl", LINE, LINE, line, LINE)
    with pytest.raises(ValueError) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}:3: ") and fault in str(error.value)
    assert "\n" not in str(error.value)


def test_a_byte_order_mark_and_blank_lines_are_accepted(tmp_path):
    path = write(tmp_path / "rows.jsonl", b"\xef\xbb\xbf" + LINE, b"", b"  \r", LINE, b"")
    assert [row.source for row in read_rows(path)] == [f"{path}:1", f"{path}:4"]


def test_a_faulty_list_names_the_line(tmp_path):
    path = write(tmp_path / "rows.json", b"[", LINE + b",", b'{"instruction": }', b"]")
    with pytest.raises(ValueError, match="rows.json:3: column"):
        read_rows(path)


@pytest.mark.parametrize(
    "head, fault",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "run: git lfs pull"),
        ('{"text": "a"}'.encode("utf-16"), "the file is UTF-16"),
    ],
)
def test_a_file_that_is_something_else_is_recognised(tmp_path, head, fault):
    path = write(tmp_path / "rows.jsonl", head)
    with pytest.raises(ValueError, match=f"rows.jsonl:1: .*{fault}"):
        read_rows(path)


# ---- places ----------------------------------------------------------------------------------


def test_lines_a_list_and_parquet_hold_the_same_rows(tmp_path):
    import pyarrow

    records = [{"question": f"Q{i}", "answer": f"A{i}"} for i in range(5)]
    lines = write(tmp_path / "rows.jsonl", *records)
    array = write(tmp_path / "rows.json", json.dumps(records, indent=1).encode())
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows.parquet")
    table = str(tmp_path / "rows.parquet")
    expected = [contents(row) for row in read_rows(lines)]
    assert expected == [[f"Q{i}", f"A{i}"] for i in range(5)]
    assert [contents(row) for row in read_rows(array)] == expected
    assert [contents(row) for row in read_rows(table)] == expected
    assert read_rows(array)[4].source == f"{array}: element 5"
    assert read_rows(table)[4].source == f"{table}: row 5"
    joined = read_rows([lines, array])
    assert [contents(row) for row in joined] == expected * 2


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = write(tmp_path / "rows.parquet", b"PAR1 not really")
    with pytest.raises(ValueError, match="rows.parquet: not readable as parquet"):
        read_rows(path)


def test_a_folder_gives_the_files_of_the_split(tmp_path):
    for name in ("train-0.jsonl", "train-1.jsonl", "test.jsonl"):
        write(tmp_path / name, {"text": name})

    def texts(**options):
        return [row.text for row in read_rows(tmp_path, **options)]

    assert texts() == ["train-0.jsonl", "train-1.jsonl"]
    assert texts(split="test") == ["test.jsonl"]
    with pytest.raises(ValueError, match="no file of split 'dev'.*found test.jsonl"):
        texts(split="dev")


def test_a_folder_without_split_names_is_all_train(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "test.jsonl", "notes.txt"):
        write(tmp_path / name, {"text": name})
    assert [row.text for row in read_rows(tmp_path)] == ["a.jsonl", "b.jsonl"]
    globbed = read_rows(str(tmp_path / "*.jsonl"))
    assert [row.text for row in globbed] == ["a.jsonl", "b.jsonl", "test.jsonl"]


@pytest.mark.parametrize(
    "names, train, test",
    [
        (["train.jsonl", "train-old.jsonl", "test.jsonl"], ["train.jsonl"], ["test.jsonl"]),
        (["train-old.jsonl", "dev-docs.jsonl"], ["dev-docs.jsonl", "train-old.jsonl"], None),
        (["train-old.jsonl", "train-new.jsonl"], ["train-new.jsonl", "train-old.jsonl"], None),
        (
            ["constrain.jsonl", "test-drive.jsonl", "eval.notes.json"],
            ["constrain.jsonl", "eval.notes.json", "test-drive.jsonl"],
            None,
        ),
        (
            ["my_data_train.jsonl", "my_data_test.jsonl"],
            ["my_data_train.jsonl"],
            ["my_data_test.jsonl"],
        ),
        (
            ["train_sft-0-of-2.jsonl", "train_sft-1-of-2.jsonl", "test_sft-0-of-1.jsonl"],
            ["train_sft-0-of-2.jsonl", "train_sft-1-of-2.jsonl"],
            ["test_sft-0-of-1.jsonl"],
        ),
        (
            ["train-00000-of-00002-0123abcd0123abcd.jsonl", "Test.jsonl", "train1.json"],
            ["train-00000-of-00002-0123abcd0123abcd.jsonl", "train1.json"],
            ["Test.jsonl"],
        ),
        (["a.jsonl", "b-train.jsonl", "validation.jsonl"], ["a.jsonl", "b-train.jsonl"], None),
    ],
)
def test_a_split_is_a_whole_name_and_words_in_names_are_not(tmp_path, names, train, test):
    for name in names:
        write(tmp_path / name, {"text": name})
    assert [file.name for file in find_files(tmp_path)] == train
    if test:
        assert [file.name for file in find_files(tmp_path, "test")] == test
    else:
        with pytest.raises(ValueError, match="no file of split 'test'"):
            find_files(tmp_path, "test")


def test_a_split_of_a_glob_is_its_files_of_that_name(tmp_path):
    """Without one, a glob is all that it names."""
    for name in ("train.jsonl", "test-0.jsonl", "dev/rows.jsonl", "a[1]/test.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, {"text": name})

    def texts(pattern, **options):
        return [row.text for row in read_rows(f"{tmp_path}/{pattern}", **options)]

    assert texts("*.jsonl") == ["test-0.jsonl", "train.jsonl"]
    assert texts("*.jsonl", split="test") == ["test-0.jsonl"]
    assert texts("*/*.jsonl", split="dev") == ["dev/rows.jsonl"]
    assert texts("a[[]1]/*.jsonl", split="test") == ["a[1]/test.jsonl"]
    with pytest.raises(ValueError, match="no file of split 'dev' there.*found test-0.jsonl"):
        texts("*.jsonl", split="dev")


@pytest.mark.parametrize("kind", ["file", "saved by datasets", "dummy"])
def test_a_split_of_what_has_none_is_refused(tmp_path, kind):
    """Held-out rows would be the trained ones, with a loss that looks fine."""
    dataset = {"file": write(tmp_path / "rows.jsonl", {"text": "a"}), "dummy": "dummy"}.get(kind)
    if dataset is None:
        dataset = tmp_path / "saved"
        datasets.Dataset.from_list([{"text": "a"}], split="validation").save_to_disk(str(dataset))
        assert [row.text for row in read_rows(dataset, split="validation")] == ["a"]
    assert read_rows(dataset)
    with pytest.raises(ValueError, match="--dataset_split test: .*(without|has no) splits"):
        read_rows(dataset, split="test")


def test_the_report_names_the_files_that_were_read_and_those_left_out(tmp_path):
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    for name in ("train.jsonl", "train-old.jsonl", "rows.xlsx", ".hidden"):
        write(data / name, {"text": name})
    lines = ["files read: train.jsonl", "files left out: more/, rows.xlsx, train-old.jsonl"]
    tokenizer = make_tokenizer("chatml")
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        report = load_dataset(data, tokenizer, cache_dir=cache).report
        assert report.files == lines and all(
            f"  {line}\n" in report.format_report() for line in lines
        )
    (data / "train-old.jsonl").unlink()
    again = load_dataset(data, tokenizer, cache_dir=tmp_path / "cache").report
    assert again.files[1] == "files left out: more/, rows.xlsx"
    globbed = load_dataset(str(data / "*"), tokenizer).report
    assert globbed.files == ["files read: train.jsonl", "files left out: more/, rows.xlsx"]
    assert load_dataset(data / "train.jsonl", tokenizer).report.files == []
    config = RunConfig(dataset=str(data), stream=True, max_steps=1)
    assert _first_rows(config, tokenizer, _open_stream(config)).report.files == again.files


@pytest.mark.parametrize("dataset", ["missing.jsonl", "/no/such/folder", "no/*.jsonl"])
def test_a_missing_file_names_the_flag_and_what_works(dataset):
    with pytest.raises(ValueError) as error:
        read_rows(dataset)
    assert str(error.value).startswith(f"--dataset {dataset}: no such file or folder")
    assert all(name in str(error.value) for name in NAMES)


@pytest.mark.parametrize("part", ["[:10%]", "[5:10]", "[-5:]", " [: 5]", "[:1_000]"])
def test_other_parts_of_a_data_set_than_its_first_rows_are_refused(tmp_path, part):
    path = write(tmp_path / "rows.jsonl", {"text": "a"}, {"text": "b"})
    for name in (f"{path}{part}", f"{path},me/data{part}"):
        with pytest.raises(ValueError, match=r"only the first rows.*\[:1000\]; write it so"):
            read_rows(name)
    assert [row.text for row in read_rows(f"{path} [:1]")] == ["a"]


@pytest.mark.parametrize(
    "address, remedy",
    [
        ("https://huggingface.co/datasets/tatsu-lab/alpaca", "by its name: tatsu-lab/alpaca"),
        ("https://huggingface.co/datasets/a/b.c/blob/main/x.csv", "by its name: a/b.c"),
        ("hf://datasets/tatsu-lab/alpaca/x.parquet", "by its name: tatsu-lab/alpaca"),
        ("s3://bucket/rows.jsonl", "download the file, and give its path"),
        ("file:///tmp/rows.jsonl", "download the file, and give its path"),
    ],
)
def test_an_address_names_what_to_give(address, remedy):
    with pytest.raises(ValueError) as error:
        read_rows(address)
    assert str(error.value).startswith(f"--dataset {address}: ") and remedy in str(error.value)


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("rows.jsonl.gz", "(gzip -dk rows.jsonl.gz)"),
        ("rows.jsonl.ZST", "(zstd -d rows.jsonl.ZST)"),
        ("rows.arrow", "convert"),
    ],
)
def test_a_packed_file_or_a_folder_of_them_names_what_unpacks_it(tmp_path, name, remedy):
    (tmp_path / "packed").mkdir()
    path = Path(write(tmp_path / "packed" / name, b"packed"))
    for given in (path, path.parent):
        with pytest.raises(ValueError) as error:
            read_rows(given)
        assert str(error.value).startswith(f"--dataset {given}: ") and remedy in str(error.value)
    with pytest.raises(ValueError, match="no .jsonl, .json, .parquet, .csv or .tsv file there"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    "name", ["ROWS.JSONL", "rows.Csv", "Rows.TSV", "rows.JSON", "rows.PARQUET"]
)
def test_the_case_of_a_files_ending_does_not_matter(tmp_path, name):
    path = tmp_path / name
    rows = datasets.Dataset.from_list([{"question": "Q", "answer": "A, b"}] * 2)
    if path.suffix == ".PARQUET":
        rows.to_parquet(str(path))
    elif path.suffix in (".Csv", ".TSV"):
        rows.to_csv(str(path), sep="," if path.suffix == ".Csv" else "\t")
    else:
        rows.to_json(str(path), lines=path.suffix == ".JSONL")
    expected = [row_from_record(record, "here").messages for record in rows]
    for given in (path, tmp_path, str(tmp_path / "*")):
        assert [row.messages for row in read_rows(given)] == expected


def test_a_file_of_another_kind_and_a_split_of_one_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'.xlsx' files are not supported"):
        read_rows(write(tmp_path / "rows.xlsx", b"a,b"))
    with pytest.raises(ValueError, match="--dataset_split test: .* is a single file"):
        read_rows(write(tmp_path / "rows.jsonl", LINE), split="test")


def test_samples_are_drawn_by_seed_and_keep_their_order(tmp_path):
    path = write(tmp_path / "rows.jsonl", *[{"text": str(i)} for i in range(100)])

    def drawn(samples, seed):
        return [int(row.text) for row in read_rows(path, samples=samples, seed=seed)]

    assert drawn(10, 1) == sorted(drawn(10, 1)) == drawn(10, 1) != drawn(10, 2)
    assert len(set(drawn(10, 1))) == 10 and max(drawn(50, 1)) > 50
    assert drawn(1000, 1) == list(range(100))
    with pytest.raises(ValueError, match="--dataset_samples 0"):
        drawn(0, 1)


# ---- names -----------------------------------------------------------------------------------


def test_dummy_rows_have_equal_length_and_need_no_hub():
    rows = read_rows("dummy", samples=3, dummy_words=40)
    assert [len(row.text.split()) for row in rows] == [40] * 3
    assert rows[0].text.startswith("Lorem ipsum dolor") and len({row.text for row in rows}) == 3
    assert len(read_rows("dummy")) == 512


def test_text_to_sql_is_bundled_with_both_splits():
    train, heldout = (read_rows("text_to_sql", split=split) for split in ("train", "heldout"))
    assert train and heldout and all(row.messages[-1]["role"] == "assistant" for row in train)
    with pytest.raises(ValueError, match="text_to_sql has the splits train and heldout"):
        read_rows("text_to_sql", split="test")


def test_guanaco_text_becomes_turns():
    record = {
        "text": "### Human: Hi.\nYou?### Assistant: Fine.\n### Human: Why?\n### Assistant: So."
    }
    assert _guanaco_record(record)["messages"] == [
        {"role": "user", "content": "Hi.\nYou?"},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
    ]


@pytest.fixture
def hub(monkeypatch):
    """A hub of three rows per data set; records what was asked of it."""
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        if "missing" in name:
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist")
        return datasets.Dataset.from_list([{"question": f"Q{i}", "answer": "A"} for i in range(3)])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_names_stand_for_data_sets_of_the_hub(hub):
    rows = read_rows("orca_math", samples=2)
    assert len(rows) == 2 and rows[0].source.startswith("orca_math: row ")
    assert contents(read_rows("alpaca_sample", samples=1)[0]) == ["Q0", "A"]
    read_rows("someone/their-data", split="validation")
    assert hub == [
        ("microsoft/orca-math-word-problems-200k", "train"),
        ("yahma/alpaca-cleaned", "train"),
        ("someone/their-data", "validation"),
    ]


def test_a_name_that_the_hub_does_not_know_is_one_clear_line(hub):
    with pytest.raises(ValueError) as error:
        read_rows("missing/data")
    assert str(error.value).startswith("--dataset missing/data: no such file or folder here, and ")
    assert "\n" not in str(error.value) and "text_to_sql" in str(error.value)


def test_a_folder_saved_by_datasets_is_read(tmp_path):
    data = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=data).save_to_disk(str(tmp_path / "many"))
    assert [row.text for row in read_rows(tmp_path / "one")] == ["a", "b"]
    assert [row.text for row in read_rows(str(tmp_path / "many"))] == ["a", "b"]
    with pytest.raises(ValueError, match="--dataset_split test: .* has the splits train"):
        read_rows(tmp_path / "many", split="test")


def damage(folder: Path, kind: str):
    """A folder saved by datasets, damaged or of a later version."""
    (file,) = folder.glob("*.arrow")
    info = json.loads((folder / "dataset_info.json").read_text())
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:300])
    elif kind == "missing":
        file.unlink()
    else:
        info["features"]["text"] = {"_type": "OfALaterVersion"}
        (folder / "dataset_info.json").write_text(json.dumps(info))


@pytest.mark.parametrize("kind", ["cut", "missing", "later"])
def test_a_damaged_folder_of_datasets_is_named_with_the_remedy(tmp_path, kind):
    folder = tmp_path / "saved"
    datasets.Dataset.from_list([{"text": "a"}] * 40).save_to_disk(str(folder))
    damage(folder, kind)
    with pytest.raises(ValueError) as error:
        read_rows(folder)
    said = str(error.value)
    assert said.startswith(f"--dataset {folder}: datasets {datasets.__version__} can't read")
    assert "\n" not in said and "save it again, or upgrade" in said


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_images_beside_the_text_are_not_decoded(tmp_path, nested, streamed):
    """They are an unused field; decoding takes Pillow and much time, and ends at a damaged one."""
    kind, image = datasets.Image(), {"bytes": b"damaged", "path": None}
    given = {"text": ["a", "b"], "image": [[image]] * 2 if nested else [image] * 2}
    features = {"text": datasets.Value("string"), "image": datasets.List(kind) if nested else kind}
    data = datasets.Dataset.from_dict(given, features=datasets.Features(features))
    rows = read_rows(data.to_iterable_dataset() if streamed else data)
    assert [row.text for row in rows] == ["a", "b"]
    assert [row.unread for row in rows] == [("image",)] * 2


def test_a_row_that_a_data_set_can_not_give_is_named():
    def records():
        yield {"text": "a"}
        raise ConnectionError("the hub is gone\nfor now")

    data = datasets.IterableDataset.from_generator(records)
    with pytest.raises(ValueError) as error:
        read_rows(data)
    assert str(error.value).startswith("--dataset dataset: row 2 can't be read (")
    assert "\n" not in str(error.value)


def test_a_missing_package_names_what_to_install(monkeypatch):
    real_import = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    monkeypatch.setattr("importlib.import_module", without_datasets)
    with pytest.raises(ValueError, match=r"needs the package datasets; .*fsdp_qlora\[data\]"):
        read_rows("alpaca")


TURNS = [dict(role="user", content="a"), dict(role="assistant", content="b")]


@pytest.mark.parametrize(
    "record, fault",
    [
        (dict(prompt="a", chosen="b", rejected="c"), "rename chosen to completion"),
        (dict(chosen=TURNS, rejected=TURNS), "to messages if it is a whole conversation"),
        (
            dict(prompt="a", completion="b", label=False),
            "'label' is false.*rejected answer.*drop such rows",
        ),
        (dict(prompt=TURNS[:1], completion=TURNS[1:], label=False), "'label' is false"),
    ],
)
def test_answers_that_are_not_wanted_are_not_trained(record, fault):
    with pytest.raises(ValueError, match=f"^f:3: .*{fault}"):
        row_from_record(record, "f:3")


@pytest.mark.parametrize(
    "record",
    [
        dict(messages=TURNS, prompt="a", chosen=TURNS, rejected=TURNS),  # as UltraFeedback has them
        dict(prompt="a", completion="b", label=True),
        dict(prompt="a", completion="b", label=0),
    ],
)
def test_preference_data_that_holds_plain_rows_too_is_trained_on(record):
    assert row_from_record(record, "f:3").messages == TURNS
