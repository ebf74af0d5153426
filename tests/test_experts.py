"""Mixtures of experts in one process: how rows are counted, and what a run says of experts."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp_qlora.build import build_model
from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.estimate.experts import PART_VALUES as estimated_values
from fsdp_qlora.experts import ExpertLoad, mixtures_of
from fsdp_qlora.experts.grouped_matmul import PART_VALUES
from fsdp_qlora.experts.row_sums import sum_rows

from .families import save_family
from .parts import slow
from .tokenizers import save_chat_model

CPU = torch.device("cpu")
IDS = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "settings", [{}, dict(use_gradient_checkpointing=False), slow(dict(compile=True))]
)
def test_shares_of_experts_are_those_of_what_transformers_routers_chose(settings, tmp_path):
    folder = save_family(tmp_path, "Qwen3-MoE", num_experts=64)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = plain(IDS, output_router_logits=True).router_logits
    counts = [block.topk(2).indices.flatten().bincount(minlength=64) for block in logits]
    config = RunConfig(model_name=folder, train_type="lora", precision="fp32", **settings)
    with process_group(CPU, timeout_minutes=1):
        model = build_model(config, CPU)
        load = ExpertLoad(mixtures_of(model), CPU)
        for ids in IDS.split(1):
            model(input_ids=ids, labels=ids).loss.backward()
        model.eval()(input_ids=IDS)  # rows that are not trained on do not count
        busiest, idle = load.take().tolist()
        nothing = load.take().tolist()
    assert busiest == pytest.approx(sum(c.max() / c.sum() for c in counts).item() / 2)
    assert idle == pytest.approx(sum((c == 0).sum() / 64 for c in counts).item() / 2) and idle > 0
    assert nothing == [0, 1]


@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_records_how_even_experts_are_used_and_says_that_they_stay_frozen(
    adapted, tmp_path, capsys
):
    save_chat_model(tmp_path / "base")
    vocab = len(AutoTokenizer.from_pretrained(tmp_path / "base"))
    save_family(tmp_path / "base", "Qwen3-MoE", vocab_size=vocab)
    rows = [dict(prompt=f"{i}?", completion="yes " * (1 + i % 3)) for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = dict(
        model_name=tmp_path / "base", dataset=tmp_path / "rows.jsonl", device="cpu", world_size=1,
        precision="fp32", lora_rank=2, lora_dropout=0, compile="false", global_batch_size=4,
        output_dir=tmp_path / "out", log_every=1, save_model="false",
    )  # fmt: skip
    if adapted:
        flags["lora_target_parameters"] = "experts"
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    assert not main(["train", *arguments])
    said = "not adapted: the 4 experts in each of 2 blocks; --lora_target_parameters experts"
    assert (said in capsys.readouterr().out) == (not adapted)
    lines = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["kind"] == "step"]
    assert steps and all(0.25 <= step["busiest_expert_share"] <= 0.5 for step in steps)
    assert all(0 <= step["idle_expert_share"] <= 0.5 for step in steps)


def test_the_estimate_unpacks_as_many_weights_at_a_time_as_a_run():
    assert estimated_values == PART_VALUES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_a_token_are_summed_in_fp32_wherever_they_lie(dtype):
    values = torch.randn(24, 40).to(dtype)
    rows = torch.randperm(24).view(8, 3)
    expected = values.float()[rows].sum(1).to(dtype)
    torch.testing.assert_close(sum_rows(values, rows), expected, rtol=2**-7, atol=2**-7)
