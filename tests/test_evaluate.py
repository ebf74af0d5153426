"""Held-out rows: which they are, when they are evaluated, and what is recorded of it."""

import json
import math

import numpy as np
import pytest
import torch

from fsdp_qlora.cli import main, parse
from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import Row, hold_out, tokenize_rows
from fsdp_qlora.observe.evaluate import Evaluator, perplexity
from fsdp_qlora.observe.loss_plot import _is_seen_from_zero, plot_loss
from fsdp_qlora.observe.metrics import EvalMetrics, StepMetrics
from fsdp_qlora.observe.runlog import RunLog
from fsdp_qlora.observe.sinks import terminal

from .test_data_tokenizers import chat, make_tokenizer
from .tiny import save_tiny
from .tokenizers import VOCAB_SIZE, save_tokenizer

TOKENIZER = make_tokenizer("chatml")


def dataset_of(*texts):
    rows = [Row(f"row {i}", messages=chat("ask", text)) for i, text in enumerate(texts)]
    return tokenize_rows(rows, TOKENIZER, context_length=64)


def texts(dataset) -> set[str]:
    return {
        TOKENIZER.decode(labels[labels != -100].tolist()).removesuffix("<|im_end|>")
        for _, labels in (dataset[row] for row in range(len(dataset)))
    }


# ---- which rows ------------------------------------------------------------------------------


def test_a_held_out_share_is_exact_and_the_same_every_time():
    dataset = dataset_of(*map(str, range(200)))
    train, held_out = hold_out(dataset, 0.05)
    assert (len(train), len(held_out)) == (190, 10)
    assert not texts(train) & texts(held_out) and len(texts(train) | texts(held_out)) == 200
    assert texts(hold_out(dataset, 0.05)[1]) == texts(held_out)
    backwards = dataset_of(*map(str, reversed(range(200))))
    assert texts(hold_out(backwards, 0.05)[1]) == texts(held_out)


def test_copies_of_a_row_are_on_one_side():
    train, held_out = hold_out(dataset_of(*[str(i % 20) for i in range(100)]), 0.3)
    assert not texts(train) & texts(held_out)
    assert len(train) + len(held_out) == 100 and len(held_out) == 30


def test_rows_keep_their_side_when_data_are_added():
    _, before = hold_out(dataset_of(*map(str, range(100))), 0.2)
    _, after = hold_out(dataset_of(*map(str, range(400))), 0.2)
    assert len(texts(before) & texts(after)) > 10  # 4 by chance


def test_a_subset_is_the_rows_of_its_dataset():
    dataset = dataset_of(*map(str, range(30)))
    _, held_out = hold_out(dataset, 0.2)
    assert held_out.report is dataset.report
    for i, row in enumerate(held_out.rows):
        assert all(map(torch.equal, held_out[i], dataset[row]))
        assert held_out.lengths[i] == len(dataset[row][0])
        assert held_out.trained_counts[i] == (dataset[row][1][1:] != -100).sum()


def test_one_row_is_held_out_at_least_and_one_is_left():
    assert len(hold_out(dataset_of("a", "b"), 0.01)[1]) == 1
    for few in (["a"], ["a", "a"]):
        with pytest.raises(ValueError, match="--eval_share 0.5: all .* would be held out"):
            hold_out(dataset_of(*few), 0.5)


# ---- when ------------------------------------------------------------------------------------


@pytest.fixture
def given_losses(monkeypatch):
    monkeypatch.setattr(
        "fsdp_qlora.observe.evaluate.held_out_loss",
        lambda model, dataset, device, losses, agree: (next(losses), 10),
    )

    def run(losses, every=2):
        made = Evaluator(None, torch.device("cpu"), every=every, losses=iter(losses))
        return made, [made.run(None, step) for step in range(1, len(losses) + 1)]

    return run


def test_evaluation_is_due_every_so_many_steps_and_once_at_the_end(given_losses):
    made, _ = given_losses([1.0] * 4, every=2)
    assert [made.is_due(step) for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert not made.is_due(4, is_last=True) and made.is_due(5, is_last=True)
    assert not any(given_losses([], every=-1)[0].is_due(step) for step in range(1, 9))


def test_the_best_is_the_lowest_and_never_nan(given_losses):
    made, results = given_losses([math.nan, 2.0, 3.0, 1.0, math.nan, 1.0])
    assert [r.is_best for r in results] == [False, True, False, True, False, False]
    assert made.best is results[3] and made.last is results[5]


def test_perplexity_is_e_to_the_loss_and_does_not_overflow():
    assert perplexity(math.log(5)) == pytest.approx(5) and perplexity(1e4) == math.inf


# ---- what is recorded ------------------------------------------------------------------------


def step_metrics(step):
    return StepMetrics(step, 2.0, 1e-3, 1.0, 10, 20, 0.1, 200.0, 0.0)


def eval_metrics(step, loss=1.5):
    return EvalMetrics(step, loss, math.exp(loss), 30, True, 0.2)


@pytest.mark.parametrize("log_to", ["tqdm", "stdout", "jsonl"])
def test_evaluations_are_lines_of_their_own_kind_and_shown(tmp_path, capsys, log_to):
    with RunLog(tmp_path, terminal=terminal([log_to], None, 0)) as log:
        log.log(step_metrics(1))
        log.log_evaluation(eval_metrics(1))
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["step", "eval", "end"]
    assert records[1]["eval_loss"] == 1.5 and records[1]["perplexity"] == pytest.approx(
        4.4817, 1e-4
    )
    assert ("eval_loss" if log_to == "jsonl" else "held-out loss 1.5") in capsys.readouterr().out


def test_a_full_disk_does_not_end_the_run_and_its_lines_come_later(tmp_path, capsys):
    """/dev/full is a disk without room."""
    with RunLog(tmp_path) as log:
        log.log(step_metrics(1))
        file, log.file = log.file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        for step in (2, 3):
            log.log(step_metrics(step))
        log.file.close()
        log.file = file
        log.log(step_metrics(4))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4]
    (warning,) = capsys.readouterr().err.splitlines()
    assert "metrics.jsonl can't be written (No space left on device); its lines are kept" in warning


def test_lines_that_wait_for_room_are_there_after_a_rollback(tmp_path):
    with RunLog(tmp_path) as log:
        log.log(step_metrics(1))
        log.file.close()
        log.file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        for step in (2, 3):
            log.log(step_metrics(step))
        log.rewind(2)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2]


def test_metrics_that_cant_be_begun_name_the_flag(tmp_path):
    (tmp_path / "metrics.partial").mkdir()
    with pytest.raises(
        ValueError, match="--output_dir .* metrics.jsonl can't be written .* free some space"
    ):
        RunLog(tmp_path)


def test_the_picture_shows_the_held_out_loss(tmp_path):
    from matplotlib.image import imread

    steps = [step_metrics(step) for step in (1, 2, 3)]
    for name, evaluations in (("with", [eval_metrics(1), eval_metrics(3)]), ("without", [])):
        assert plot_loss(steps, tmp_path / f"{name}.png", evaluations=evaluations)
    orange = {
        name: int(
            (
                np.abs(imread(tmp_path / f"{name}.png")[..., :3] * 255 - (194, 87, 26)).sum(-1) < 3
            ).sum()
        )
        for name in ("with", "without")
    }
    assert orange["with"] > 100 and orange["without"] == 0


def test_the_loss_plot_marks_whole_steps_only(tmp_path, monkeypatch):
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    plot_loss([step_metrics(step) for step in (1, 2, 3)], tmp_path / "loss.png")
    ticks = drawn[0].axes[0].get_xticks()
    assert len(ticks) > 1 and all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize(
    "losses, from_zero",
    [
        ([4.0, 1.0], True),
        ([5.3, 5.2, 5.25], False),
        ([5.3, float("nan"), 5.2], False),
        ([2.0], False),
        ([float("nan")], False),
    ],
)
def test_losses_that_hardly_change_are_not_drawn_as_a_flat_line(losses, from_zero):
    assert _is_seen_from_zero(losses) is from_zero


# ---- settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, parts",
    [
        (dict(eval_share=0.1, eval_dataset="a.jsonl"), ["--eval_share", "--eval_dataset"]),
        (dict(eval_share=0.1, eval_split="test"), ["--eval_share", "--eval_split"]),
        (dict(eval_share=1.0), ["--eval_share", "below 1"]),
        (dict(eval_every=5), ["--eval_every 5", "--eval_dataset"]),
        (dict(eval_every=0, eval_share=0.1), ["--eval_every", "-1 or above 0"]),
        (dict(stream=True, eval_share=0.1), ["--stream", "--eval_dataset"]),
        (dict(stream=True, lr_scheduler="cosine"), ["--stream", "--max_steps"]),
        (dict(shuffle_buffer=0), ["--shuffle_buffer", "1 or more"]),
    ],
)
def test_settings_that_clash_are_refused_with_the_remedy(settings, parts):
    with pytest.raises(ValueError) as caught:
        RunConfig(**settings)
    assert all(part in str(caught.value) for part in parts)


def test_a_schedule_over_a_stream_of_known_length_is_accepted():
    assert RunConfig(stream=True, lr_scheduler="cosine", max_steps=10).stream


@pytest.mark.parametrize("argv, rows", [([], 0), (["--preview"], 3), (["--preview", "5"], 5)])
def test_preview_alone_means_three_rows(argv, rows):
    assert parse([*argv, "--lr", "1"])[0].preview == rows


# ---- the data command ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model's folder without its weights, and a file of rows."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, vocab_size=VOCAB_SIZE)
    save_tokenizer(folder)
    (folder / "model.safetensors").unlink()
    (folder / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{i}?", "completion": "yes " * (i % 9)}) + "\n"
            for i in range(40)
        )
    )
    return folder


def data_command(folder, *argv):
    return main(
        [
            "data",
            "--model_name",
            str(folder),
            "--dataset",
            str(folder / "rows.jsonl"),
            "--output_dir",
            str(folder / "out"),
            *argv,
        ]
    )


def test_the_data_command_reports_and_draws_without_weights(folder, capsys):
    assert data_command(folder, "--preview", "--batch_size", "4", "--eval_share", "0.1") == 0
    text = capsys.readouterr().out
    assert "data: 40 of 40 rows" in text and "up to" in text
    assert text.count("--- row") == 3 and "[[yes <|im_end|>]]" in text
    assert "held out: 4 rows" in text
    assert "with padding" in text and "with --packing true (4 bins)" in text
    assert (folder / "out" / "lengths.png").stat().st_size > 1000


@pytest.mark.parametrize("shared", [0, 3])
def test_held_out_rows_that_are_trained_on_are_counted(folder, capsys, shared):
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    others = [line.replace("?", "!") for line in lines[:5]]
    held_out = folder / f"held_out_{shared}.jsonl"
    held_out.write_text("".join([*lines[10 : 10 + shared], *others]))
    assert data_command(folder, "--eval_dataset", str(held_out)) == 0
    said = f"warning: {shared} of {5 + shared} held-out rows are trained on too"
    assert (said in capsys.readouterr().out) == bool(shared)


def test_rows_that_the_template_drops_are_told_with_the_remedy_held_out_ones_too(folder, capsys):
    call = dict(id="1", type="function", function=dict(name="f", arguments="{}"))
    turns = [
        dict(role="user", content="Go"),
        dict(role="assistant", content=None, tool_calls=[call]),
        dict(role="tool", content="3", tool_call_id="1"),
        dict(role="assistant", content="It is 3"),
    ]
    plain = [dict(role="user", content="Q"), dict(role="assistant", content="A")]
    rows, held_out = folder / "tools.jsonl", folder / "held_out_tools.jsonl"
    rows.write_text("".join(json.dumps(dict(messages=m)) + "\n" for m in [plain] * 4 + [turns] * 2))
    held_out.write_text("".join(json.dumps(dict(messages=m)) + "\n" for m in [plain, turns]))
    assert data_command(folder, "--dataset", str(rows), "--eval_dataset", str(held_out)) == 0
    text = capsys.readouterr().out
    assert "dropped 2: the chat template leaves out tool calls" in text
    assert "--chat_template takes another" in text
    assert f"dropped 1: the chat template leaves out tool calls ({held_out}:2)" in text


def test_the_data_command_looks_at_the_beginning_of_a_stream(folder, capsys):
    assert data_command(folder, "--preview", "1", "--stream") == 0
    text = capsys.readouterr().out
    assert "the first 40 rows of the stream" in text and text.count("--- row") == 1


@pytest.mark.parametrize("flag", ["--eval_dataset", "--eval_split"])
def test_missing_held_out_rows_are_named_by_their_flag(folder, capsys, flag):
    assert data_command(folder, flag, "absent.jsonl") == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} absent.jsonl: ")


def test_a_step_on_the_cpu_is_logged_when_it_is_done_and_one_on_a_gpu_a_step_later(tmp_path):
    from fsdp_qlora.training.step import StepResult
    from fsdp_qlora.training.step_log import LaggedLog

    logged = {}
    for kind in ("cpu", "meta"):  # meta stands for a device whose work is queued
        log = RunLog(tmp_path / kind, is_main=False)
        lagged, counts = LaggedLog(log, torch.device(kind)), []
        for number in (1, 2):
            lagged.add(number, 0.1, 1, 4, StepResult(torch.tensor([float(number), 1.0]), 3, 4))
            counts.append(len(log.steps))
        lagged.flush()
        logged[kind] = counts, [step.loss for step in log.steps]
        assert all(0 < step.seconds < 60 for step in log.steps)
    assert logged == {"cpu": ([1, 2], [1.0, 2.0]), "meta": ([0, 1], [1.0, 2.0])}


@pytest.mark.parametrize(
    "losses, stops_at",
    [
        ([3.0, 2.0, 2.5, 2.0], 4),  # as low is not lower
        ([3.0, 2.0, 2.5, 1.9, 2.0], None),
        ([3.0, 3.0, 3.0], 3),
        ([math.nan, math.nan], 2),
        ([], None),
    ],
)
def test_patience_ends_after_so_many_evaluations_without_a_lower_loss(losses, stops_at):
    """Also where best and last came from a checkpoint, for they are all that it goes by."""
    evaluator, ended = Evaluator(None, "cpu", every=5, patience=2), None
    for number, loss in enumerate(losses, 1):
        is_best = loss < (evaluator.best.eval_loss if evaluator.best else math.inf)
        evaluator.last = EvalMetrics(5 * number, loss, 1.0, 1, is_best, 0.1)
        evaluator.best = evaluator.last if is_best else evaluator.best
        if evaluator.is_out_of_patience():
            ended = ended or number
    assert ended == stops_at
    evaluator.patience = 0
    assert not evaluator.is_out_of_patience()
