"""CUDA graphs: where they pay, what no graph can hold, batches of few shapes; see also tests/gpu."""

from __future__ import annotations

import pytest
import torch

from fsdp_qlora.build import planned_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import collate, collate_packed
from fsdp_qlora.data.collate import few_widths, padded_length
from fsdp_qlora.memory.tiled_mlp import apply_tiled_mlp
from fsdp_qlora.plan_draft import draft_plan
from fsdp_qlora.training.cuda_graphs import (
    _shape_of,
    _why_no_graphs,
    _with_steady_borders,
    check_graphs,
    uses_graphs,
)
from tests.tiny import save_tiny

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    "settings, ranks, pays",
    [
        (dict(), 1, True),
        (dict(), 2, True),
        (dict(sharding_strategy="shard_grad_op"), 2, True),
        (dict(sharding_strategy="hybrid_full_shard"), 4, False),
        (dict(gather_once=True), 2, False),
        (dict(no_sync=True), 2, False),
        (dict(no_sync=True, sharding_strategy="ddp"), 2, True),
        (dict(train_type="full"), 2, False),
        (dict(train_type="full"), 1, True),
        (dict(use_cpu_offload=True), 2, False),
        (dict(sharding_strategy="ddp"), 8, True),
        (dict(batch_size=16), 1, True),
        (dict(batch_size=17), 1, False),
        (dict(batch_size=32, global_batch_size=8), 2, True),
        (dict(compile=False), 1, False),
        (dict(use_activation_cpu_offload=True), 1, False),
        (dict(use_cpu_offload=True), 1, False),
    ],
)
def test_short_micro_batches_that_stay_on_the_gpu_are_replayed(settings, ranks, pays):
    config = RunConfig(model_name="m", **dict(context_length=512) | settings)
    assert draft_plan(config, ranks).loop.cuda_graphs is pays


@pytest.mark.parametrize(
    "family, settings, reason",
    [
        ("llama", {}, ""),
        ("qwen3", {}, ""),
        ("mistral", dict(sliding_window=8), "masks"),
        ("llama", dict(mlp_tiles=2, lora_dropout=0.1), "tiles"),
    ],
)
def test_a_model_that_no_graph_can_hold_is_named(family, settings, reason, tmp_path):
    window = {k: settings.pop(k) for k in ("sliding_window",) if k in settings}
    config = RunConfig(model_name=save_tiny(tmp_path, family, **window), lora_rank=2, **settings)
    model, _ = planned_model(config, CPU)
    apply_tiled_mlp(model, config.mlp_tiles, ["recompute_all"] * 2)
    plan = draft_plan(config, 1)
    found = _why_no_graphs(plan, model, GPU)
    assert reason in found and bool(reason) == bool(found)
    assert _why_no_graphs(plan, model, CPU)


def test_on_a_cpu_graphs_are_refused_only_if_asked_for(tmp_path):
    config = RunConfig(model_name=save_tiny(tmp_path), cuda_graphs=True)
    model, _ = planned_model(config, CPU)
    with pytest.raises(ValueError, match="--cuda_graphs true: there is no GPU; leave it out"):
        check_graphs(config, draft_plan(config, 1), model, CPU)
    assert not uses_graphs(draft_plan(RunConfig(model_name=config.model_name), 1), model, CPU)


def test_a_step_whose_last_micro_batch_differs_is_refused_before_weights_are_read(tmp_path):
    """Where they are split."""
    folder = save_tiny(tmp_path)
    model, _ = planned_model(RunConfig(model_name=folder, lora_rank=2), CPU)

    def refused(world_size: int, **settings) -> str:
        config = RunConfig(model_name=folder, cuda_graphs=True, **settings)
        try:
            check_graphs(config, draft_plan(config, world_size), model, GPU)
        except ValueError as error:
            return str(error)
        return ""

    cases = [
        dict(no_sync=True),
        dict(gather_once=True),
        dict(no_sync=True, sharding_strategy="ddp"),
        {},
    ]
    for world_size, found in (
        (1, ["", "", "", ""]),
        (2, ["--no_sync", "--gather_once", "", ""]),
    ):
        for settings, flag in zip(cases, found, strict=True):
            said = refused(world_size, **settings)
            assert flag in said and bool(flag) == bool(said), settings


@pytest.mark.parametrize(
    "settings, flag",
    [
        (dict(compile=False), "compile"),
        (dict(use_cpu_offload=True), "use_cpu_offload"),
        (dict(profile_memory=True), "profile_memory"),
        (dict(wrap_policy="attention_mlp", sharding_strategy="full_shard"), "wrap_policy"),
        (dict(use_activation_cpu_offload=True), "use_activation_cpu_offload"),
    ],
)
def test_what_moves_or_counts_memory_and_graphs_exclude_each_other(settings, flag):
    with pytest.raises(ValueError, match=f"--cuda_graphs.*--{flag}|--{flag}.*--cuda_graphs"):
        RunConfig(model_name="m", cuda_graphs=True, **settings)


def rows(*lengths: int):
    return [(torch.arange(n), torch.arange(n)) for n in lengths]


def test_batches_of_near_widths_have_one_shape():
    padding = dict(pad_to=few_widths(512))
    shapes = {
        _shape_of(collate(rows(*lengths), 0, **padding)) for lengths in ((5, 9), (60, 64), (33, 2))
    }
    assert len(shapes) == 1
    assert _shape_of(collate(rows(65, 2), 0, **padding)) not in shapes


@pytest.mark.parametrize("most", [10, 64, 100, 1000, 4096, 131072])
def test_rows_of_any_length_have_few_widths_that_are_little_longer(most):
    widths = few_widths(most)
    assert widths == sorted(set(widths)) and widths[-1] == most
    assert len(widths) <= 4 * max(1, most.bit_length() - 6)
    lengths = torch.arange(min(257, most), most + 1)
    padded = torch.tensor([padded_length(n, pad_to=widths) for n in lengths.tolist()])
    assert (padded >= lengths).all() and (padded <= 1.25 * lengths).all()
    with pytest.raises(ValueError, match=f"{most + 1} tokens.*--context_length"):
        padded_length(most + 1, pad_to=widths)


def test_packed_batches_have_one_shape_and_the_same_rows():
    lengths_of = (5, 9), (100,), (3,) * 40
    batches = [collate_packed([rows(*lengths)], 0, pad_to=128) for lengths in lengths_of]
    steady = [_with_steady_borders(batch) for batch in batches]
    assert len({_shape_of(batch) for batch in batches}) == 3
    assert len({_shape_of(batch) for batch in steady}) == 1
    for before, after in zip(batches, steady, strict=True):
        borders = before["cu_seq_lens_q"]
        assert torch.equal(after["cu_seq_lens_q"][: len(borders)], borders)
        assert (after["cu_seq_lens_q"][len(borders) :] == 128).all()
        assert torch.equal(after["input_ids"], before["input_ids"])
