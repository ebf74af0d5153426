"""Weights of rows: where they are read, what is refused, and what the model computes from them.

How runs train with them: distributed/test_row_weights.py.
"""

import copy
import json

import pyarrow
import pyarrow.parquet as parquet
import pytest
import torch
from torch.nn.functional import cross_entropy

from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import (
    DataReport,
    Row,
    StepLoader,
    StepSampler,
    collate,
    collate_packed,
    hold_out,
    load_dataset,
    read_rows,
    tokenize_rows,
)
from fsdp_qlora.memory.chunked_cross_entropy import apply_chunked_cross_entropy
from fsdp_qlora.preflight.run_data import read_data, run_tokenizer

from .test_chunked_cross_entropy import llama
from .test_data_tokenizers import make_tokenizer
from .tokenizers import save_chat_model

VALUES = [1, 0.25, "3", 0, "1e-3"]


def lines(path, weights, key="quality"):
    rows = [{"text": "row " * (n + 1), key: weight} for n, weight in enumerate(weights)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_weights_are_read_from_a_field_in_any_kind_of_file(tmp_path, suffix):
    path, numbers = tmp_path / f"rows{suffix}", [float(value) for value in VALUES]
    if suffix == ".csv":
        text = "".join(f'"a, ""{n}""",{value}\r\n' for n, value in enumerate(VALUES))
        path.write_bytes(f"text,quality\r\n{text}".encode())
    elif suffix == ".parquet":
        parquet.write_table(pyarrow.table({"text": list("abcde"), "quality": numbers}), path)
    elif suffix == ".json":
        path.write_text(json.dumps({"data": [dict(text="a", quality=v) for v in VALUES]}))
    else:
        lines(path, VALUES)
    rows = read_rows(str(path), weight_column="quality")
    assert [row.weight for row in rows] == pytest.approx(numbers)
    assert all(not row.unread for row in rows)
    assert [row.weight for row in read_rows(str(path))] == [1.0] * 5


@pytest.mark.parametrize(
    "value", [-1, "-0.5", float("nan"), "nan", float("inf"), 1e60, 10**400, "1,5", True, [1], ""]
)
def test_what_is_no_weight_is_refused_with_its_line_and_the_flag(tmp_path, value):
    path = lines(tmp_path / "rows.jsonl", [1, value])
    with pytest.raises(ValueError) as error:
        read_rows(path, weight_column="quality")
    text = str(error.value)
    assert text.startswith(
        f"{path}:2: 'quality' (--weight_column) is {value!r:.40}; expected a number"
    )
    assert "\n" not in text


@pytest.mark.parametrize("value", [None, "absent"])
def test_a_row_without_a_weight_is_refused_with_its_line(tmp_path, value):
    path = tmp_path / "rows.jsonl"
    lines(path, [1, None])
    if value:
        path.write_text(path.read_text().replace(', "quality": null', ""))
    with pytest.raises(ValueError, match=r"rows.jsonl:2: 'quality' \(--weight_column\) is missing"):
        read_rows(str(path), weight_column="quality")


def test_a_row_of_weight_0_is_left_out_and_the_report_says_which_weights_there_are(tmp_path):
    path, tokenizer = lines(tmp_path / "rows.jsonl", VALUES), make_tokenizer("chatml")
    rows = load_dataset(path, tokenizer, context_length=64, weight_column="quality")
    assert rows.weights.tolist() == pytest.approx([1, 0.25, 3, 1e-3])
    report = rows.report.format_report()
    assert "dropped 1: weight 0 in --weight_column (" in report and "rows.jsonl:4)" in report
    assert "weights from 0.001 to 3 (--weight_column)" in report
    assert "weight" not in load_dataset(path, tokenizer, context_length=64).report.format_report()
    path = lines(tmp_path / "none.jsonl", [0, 0])
    with pytest.raises(ValueError, match="no row is left to train on .*weight 0 in"):
        load_dataset(path, tokenizer, context_length=64, weight_column="quality")


def test_a_field_named_weight_that_nobody_reads_is_told_with_the_flag(tmp_path):
    path = lines(tmp_path / "rows.jsonl", [1, 2], key="weight")
    report = load_dataset(path, make_tokenizer("chatml"), context_length=64).report
    assert "--weight_column weight" in report.format_report()
    assert RunConfig(weight_column="weight").weight_column == "weight"


def test_cached_rows_keep_their_weights_and_other_weights_are_other_rows(tmp_path):
    path, tokenizer = lines(tmp_path / "rows.jsonl", [1, 2, 3]), make_tokenizer("chatml")

    def load(**options):
        return load_dataset(path, tokenizer, context_length=64, cache_dir=tmp_path / "c", **options)

    without, first, again = load(), load(weight_column="quality"), load(weight_column="quality")
    assert without.weights is None
    assert first.weights.tolist() == again.weights.tolist() == [1, 2, 3]
    assert len({without.digest(), first.digest()}) == 2 and first.digest() == again.digest()
    lines(tmp_path / "rows.jsonl", [1, 2, 4])
    changed = load(weight_column="quality")
    assert changed.weights.tolist() == [1, 2, 4] and changed.digest() != first.digest()


def test_rows_that_weigh_the_same_need_no_weights():
    tokenizer = make_tokenizer("chatml")
    rows = [Row("own", text=text, weight=2.0) for text in ("a", "b c", "d")]
    dataset = tokenize_rows(rows, tokenizer, context_length=64)
    assert dataset.weights is None
    loader = StepLoader(dataset, StepSampler(3, 3), pad_token_id=0, num_workers=0)
    assert "loss_weights" not in loader.step(0).micro_batches[0]


def test_held_out_rows_keep_the_weights_that_they_have():
    rows = [Row("own", text=f"{n} {n}", weight=n + 1.0) for n in range(20)]
    dataset = tokenize_rows(rows, make_tokenizer("chatml"), context_length=64)
    for part in hold_out(dataset, 0.3):
        assert part.weights.tolist() == [row + 1.0 for row in part.rows]


def test_a_held_out_data_set_without_the_field_weighs_its_rows_alike(tmp_path):
    folder = save_chat_model(tmp_path / "model", num_hidden_layers=1)
    data = lines(tmp_path / "rows.jsonl", [1, 2])
    for name, key, expected in (("with", "quality", [1, 3]), ("without", "other", None)):
        config = RunConfig(
            model_name=folder,
            dataset=data,
            eval_dataset=lines(tmp_path / f"{name}.jsonl", [1, 3], key),
            weight_column="quality",
        )
        held_out = read_data(config, run_tokenizer(config)).held_out
        found = held_out.weights
        assert (found if found is None else found.tolist()) == expected, name


# ---- batches and the loss --------------------------------------------------------------------

IDS = [torch.arange(3, 3 + n) for n in (4, 7, 2)]
ROWS = [(ids, ids.masked_fill(ids < 5, -100)) for ids in IDS]


def test_each_token_of_a_batch_has_the_weight_of_its_row():
    padded = collate(ROWS, 0, weights=[1, 2, 3])["loss_weights"]
    packed = collate_packed([ROWS[:2], ROWS[2:]], 0, pad_to=12, weights=[[1, 2], [3]])
    trained = packed["labels"] != -100
    assert [row.unique().tolist() for row in padded] == [[1], [2], [3]]
    assert packed["loss_weights"][0].tolist() == [1] * 4 + [2] * 7 + [0]
    assert packed["loss_weights"][1].tolist() == [3] * 2 + [0] * 10
    assert packed["loss_weights"][trained].tolist() == [1] * 2 + [2] * 5
    assert "loss_weights" not in collate(ROWS, 0) | collate_packed([ROWS], 0)


@pytest.mark.parametrize("num_items", [None, 12.5])
def test_loss_and_all_gradients_are_those_of_transformers_logits(num_items):
    """The head's too; of right tokens each counts once."""
    plain, weights = llama(), torch.tensor([0.5, 0.0, 4.0])
    ours, batch = copy.deepcopy(plain), collate(ROWS, 0, weights=weights.tolist())
    apply_chunked_cross_entropy(ours)
    got = ours(**batch, num_items_in_batch=num_items).loss
    got.backward()
    logits, labels = plain(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(3, -1)
    counted = (labels != -100) * weights[:, None]
    expected = (losses * counted).sum() / (num_items or counted.sum())
    expected.backward()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm(), name
    right = (logits.argmax(-1) == labels) & (labels != -100)
    assert int(ours.right_tokens) == int(right.sum())


def test_a_model_that_computes_its_own_loss_is_refused_with_weights_and_trains_without():
    model = llama()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ValueError, match="--weight_column: LlamaForCausalLM computes its own loss"):
        apply_chunked_cross_entropy(copy.deepcopy(model), weighted=True)
    apply_chunked_cross_entropy(model)
    assert model(**collate(ROWS, 0)).loss.isfinite()
    with pytest.raises(ValueError, match="--weight_column: .*leave the flag out"):
        model(**collate(ROWS, 0, weights=[1, 2, 3]))


def test_reports_of_ranks_know_the_least_and_the_largest_weight_of_all():
    reports = [DataReport(64) for _ in range(3)]
    for report, weights in zip(reports, ([2.0], [0.5, 1.0], []), strict=True):
        for weight in weights:
            report.keep(4, 3, weight=weight)
    for report in reports[1:]:
        reports[0].add(DataReport.from_dict(json.loads(json.dumps(report.to_dict()))))
    assert reports[0].weights == [0.5, 2.0]
