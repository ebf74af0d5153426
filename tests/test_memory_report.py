"""--profile_memory reads torch's record of allocations, and out of memory names the next rung."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.fsdp

import fsdp_qlora
from fsdp_qlora.config import RunConfig
from fsdp_qlora.data import Step
from fsdp_qlora.observe.memory_report import (
    ESTIMATED,
    MemoryWatch,
    _by_part,
    _next_rung,
    _standing_tensors,
    address,
    memory_table,
)
from fsdp_qlora.observe.memory_timeline import _RULES, PARTS, draw, part_of, timeline
from fsdp_qlora.plan import Plan
from fsdp_qlora.plan_draft import draft_plan

from .test_checkpointing_policy import loss_and_gradients, tiny_model
from .tiny import save_tiny

CPU = torch.device("cpu")
MODEL = "/env/fsdp_qlora/"
FSDP = "/env/torch/distributed/fsdp/_fully_shard/"


def frames(*where) -> list[dict]:
    return [dict(filename=file, name=name, line=1) for file, name in where]


def step_of(rows: int, tokens: int) -> Step:
    """The twelfth step, of one micro-batch."""
    return Step(11, 0, [dict(input_ids=torch.zeros(rows, tokens))], rows, 0, 0, 0)


def record(*moves) -> list[dict]:
    """Events of a step: (action, address, bytes, frames)."""
    clock = count(1_000_000)
    return [
        dict(action=action, addr=addr, size=size, frames=list(where), time_us=next(clock))
        for action, addr, size, *where in moves
    ]


@pytest.mark.parametrize(
    "part, where",
    [
        (
            "unsharded",
            [
                (FSDP + "_fsdp_collectives.py", "allocate"),
                (FSDP + "_fsdp_collectives.py", "foreach_all_gather"),
                (MODEL + "chunked_cross_entropy.py", "_chunked_forward"),
            ],
        ),
        (
            "gradients",
            [
                (FSDP + "_fsdp_collectives.py", "allocate"),
                (FSDP + "_fsdp_collectives.py", "foreach_reduce"),
            ],
        ),
        (
            "unsharded",
            [
                (MODEL + "vocab_parallel.py", "gathered_weight"),
                (MODEL + "chunked_cross_entropy.py", "_chunked_forward"),
            ],
        ),
        (
            "logits",
            [
                (MODEL + "chunked_cross_entropy.py", "_loss_and_d_logits"),
                (MODEL + "chunked_cross_entropy.py", "forward"),
            ],
        ),
        (
            "activations",
            [
                (MODEL + "adapters.py", "forward"),
                (MODEL + "chunked_cross_entropy.py", "_chunked_forward"),
            ],
        ),
        ("optimizer", [("/env/torch/optim/adamw.py", "_multi_tensor_adamw")]),
        ("activations", []),
    ],
)
def test_an_allocation_is_told_by_the_lines_that_asked_for_it(part, where):
    assert part_of(frames(*where)) == part


@pytest.mark.parametrize("file, function, part", _RULES)
def test_every_rule_names_functions_that_exist(file, function, part):
    """A file or function that is renamed would silently count as activations."""
    roots = [Path(package.__file__).parent for package in (fsdp_qlora, torch.distributed.fsdp)]
    sources = [path.read_text() for root in roots for path in root.rglob(file)]
    assert any(f"def {function}" in source for source in sources)


def test_the_peak_holds_what_was_there_before_and_what_came_since():
    loss = frames((MODEL + "chunked_cross_entropy.py", "_loss_and_d_logits"))
    events = record(
        ("alloc", 10, 100),
        ("alloc", 11, 500, *loss),
        ("segment_alloc", 12, 9999),
        ("free_requested", 11, 500),
        ("free_completed", 11, 500),
        ("alloc", 11, 40),
        ("free_requested", 10, 100),
        ("free_requested", 2, 30),
    )
    found = timeline(
        events,
        {1: (1000, "weights"), 2: (30, "adapters")},
        allocated=1100,
        gradients={11},
        optimizer_time=events[5]["time_us"],
    )
    assert found.at_peak() == dict.fromkeys(PARTS, 0) | dict(
        weights=1000, adapters=30, other=70, activations=100, logits=500
    )
    ends = {part: values[-1] for part, values in found.parts.items()}
    assert ends == dict.fromkeys(PARTS, 0) | dict(weights=1000, other=70, gradients=40)


def test_every_part_of_the_estimate_is_beside_one_that_is_measured():
    from fsdp_qlora.estimate import peak

    listed = [name for names in ESTIMATED.values() for name in names]
    assert sorted(listed) == sorted(peak.PARTS) and set(ESTIMATED) == set(PARTS)


def test_what_stands_on_the_device_is_known_by_its_address(tmp_path):
    model = tiny_model(save_tiny(tmp_path), "qlora")
    loss_and_gradients(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer.step()
    found = _standing_tensors(model, optimizer, CPU)
    sizes = dict.fromkeys(("weights", "adapters", "optimizer"), 0)
    for size, part in found.values():
        sizes[part] += size
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    # Two states of a weight's size, and a count of steps of 4 bytes.
    assert sizes["optimizer"] == 2 * trained + 4 * len(optimizer.state)
    assert {address(p) for p in model.parameters()} <= set(found)


def test_the_table_has_the_estimate_beside_what_was_measured(tmp_path):
    found = timeline(record(("alloc", 10, 3 * 2**30)), {1: (2**30, "weights")}, 2**30)
    parts = {name: 0.25 for names in ESTIMATED.values() for name in names}
    estimate = SimpleNamespace(parts=parts | dict(slack=0.5), peak_allocated=3.25)
    lines = memory_table(found, 5 * 2**30, estimate).splitlines()
    assert "weights          1.00 GiB     1.50 GiB" in lines
    assert "activations      3.00 GiB     0.50 GiB" in lines
    assert (
        lines[-1] == "slack            1.00 GiB     0.50 GiB"
        and _by_part(estimate)["logits"] == 0.25
    )
    assert draw(found, tmp_path / "memory.png") and (tmp_path / "memory.png").stat().st_size > 5000


# ---- out of memory -----------------------------------------------------------------------------


def test_the_guide_is_climbed_rung_by_rung_until_only_shorter_rows_are_left():
    changes = [
        dict(activation_policy="recompute_all"),
        dict(sharding_strategy="full_shard"),
        dict(use_cpu_offload=True),
        dict(use_activation_cpu_offload=True),
        dict(use_trained_cpu_offload=True),
        dict(batch_size=1),
    ]
    config = RunConfig(sharding_strategy="ddp", activation_policy="keep_all", batch_size=2)
    for change in changes:
        (name, value), advice = *change.items(), _next_rung(draft_plan(config, 2))
        assert advice.startswith(f"--{name} {str(value).lower() if value is True else value}"), (
            advice
        )
        config = replace(config, **change)
    last = _next_rung(draft_plan(config, 2))
    assert "--context_length" in last and "more GPUs" in last


def test_one_gpu_shards_only_to_offload():
    config = RunConfig(sharding_strategy="ddp")
    assert (
        _next_rung(draft_plan(config, 1)) == "--sharding_strategy full_shard --use_cpu_offload true"
    )
    kept = replace(config, compute_dtype="fp8", keep_fp8_weights=True)
    assert _next_rung(draft_plan(kept, 1)) == "--keep_fp8_weights false"


def test_out_of_memory_is_one_line_with_the_largest_part_and_what_to_do(tmp_path):
    folder = save_tiny(tmp_path)
    config = RunConfig(model_name=folder, lora_rank=4)
    watch = MemoryWatch(config, draft_plan(config, 1), tiny_model(folder, "qlora"), None, CPU)
    with pytest.raises(ValueError) as error, watch.step(step_of(2, 512)):
        raise torch.OutOfMemoryError("CUDA out of memory")
    message = str(error.value)
    assert (
        message.startswith(
            "GPU memory ran out in step 12 at a micro-batch of 2 x 512 tokens: by the estimate, "
        )
        and "\n" not in message
    )
    assert "next option: --use_cpu_offload true;" in message


def test_on_the_cpu_the_profile_says_that_it_needs_a_gpu_and_the_step_runs(capsys):
    watch = MemoryWatch(RunConfig(profile_memory=True), Plan(), None, None, CPU)
    with watch.step(step_of(1, 1)):
        done = True
    assert done and "--profile_memory needs a GPU" in capsys.readouterr().out
