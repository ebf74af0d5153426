"""Where Llama-Pro's blocks go, what a mistake says, and what they cost."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.build import planned_model
from fsdp_qlora.catalog.llama_pro import _folder_counts, expanded_shape, expansion, expansion_of
from fsdp_qlora.catalog.machine import Machine
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.without_effect import settings_without_effect
from fsdp_qlora.estimate import (
    estimate,
    gathered,
    memory,
    model_flops_per_token,
    optimizer_bytes,
)
from fsdp_qlora.estimate.weights import all_trained, widest_block
from fsdp_qlora.observe import throughput
from fsdp_qlora.plan_draft import draft_plan
from tests.estimates import H100, LLAMA_8B
from tests.tiny import save_tiny


def new_ids_of_the_original_script(before: int, after: int) -> list[int]:
    split = before // (after - before)
    return [split + (split + 1) * n for n in range(after - before)]


@pytest.mark.parametrize(
    "before, after", [(32, 35), (32, 40), (32, 64), (32, 33), (30, 37), (4, 6)]
)
def test_new_blocks_are_where_the_original_script_had_them(before, after):
    grown = expansion(before, after - before)
    assert list(grown.new) == new_ids_of_the_original_script(before, after)
    assert len(grown.sources) == after
    assert [s for b, s in enumerate(grown.sources) if b not in grown.new] == list(range(before))
    assert all(grown.sources[place] == grown.sources[place - 1] for place in grown.new)


def test_unless_told_one_block_in_four_is_new_as_in_the_paper():
    assert len(expansion(32, -1).new) == 8 and len(expansion(2, -1).new) == 1


def test_the_folder_of_the_original_script_says_how_many():
    path = "/models/meta-llama/Llama-2-7b-hf_blk_exp-32-35"
    assert _folder_counts(path) == (32, 35)
    config = RunConfig(train_type="hqq_llama_pro", llama_pro_path=path)
    assert expansion_of(config, 32).new == (10, 21, 32)
    assert expansion_of(RunConfig(), 32) is None


@pytest.mark.parametrize(
    "settings, blocks, parts",
    [
        (dict(llama_pro_path="expanded"), 32, ["--llama_pro_path expanded", "blk_exp-32-35"]),
        (dict(llama_pro_path="m_blk_exp-32-35"), 28, ["32 to 35", "has 28"]),
        (dict(llama_pro_blocks=40), 32, ["--llama_pro_blocks 40", "1 to 32"]),
    ],
)
def test_a_number_or_folder_that_does_not_suit_the_base_is_refused(settings, blocks, parts):
    with pytest.raises(ValueError) as error:
        expansion_of(RunConfig(train_type="bnb_llama_pro", **settings), blocks)
    assert all(part in str(error.value) for part in parts), error.value


def test_settings_of_one_kind_do_nothing_for_the_other():
    with pytest.raises(ValueError, match="--llama_pro_blocks 3"):
        RunConfig(train_type="bnb_llama_pro", llama_pro_path="m_blk_exp-32-35", llama_pro_blocks=3)
    with pytest.raises(ValueError, match="--adapter_dtype bf16 with --precision fp32"):
        RunConfig(train_type="bnb_llama_pro", precision="fp32", adapter_dtype="bf16")
    (warning,) = settings_without_effect(RunConfig(llama_pro_blocks=3))
    assert "--llama_pro_blocks has no effect" in warning
    (warning,) = settings_without_effect(RunConfig(adapter="llama_pro", use_rslora=True))
    assert "--use_rslora has no effect" in warning


def test_the_estimate_counts_new_blocks_as_trained_and_whole():
    config = RunConfig(train_type="bnb_llama_pro", llama_pro_blocks=8)
    shape, plan = expanded_shape(LLAMA_8B, config), draft_plan(config, world_size=4)
    assert expanded_shape(shape, config) == shape and shape.layers == 40
    block = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096 + 2 * 4096
    assert all_trained(shape, plan, 1) == 8 * block * 4  # fp32
    assert optimizer_bytes(shape, plan) == 2 * all_trained(shape, plan, 4)
    qlora = memory(LLAMA_8B, draft_plan(RunConfig(), world_size=4))
    grown = memory(shape, plan)
    assert grown.parts["linears"] == qlora.parts["linears"]  # of the base, packed
    assert gathered(widest_block(shape, plan), plan) == block * 4
    found = estimate(LLAMA_8B, Machine(gpu=H100, gpus=4, memory_gib=79), config)
    assert found.memory.peak_allocated > qlora.peak_allocated
    plain = estimate(LLAMA_8B, Machine(gpu=H100, gpus=4, memory_gib=79), RunConfig())
    assert found.step.total > 1.05 * plain.step.total


def test_a_run_expects_the_memory_time_and_flops_of_its_new_blocks(tmp_path, monkeypatch):
    """Its model has them already: they are neither forgotten nor added once more."""
    monkeypatch.setattr(throughput, "gpu_of", lambda device: H100)
    folder, cpu = save_tiny(tmp_path, num_hidden_layers=8, vocab_size=128), torch.device("cpu")
    for blocks in (2, 8):
        config = RunConfig(
            model_name=folder,
            train_type="bnb_llama_pro",
            llama_pro_blocks=blocks,
            context_length=64,
        )
        plan, (model, _) = draft_plan(config, 1), planned_model(config, cpu)
        found = throughput.predicted(config, plan, model, cpu)
        wanted = estimate(model_shape(folder), Machine(gpu=H100, gpus=1, memory_gib=79), config)
        assert found["peak_allocated_gib"] == pytest.approx(wanted.memory.peak_allocated)
        assert found["seconds_per_step"] == pytest.approx(wanted.step.total)
        one = throughput.arithmetic(plan, model, cpu).of_step(64, 1, 1.0)["model_tflops_per_gpu"]
        shape = expanded_shape(model_shape(folder), config)
        assert one == pytest.approx(model_flops_per_token(shape, plan) * 64 / 1e12)
