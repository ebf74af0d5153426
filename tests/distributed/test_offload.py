"""Offload changes where things wait, and no gradient: docs/cases.md row 18, on CPU ranks."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_parity import assert_equal_run, train_cases
from tests.parts import in_parts, rest
from tests.ranks import run_ranks
from tests.tiny import (
    RANK,
    SEED,
    padded_batch,
    reference_model,
    reference_run,
    save_tiny,
    tiny_rows,
)

ACCUMULATION = 3
OFFLOADS = [
    dict(),
    dict(use_cpu_offload=True),
    dict(use_activation_cpu_offload=True),
    dict(use_cpu_offload=True, use_activation_cpu_offload=True),
]
PARTS = [
    dict(use_cpu_offload=True, use_trained_cpu_offload=trained, use_vocabulary_cpu_offload=rows)
    for trained in (False, True)
    for rows in (False, True)
]
STEPS = tiny_rows(steps=3, rows_per_step=2 * ACCUMULATION)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3)


def accumulated_gradients(
    folder: str, device: str, cases: list[dict], repeats: int = 1, rows=STEPS[0]
) -> list[list[dict]]:
    """For each case, the whole gradients of each repeat of one step of 3 micro-batches.

    A step before them, in which torch.compile meets the lengths of the rows, does not count.
    """
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor, rank_device
    from fsdp_qlora.training.step import train_step

    class Keep(torch.optim.SGD):
        """Takes no step and keeps the gradients."""

        def step(self):
            found.append(
                {
                    n: full_tensor(p.grad.to(place)).cpu().clone()
                    for n, p in trainable_parameters(model).items()
                }
            )

    results, place = [], rank_device(device)
    torch._dynamo.reset()  # once: like blocks of several cases share their graphs
    for case in cases:
        config = RunConfig(
            **dict(
                model_name=folder,
                precision="fp32",
                lora_rank=RANK,
                seed=SEED,
                lora_dropout=0.0,
                device=device,
            )
            | case
        )
        model, found = build_model(config, place), []
        for name, p in trainable_parameters(model).items():  # B of zeros would hide what A gets
            if ".lora_B." in name:
                torch.nn.init.constant_(p, 0.01)
        shared = config.sequence_parallel
        own = rows[dist.get_rank() // shared :: dist.get_world_size() // shared]
        batches = [padded_batch([row]) for row in own]
        for batch in batches if shared > 1 else ():
            del batch["attention_mask"]
        for _ in range(1 + repeats):
            train_step(
                model,
                Keep(trainable_parameters(model).values(), 0.0),
                batches,
                no_sync=config.no_sync,
            )
        results.append(found[1:])
    return results


def assert_all_equal(results: list[list[dict]], cases: list[dict]):
    """Every repeat of every case has the gradients of the first, bit by bit."""
    reference = results[0][0]
    assert all(gradient.abs().sum() > 0 for gradient in reference.values())
    for case, repeats in zip(cases, results, strict=True):
        for repeat, gradients in enumerate(repeats):
            unequal = [n for n in reference if not torch.equal(gradients[n], reference[n])]
            assert not unequal, (case, repeat, unequal[:3])


@pytest.mark.parametrize("strategy", ["full_shard", rest("shard_grad_op")])
@pytest.mark.parametrize("offloads", in_parts([*OFFLOADS[1:], *PARTS], 2, 6, then=(0, 1, 3, 4, 5)))
def test_accumulated_gradients_are_bit_equal_with_every_offload(folder, strategy, offloads):
    cases = [o | dict(sharding_strategy=strategy) for o in (OFFLOADS[0], *offloads)]
    for results in run_ranks(accumulated_gradients, 2, folder, "cpu", cases, 2):
        assert_all_equal(results, cases)


@pytest.mark.parametrize("compiled", [False, rest(True)])
def test_a_compiled_ddp_step_is_bit_equal_with_what_ddp_can_offload(folder, compiled):
    cases = [
        o | dict(sharding_strategy="ddp", compile=compiled)
        for o in (OFFLOADS[0], OFFLOADS[2], dict(use_vocabulary_cpu_offload=True))
    ]
    assert_all_equal(run_ranks(accumulated_gradients, 2, folder, "cpu", cases)[0], cases)


KEPT = [  # settings under which attention's outputs are kept, and move with activation offload
    dict(),
    dict(use_cpu_offload=True),
    dict(wrap_policy="attention_mlp"),  # whose weights are gathered and freed inside of blocks
    dict(sequence_parallel=2),
    dict(compile=True),
    dict(compile=True, sequence_parallel=2),
]


def with_outputs_moved(folder: str, cases: list[dict]) -> tuple[list[list[dict]], list[tuple]]:
    """The gradients of each case, how many inputs and outputs went to the host, and if they fit."""
    from fsdp_qlora.memory.activation_offload import _HostStore

    moved, counts, put = [], [], _HostStore.put

    def seen(store, tensor, *more, **late):
        moved.append((bool(late), tensor.numel()))
        return put(store, tensor, *more, **late)

    _HostStore.put, results = seen, []
    for case in cases:
        moved.clear()
        results += accumulated_gradients(folder, "cpu", [case])
        inputs = {n for late, n in moved if not late}
        outputs = {n for late, n in moved if late}
        late = sum(late for late, _ in moved)
        counts.append((len(moved) - late, late, outputs == {2 * n for n in inputs}))
    return results, counts


@pytest.mark.parametrize("kept", in_parts(KEPT, 0, 2, 3, then=(1, 4, 5)))
def test_attentions_kept_outputs_move_under_every_sharding(kept, tmp_path):
    """Heads of twice the hidden size, so that no other tensor has an output's size."""
    folder = save_tiny(tmp_path, num_hidden_layers=3, head_dim=32)
    common = dict(activation_policy="keep_attention")
    cases = [
        settings | common | offload for settings in kept for offload in (OFFLOADS[0], OFFLOADS[2])
    ]
    for results, counts in run_ranks(with_outputs_moved, 2, folder, cases):
        for plain in range(0, len(cases), 2):
            pair = slice(plain, plain + 2)
            assert_all_equal(results[pair], cases[pair])
            assert counts[plain] == (0, 0, True)
            inputs, outputs, fit = counts[plain + 1]
            assert inputs == outputs > 0 and fit


@pytest.mark.parametrize("both", [[True], rest([False, True])])
def test_one_rank_may_offload_too(folder, both):
    cases = [o | dict(no_sync=no_sync) for o in OFFLOADS for no_sync in both]
    assert_all_equal(run_ranks(accumulated_gradients, 1, folder, "cpu", cases)[0], cases)


TILES = dict(mlp_tiles=3, use_cpu_offload=True, wrap_policy="attention_mlp")
CLIPPED = [
    dict(train_type="full", no_sync=True) | OFFLOADS[3],
    dict(train_type="qlora") | OFFLOADS[1],
    dict(train_type="qlora") | TILES,
]
OTHERS = [
    o | dict(train_type=t, no_sync=no_sync)
    for o in OFFLOADS[1:]
    for t in ("full", "qlora")
    for no_sync in (False, True)
] + [dict(train_type="full") | TILES]


@pytest.mark.parametrize("cases", [CLIPPED, rest(OTHERS)])
def test_runs_with_offload_or_tiles_and_clipping_equal_one_process(folder, cases):
    results = run_ranks(train_cases, 2, folder, STEPS, cases)[0]
    references = {t: reference_run(reference_model(folder, t), STEPS) for t in ("full", "qlora")}
    for case, result in zip(cases, results, strict=True):
        assert_equal_run(result, references[case["train_type"]], 1e-5, case)
