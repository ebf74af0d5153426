"""When weights are gathered, read from a profile of one step on two gloo ranks.

FSDP names each gather after its unit. Losses under these settings are compared with one process in
`test_parity`.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny import RANK, padded_batch, save_tiny, tiny_rows

BLOCKS, LINEARS = 3, 7
(ROWS,) = tiny_rows(steps=1, rows_per_step=6)


def events_of_steps(folder: str, cases: list[dict]) -> list[list[str]]:
    """For each case, what a step of three micro-batches did, in order: the second step it makes."""
    import torch.distributed as dist

    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    runs = []
    for case in cases:
        config = RunConfig(
            **dict(
                model_name=folder,
                precision="fp32",
                lora_rank=RANK,
                lora_dropout=0.0,
                use_gradient_checkpointing=False,
            )
            | case
        )
        model = build_model(config, torch.device("cpu"))
        optimizer = build_optimizer(model)
        batches = [padded_batch([row]) for row in ROWS[dist.get_rank() :: dist.get_world_size()]]
        train_step(model, optimizer, batches)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train_step(model, optimizer, batches)
        events = profile.profiler.kineto_results.events()  # as they were recorded, not as a tree
        names = [e.name() for e in sorted(events, key=lambda e: e.start_ns())]
        runs.append([short(name) for name in names if short(name)])
    return runs


def short(name: str) -> str:
    """gather N, reduce N of block N, forward N, "backward" of one linear layer, or nothing."""
    block = name.rsplit("layers.", 1)[-1].rstrip(")")
    for prefix, what in {
        "FSDP::all_gather (": "gather",
        "FSDP::pre_forward (": "forward",
        "FSDP::post_backward_reduce (": "reduce",
    }.items():
        if name.startswith(prefix) and block.isdecimal():
            return f"{what} {block}"
    return "backward" if name == "fsdp_qlora::adapted_linear_backward" else ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=BLOCKS)
    cases = {
        "pre": {},
        "post": dict(backward_prefetch="backward_post"),
        "none": dict(backward_prefetch="none"),
        "forward": dict(forward_prefetch=True),
        "once": dict(gather_once=True),
        "grad_op": dict(sharding_strategy="shard_grad_op"),
        "grad_op_once": dict(sharding_strategy="shard_grad_op", gather_once=True),
    }
    by_rank = run_ranks(events_of_steps, 2, folder, list(cases.values()))
    return dict(zip(cases, by_rank[0], strict=True))


def before_gather_of_block_1(events: list[str]) -> list[str]:
    """In the first backward, what came before block 1 was gathered for it."""
    gather = [i for i, e in enumerate(events) if e == "gather 1"][1]  # the first is the forward's
    start = max(i for i, e in enumerate(events[:gather]) if e.startswith("forward"))
    return [e for e in events[start + 1 : gather] if not e.startswith("gather")]


def test_backward_pre_gathers_the_next_block_before_this_ones_backward(runs):
    assert before_gather_of_block_1(runs["pre"]) == []


def test_backward_post_gathers_it_after_the_backward_and_before_the_reduction(runs):
    assert before_gather_of_block_1(runs["post"]) == ["backward"] * LINEARS


def test_none_gathers_it_when_all_of_this_block_is_done(runs):
    assert before_gather_of_block_1(runs["none"]) == ["backward"] * LINEARS + ["reduce 2"]


def test_forward_prefetch_gathers_a_block_before_the_one_ahead_of_it_runs(runs):
    gathers_first = lambda events: events.index("gather 2") < events.index("forward 2")  # noqa: E731
    assert gathers_first(runs["forward"]) and not gathers_first(runs["pre"])


@pytest.mark.parametrize(
    "case, gathers", [("pre", 2 * 3), ("grad_op", 3), ("once", 1), ("grad_op_once", 1)]
)
def test_each_block_is_gathered_as_often_per_step_as_the_settings_say(runs, case, gathers):
    """Three micro-batches: forward and backward each, forward only, or once."""
    for block in range(BLOCKS):
        assert runs[case].count(f"gather {block}") == gathers
