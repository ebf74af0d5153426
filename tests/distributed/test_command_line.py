"""train.py on real ranks: a whole run, and the mistakes users make."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from tests.parts import slow
from tests.patience import patience
from tests.ranks import run_ranks
from tests.tiny import reference_model
from tests.tokenizers import save_chat_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps(dict(prompt=f"{i} plus {i}?", completion=f"{2 * i}")) + "\n"
            for i in range(11)
        )
    )
    return str(path)


def call(argvs: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of `fsdp-qlora` for each command line, in this rank."""
    from fsdp_qlora.cli import main

    results = []
    for argv in argvs:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = main(argv)
        results.append((code, out.getvalue(), err.getvalue()))
    return results


def test_every_mistake_is_one_line_and_an_exit_code_on_every_rank(folder, rows, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"\n')
    out = tmp_path / "output"
    base = [
        "train",
        "--model_name",
        folder,
        "--dataset",
        rows,
        "--precision",
        "fp32",
        "--output_dir",
        str(out),
    ]
    mistakes = {
        "--batchsize": (["--batchsize", "4"], "did you mean --batch_size"),
        "--model_name": (["--model_name", "/no/such/model"], "does not exist"),
        "--dataset": (["--dataset", "/no/such/rows.jsonl"], "rows.jsonl"),
        "bad.jsonl:2": (["--dataset", str(bad)], "JSON"),
        "--lora_target_modules": (["--lora_target_modules", "q_prj"], "q_proj"),
        "--sharding_strategy": (["--sharding_strategy", "hybrid_full_shard"], "full_shard"),
        "--world_size": (["--world_size", "4"], "torchrun started 2"),
        "--train_type": (["--train_type", "llama_pro"], "bnb_llama_pro"),
        "--llama_pro_blocks": (["--adapter", "llama_pro", "--llama_pro_blocks", "99"], "give 1 to"),
        "--lora_rank": (["--lora_rank", "0"], "1 or more"),
    }
    by_rank = run_ranks(call, 2, [base + extra for extra, _ in mistakes.values()], grouped=False)
    for results in by_rank:
        for (named, (_, remedy)), (code, _, err) in zip(mistakes.items(), results, strict=True):
            lines = [line for line in err.splitlines() if line.startswith("error")]
            assert code == 2 and len(lines) == 1, (named, code, err)
            assert named in lines[0] and remedy in lines[0], (named, lines[0])
    assert not out.exists()


@pytest.mark.slow
def test_torchrun_trains_each_row_once_and_saves_the_adapter(folder, rows, tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node",
        "2",
        "train.py",
        "--model_name",
        folder,
        "--dataset",
        rows,
        "--precision",
        "fp32",
        "--lora_rank",
        "4",
        "--lr",
        "1e-3",
        "--global_batch_size",
        "4",
        "--num_epochs",
        "2",
        "--log_to",
        "stdout",
        "--output_dir",
        str(tmp_path / "out"),
        "--use_gradient_checkpointing",
        "--device",
        "cpu",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120))
    assert run.returncode == 0, run.stderr[-3000:]
    records = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    steps = [r for r in records if r["kind"] == "step"]
    assert len(steps) == 6  # 11 rows in steps of 4, twice
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert sum(s["trained_tokens"] for s in steps[:3]) == sum(
        s["trained_tokens"] for s in steps[3:]
    )
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()
    settings = json.loads((tmp_path / "out/adapter/fsdp_qlora.json").read_text())
    assert settings["quant"] == "nf4"


@pytest.mark.parametrize(
    "flags, code",
    [slow([], 0), slow(["--lora_target_modules", "nothing"], 2)],
    ids=["well", "badly"],
)
def test_python_alone_starts_the_ranks_and_ends_as_the_first_failed_one(
    folder, rows, tmp_path, flags, code
):
    command = [
        sys.executable,
        "train.py",
        "--model_name",
        folder,
        "--dataset",
        rows,
        "--precision",
        "fp32",
        "--world_size",
        "2",
        "--max_steps",
        "1",
        "--log_to",
        "jsonl",
        "--output_dir",
        str(tmp_path / "out"),
        "--device",
        "cpu",
        *flags,
    ]
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120), env=env
    )
    assert run.returncode == code and "Traceback" not in run.stderr, run.stderr[-3000:]
    assert ('"step": 1' in run.stdout) == (code == 0)


def test_generate_answers_with_the_adapter(folder, tmp_path):
    from fsdp_qlora.cli import main

    out = io.StringIO()
    with redirect_stdout(out):
        code = main(
            [
                "generate",
                "--model_name",
                folder,
                "--prompt",
                "hello",
                "--max_new_tokens",
                "3",
                "--device",
                "cpu",
                "--base_quant",
                "nf4",
            ]
        )
    assert code == 0 and out.getvalue().strip()


def test_generate_without_a_model_takes_that_of_the_adapter(folder, tmp_path, capfd):
    from fsdp_qlora.cli import main

    reference_model(folder, "lora").save_pretrained(tmp_path / "adapter")
    ask = [
        "generate",
        str(tmp_path / "adapter"),
        "--prompt",
        "hi",
        "--max_new_tokens",
        "3",
        "--device",
        "cpu",
        "--base_quant",
        "none",
    ]
    answers = []
    for argv in (ask, [*ask, "--model_name", folder]):
        assert main(argv) == 0
        answers.append(capfd.readouterr().out)
    assert answers[0] == answers[1] and answers[0].strip()
    assert main([*ask, "--model_name", "nowhere/x"]) == 2
    assert "--model_name nowhere/x" in capfd.readouterr().err
