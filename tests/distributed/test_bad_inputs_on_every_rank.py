"""Damaged checkpoints and data, odd tokenizers and slow ranks: one answer, the same on every rank.

A rank that fails alone leaves the others waiting, so each fault is found by each rank, before they
meet, or by none.
"""

from __future__ import annotations

import io
import json
import os
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.parts import rest
from tests.patience import patience
from tests.ranks import run_ranks
from tests.tiny import save_tiny
from tests.tokenizers import CHATML, VOCAB_SIZE, save_tokenizer


def save_model(folder, **settings) -> str:
    save_tiny(folder, **dict(vocab_size=VOCAB_SIZE) | settings)
    save_tokenizer(folder)
    return str(folder)


def save_rows(path, rows: list[dict] | None = None) -> str:
    rows = rows or [
        dict(prompt=f"{i} plus {i}?" + "!" * i, completion=f"{2 * i}") for i in range(7)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def call(argvs: list[list[str]]) -> list[tuple[int, str, str, float]]:
    """Exit code, stdout, stderr and seconds of each command line, on this rank."""
    from fsdp_qlora.cli import main

    results = []
    for argv in argvs:
        out, err, started = io.StringIO(), io.StringIO(), time.monotonic()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(argv)
        results.append((code, out.getvalue(), err.getvalue(), time.monotonic() - started))
    return results


def arguments(model: str, data: str, out, *more: str) -> list[str]:
    return [
        "train",
        "--model_name",
        model,
        "--dataset",
        data,
        "--output_dir",
        str(out),
        "--precision",
        "fp32",
        "--lora_rank",
        "2",
        "--device",
        "cpu",
        "--log_to",
        "stdout",
        *more,
    ]


def assert_refused_everywhere(argvs: list[list[str]], parts: list[list[str]], world_size: int = 2):
    """Each command line ends, on every rank, in the same single error line that holds its parts."""
    by_rank = run_ranks(call, world_size, argvs, grouped=False)
    for wanted, *ranks in zip(parts, *by_rank, strict=True):
        lines = set()
        for rank, (code, _, err, seconds) in enumerate(ranks):
            errors = [line for line in err.splitlines() if line.startswith("error")]
            assert code == 2 and len(errors) == 1 and seconds < patience(30), (code, err, seconds)
            lines.add(errors[0].replace(f"(rank {rank})", ""))
            assert "Traceback" not in err
        assert len(lines) == 1, lines
        assert all(part in lines.copy().pop() for part in wanted), (wanted, lines)


# ---- checkpoints -------------------------------------------------------------------------------


def only_bin(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return ["pytorch_model.bin", "convert"]


def index_of_an_absent_shard(folder):
    index = dict(weight_map={"lm_head.weight": "model-00002-of-00002.safetensors"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["model-00002-of-00002.safetensors", "missing"]


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return [str(file), "not a whole one"]


def replaced_by(text: str):
    def replace(folder):
        (folder / "model.safetensors").write_text(text)
        return [str(folder / "model.safetensors"), "not a safetensors file"]

    return replace


FAULTS = [
    only_bin,
    index_of_an_absent_shard,
    cut_short,
    replaced_by("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9976\n"),
    replaced_by("<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n"),
]


def test_a_damaged_checkpoint_ends_every_rank_with_the_name_of_the_file(tmp_path):
    data, argvs, parts = save_rows(tmp_path / "rows.jsonl"), [], []
    for i, fault in enumerate(FAULTS):
        folder = save_model(tmp_path / str(i))
        parts.append(fault(tmp_path / str(i)))
        argvs.append(arguments(folder, data, tmp_path / "out"))
    assert_refused_everywhere(argvs, parts)
    assert not (tmp_path / "out").exists()


# ---- data --------------------------------------------------------------------------------------

GOOD = b'{"prompt": "a", "completion": "b"}\n'
LINES = {
    "surrogate": (b'{"prompt": "\\ud83d", "completion": "b"}', "surrogate"),
    "raw newline": (b'{"prompt": "a\nb", "completion": "b"}', "newline"),
    "latin 1": (b'{"prompt": "caf\xe9", "completion": "b"}', "UTF-8"),
    "NaN": (b'{"prompt": NaN, "completion": "b"}', "'prompt' is float nan"),
    "a list": (b"[1, 2]", "expected an object"),
    "no such keys": (b'{"q": "a", "a": "b"}', "match no format"),
}


def test_a_fault_on_line_3_is_named_by_file_and_line_on_every_rank(tmp_path):
    model, argvs, parts = save_model(tmp_path / "model"), [], []
    for name, (line, fault) in LINES.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_bytes(GOOD * 2 + line + b"\n" + GOOD)
        argvs.append(arguments(model, str(file), tmp_path / "out"))
        parts.append([f"{file}:3", fault])
    assert_refused_everywhere(argvs, parts)


def test_what_the_blocks_or_ranks_do_not_allow_leaves_an_earlier_run_where_it_is(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"kind": "step"}\n')
    model, data = save_model(tmp_path / "model"), save_rows(tmp_path / "rows.jsonl")
    mistakes = [
        ["--activation_policy", "recompute_all:3"],
        ["--sharding_strategy", "hybrid_full_shard"],
        ["--cuda_graphs", "true"],
    ]
    assert_refused_everywhere(
        [arguments(model, data, tmp_path / "out", *flags) for flags in mistakes], mistakes
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["metrics.jsonl"]


STRICT = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
) + CHATML


def test_a_strict_template_folds_and_skips_the_same_rows_on_every_rank(tmp_path):
    save_tiny(tmp_path / "model", vocab_size=VOCAB_SIZE)
    tokenizer = save_tokenizer(tmp_path / "model")
    tokenizer.chat_template = STRICT
    tokenizer.save_pretrained(tmp_path / "model")
    turns = {"s": "system", "u": "user", "a": "assistant"}
    data = save_rows(
        tmp_path / "rows.jsonl",
        [
            dict(messages=[dict(role=turns[t], content=f"{t}{i}") for i, t in enumerate(row)])
            for row in ("ua", "sua", "uua", "au", "", "uaua", "suaua")
        ],
    )
    argv = arguments(str(tmp_path / "model"), data, tmp_path / "out", "--max_steps", "1")
    preview = ["data", *argv[1:], "--preview", "9"]
    ((code, report, _, _), (trained, steps, _, _)), other = run_ranks(
        call, 2, [preview, argv], grouped=False
    )
    assert code == trained == 0 and all(result[0] == 0 for result in other)
    assert "4 of 7 rows" in report and "folded the system message" in report
    for reason, lines in (("roles must alternate", (3, 4)), ("no messages", (5,))):
        (found,) = [line for line in report.splitlines() if reason in line]
        assert all(f"{data}:{line}" in found for line in lines)
    assert "step 1/1 " in steps


# ---- tokenizers --------------------------------------------------------------------------------


def test_a_pad_token_beyond_the_vocabulary_trains_saves_and_reloads(tmp_path):
    model = tmp_path / "model"
    save_tiny(model, vocab_size=VOCAB_SIZE)
    tokenizer = save_tokenizer(model)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(model)
    assert tokenizer.pad_token_id == VOCAB_SIZE
    data = save_rows(tmp_path / "rows.jsonl")
    argvs = [
        arguments(str(model), data, tmp_path / kind, "--train_type", kind, "--batch_size", "2")
        for kind in ("lora", "qlora")
    ]
    argvs += [
        [
            "generate",
            "--model_name",
            str(model),
            "--device",
            "cpu",
            "--prompt",
            "1 plus 1?",
            "--adapter_folder",
            str(tmp_path / kind / "adapter"),
            "--max_new_tokens",
            "3",
        ]
        for kind in ("lora", "qlora")
    ]
    for argv in argvs[:2]:
        for ((code, _, error, _),) in run_ranks(call, 2, [argv], grouped=False):
            assert code == 0, error
    (results,) = run_ranks(call, 1, argvs[2:], grouped=False)  # a fresh process reloads them
    assert [code for code, *_ in results] == [0, 0], results
    for kind in ("lora", "qlora"):
        names = load_file(tmp_path / kind / "adapter" / "adapter_model.safetensors")
        assert not any("embed" in name or "head" in name for name in names)  # nothing was resized
        saved = AutoTokenizer.from_pretrained(tmp_path / kind / "adapter")
        padded = saved(["a", "a bc"], padding=True)["input_ids"]  # as whoever goes on with it pads
        assert saved.pad_token_id < VOCAB_SIZE and max(map(max, padded)) < VOCAB_SIZE


def test_a_row_that_holds_a_token_beyond_the_vocabulary_is_refused_with_the_remedy(tmp_path):
    save_tiny(tmp_path / "model", vocab_size=VOCAB_SIZE)
    tokenizer = save_tokenizer(tmp_path / "model")
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path / "model")
    data = save_rows(tmp_path / "rows.jsonl", [dict(prompt="a [PAD] b", completion="c")] * 3)
    argv = arguments(str(tmp_path / "model"), data, tmp_path / "out")
    assert_refused_everywhere([argv], [[f"token id {VOCAB_SIZE}", "--model_name"]])


# ---- one slow rank -----------------------------------------------------------------------------

SLOW_SECONDS, TIMEOUT_SECONDS = 6, 4


def train_with_a_slow_rank(argv: list[str], slow_rank: int) -> tuple[int, float]:
    """Exit code and seconds of a run on which one rank takes long to prepare its data."""
    import fsdp_qlora.training.rank as rank_of_run

    load_data = rank_of_run.load_data

    def slowly(*args):
        if os.environ["RANK"] == str(slow_rank):
            time.sleep(SLOW_SECONDS)
        return load_data(*args)

    rank_of_run.load_data = slowly
    ((code, _, error, seconds),) = call([argv])
    assert code == 0, error
    return code, seconds


@pytest.mark.parametrize("slow_rank", [rest(0), 1])
def test_a_rank_may_prepare_for_longer_than_the_timeout_of_the_group(tmp_path, slow_rank):
    argv = arguments(
        save_model(tmp_path / "model"),
        save_rows(tmp_path / "rows.jsonl"),
        tmp_path / "out",
        "--timeout_minutes",
        str(TIMEOUT_SECONDS / 60),
    )
    for code, seconds in run_ranks(train_with_a_slow_rank, 2, argv, slow_rank, grouped=False):
        assert code == 0 and SLOW_SECONDS < seconds < patience(60)
    records = map(json.loads, (tmp_path / "out" / "metrics.jsonl").read_text().splitlines())
    assert torch.tensor([r["loss"] for r in records if r["kind"] == "step"][-1]).isfinite()
