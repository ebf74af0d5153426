"""What a run says about itself before its first step."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.build import planned_model
from fsdp_qlora.config import BatchPlan, RunConfig, plan_batches
from fsdp_qlora.preflight import precision
from fsdp_qlora.training import step_log
from fsdp_qlora.training.describe import (
    _dtypes_line,
    _ends_in_warmup,
    first_step_line,
    steps_line,
)

from .tiny import save_tiny


@pytest.mark.parametrize(
    "settings, line",
    [
        (dict(train_type="full"), "dtypes: trained bfloat16, matmuls in bf16"),
        (
            dict(train_type="lora", precision="fp32"),
            "dtypes: frozen float32, trained float32, matmuls of frozen weights in fp32",
        ),
        (
            dict(train_type="qlora", adapter_dtype="bf16"),
            "dtypes: frozen bfloat16, float32 (nf4 bytes in bfloat16), trained bfloat16, matmuls of frozen "
            "weights in bf16",
        ),
    ],
)
def test_dtypes_are_those_of_the_weights_there_are(tmp_path, settings, line):
    config = RunConfig(model_name=save_tiny(tmp_path), **settings)
    assert _dtypes_line(planned_model(config, torch.device("cpu"))[0], config) == line


@pytest.mark.parametrize(
    "packing, steps, line",
    [
        (False, 1, "1 step, of 1 row: micro-batch 1 row x accumulation 1 x 1 rank"),
        (
            True,
            None,
            "steps until the stream ends, of 1 row: micro-batch 1 bin x accumulation 1 x 1 rank",
        ),
    ],
)
def test_steps_are_counted_in_words(packing, steps, line):
    assert steps_line(RunConfig(packing=packing), BatchPlan(1, 1, 1), steps, 1) == line


def test_ranks_that_share_rows_are_counted_as_groups():
    config = RunConfig(sequence_parallel=2, batch_size=3)
    line = steps_line(config, plan_batches(config, 4), 5, 4)
    assert line == (
        "5 steps, of 12 rows: micro-batch 3 rows x accumulation 2 x 2 groups of 2 ranks that share rows"
    )


def test_a_warm_up_as_long_as_the_run_is_noticed():
    assert _ends_in_warmup(RunConfig(lr_warmup_steps=9), 9)
    assert not _ends_in_warmup(RunConfig(lr_warmup_steps=9), 10) and not _ends_in_warmup(
        RunConfig(), 1
    )
    assert not _ends_in_warmup(RunConfig(lr_warmup_steps=9), None)


def test_what_torch_compiled_before_the_first_step_is_no_part_of_it(monkeypatch):
    """Answers before it (--samples) compile graphs of their own."""
    spent = [20.0]
    monkeypatch.setattr(step_log, "compile_seconds", lambda: spent[0])
    lagged = step_log.LaggedLog(None, torch.device("cpu"))
    spent[0] = 31.0
    lagged.restart_clock()
    assert lagged.compile_seconds() == 0.0 and "compil" not in first_step_line(2.0, 0.0)
    spent[0] = 36.5
    assert "first step: 9.0 s, 5.5 of that compiling" in first_step_line(
        9.0, lagged.compile_seconds()
    )


@pytest.mark.parametrize("has_bf16", [False, True])
@pytest.mark.parametrize(
    "settings, slow",
    [
        (dict(), True),
        (dict(precision="bf16_autocast"), True),
        (dict(precision="fp32"), False),
        (dict(device="cpu"), True),
    ],
)
def test_a_cpu_without_bf16_takes_fp32_unless_a_precision_is_given(
    monkeypatch, settings, slow, has_bf16
):
    monkeypatch.setattr(precision, "has_bf16_instructions", lambda: has_bf16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config, is_slow = RunConfig(**settings), slow and not has_bf16
    assert precision.faster_precision(config, set()) == ["--precision", "fp32"] * is_slow
    assert precision.faster_precision(config, {"precision"}) == []
    line = precision.precision_line(config, torch.device("cpu"))
    assert ("--precision fp32" in line) is is_slow
    assert line.startswith("matmuls in fp32") is (config.precision == "fp32" and not has_bf16)
    assert not precision.precision_line(config, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert precision.faster_precision(config, set()) == (
        ["--precision", "fp32"] if is_slow and config.device == "cpu" else []
    )
