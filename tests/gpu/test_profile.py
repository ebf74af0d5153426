"""`--profile` on a GPU: kernels in the trace, and a memory snapshot."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from tests.distributed.test_command_line import call
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_profile_on_a_gpu_has_kernels_by_kind_and_a_memory_snapshot(tmp_path):
    folder, rows, out = (
        save_chat_model(tmp_path / "tiny"),
        tmp_path / "rows.jsonl",
        tmp_path / "out",
    )
    rows.write_text(
        "".join(json.dumps(dict(prompt=f"{i}?", completion=f"{i}")) + "\n" for i in range(8))
    )
    argv = [
        "train",
        "--model_name",
        folder,
        "--dataset",
        str(rows),
        "--output_dir",
        str(out),
        "--compile",
        "false",
        "--profile",
        "--profiling_output",
        str(out / "profiles"),
    ]
    ((code, text, errors),) = run_ranks(call, 1, [argv], grouped=False, device="cuda")[0]
    assert code == 0, errors
    table = (out / "profiles" / "table_steps_5-6_rank_0.txt").read_text()
    kinds = {line[:22].strip(): line[22:].split() for line in table.splitlines()[2:]}
    assert float(kinds["products"][1]) > 0 and float(kinds["quantize, dequantize"][1]) > 0
    assert table.strip() in text
    with open(out / "profiles" / "memory_steps_4-4_rank_0.pickle", "rb") as file:
        assert pickle.load(file)["device_traces"][0]
