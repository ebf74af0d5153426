"""Every strategy trains as one process does that sees all rows.

The reference is plain transformers, bitsandbytes' Linear4bit and PEFT (`tests.tiny`), on the union of
the ranks' rows. All cases of one world size share one spawn.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.parts import in_parts, rest, slow
from tests.ranks import run_ranks
from tests.tiny import (
    CLIP,
    LR,
    RANK,
    SEED,
    padded_batch,
    reference_model,
    reference_run,
    save_tiny,
    tiny_rows,
)

TRAIN_TYPES = ("full", "lora", "qlora")
STEPS = tiny_rows(steps=5, rows_per_step=4)
WORLDS = {
    2: ("ddp", "shard_grad_op", "full_shard"),
    4: ("ddp", "shard_grad_op", "full_shard", "hybrid_shard_grad_op", "hybrid_full_shard"),
}
# Variations of one setting each, where sharding could change the result.
VARIATIONS = [
    dict(use_gradient_checkpointing=False),
    dict(no_sync=True),
    dict(compile=False),
    dict(wrap_policy="attention_mlp"),
    dict(wrap_policy="min_params", min_wrap_params=9000),
    dict(backward_prefetch="none"),
    dict(backward_prefetch="backward_post"),
    dict(backward_prefetch="backward_post", wrap_policy="attention_mlp"),
    dict(forward_prefetch=True),
    dict(gather_once=True),
    dict(sharding_strategy="hybrid_full_shard", shard_group_size=2),  # one group, of all ranks
    dict(use_cpu_offload=True),
    dict(reentrant_checkpointing=True),
    dict(sharding_strategy="ddp", train_type="qlora", no_sync=True),
    dict(sharding_strategy="shard_grad_op", train_type="full", no_sync=True),
]


def train_case(folder: str, steps, settings: dict) -> dict:
    """Train on this rank's rows of each step, one row a micro-batch."""
    return build_and_train(dict(model_name=folder) | settings, steps)[2]


def build_and_train(case: dict, steps=STEPS):
    """A run's configuration, its model after the steps in fp32, and what `train_model` says of them."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig

    config = RunConfig(
        **dict(precision="fp32", lora_rank=RANK, lora_alpha=8, lora_dropout=0.0, seed=SEED) | case
    )
    model = build_model(config, torch.device("cpu"))
    return config, model, train_model(model, steps, config.no_sync)


def train_model(model, steps, no_sync: bool = False) -> dict:
    """Train a built model on this rank's rows of each step, one row a micro-batch."""
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    optimizer = build_optimizer(model, "adamw", LR, 0.1)
    rank, world, losses, norms, checksums = dist.get_rank(), dist.get_world_size(), [], [], []
    checksums.append(checksum(model))
    for rows in steps:
        micro_batches = [padded_batch([row]) for row in rows[rank::world]]
        result = train_step(model, optimizer, micro_batches, max_grad_norm=CLIP, no_sync=no_sync)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        checksums.append(checksum(model))
    weights = {n: full_tensor(p.detach()).clone() for n, p in trainable_parameters(model).items()}
    return dict(losses=losses, norms=norms, weights=weights, checksums=checksums)


def checksum(model) -> float:
    """One number for all parameters, frozen and trained: over the ranks that share a copy."""
    import torch.distributed as dist

    from fsdp_qlora.dist import local_rows

    sums = torch.zeros(
        2, dtype=torch.float64
    )  # of whole tensors, of shards: whole numbers, so exact
    group = None
    for p in model.parameters():
        sharded = isinstance(p, DTensor)
        if sharded:
            group = p.device_mesh.get_group(-1)
        sums[int(sharded)] += local_rows(p.detach())[0].view(torch.int16).double().sum()
    if group is not None:
        dist.all_reduce(sums[1:], group=group)
    return sums.sum().item()


def train_cases(folder: str, steps, cases: list[dict]) -> list[dict]:
    return [train_case(folder, steps, case) for case in cases]


def relative(ours, reference) -> float:
    """Norm of the difference over the norm of the reference."""
    ours, reference = torch.as_tensor(ours), torch.as_tensor(reference)
    return ((ours - reference).norm() / reference.norm()).item()


def flat(weights: dict, order) -> torch.Tensor:
    return torch.cat([weights[name].flatten() for name in order])


def assert_equal_run(ours: dict, reference, tolerance: float, label):
    """Weights may differ by more: Adam divides a rounding error by as small a gradient."""
    losses, norms, weights = reference
    assert set(ours["weights"]) == set(weights), label
    assert relative(ours["losses"], losses) < tolerance, label
    assert relative(ours["norms"], norms) < tolerance, label
    assert relative(flat(ours["weights"], weights), flat(weights, weights)) < 5 * tolerance, label


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def references(folder):
    return {kind: reference_run(reference_model(folder, kind), STEPS) for kind in TRAIN_TYPES}


@pytest.mark.parametrize(
    "world_size, train_types", [(2, TRAIN_TYPES), rest(4, ["qlora"]), slow(4, TRAIN_TYPES)]
)
def test_every_strategy_and_train_type_equals_one_process(
    folder, references, world_size, train_types
):
    cases = [
        dict(sharding_strategy=s, train_type=t) for s in WORLDS[world_size] for t in train_types
    ]
    by_rank = run_ranks(train_cases, world_size, folder, STEPS, cases)
    for case, *results in zip(cases, *by_rank, strict=True):
        assert_equal_run(results[0], references[case["train_type"]], 1e-5, case)
        for step in (0, 1, 5):
            assert len({r["checksums"][step] for r in results}) == 1, (case, step)


@pytest.mark.parametrize("train_type", ["qlora", slow("lora")])
@pytest.mark.parametrize(
    "variations", in_parts(VARIATIONS, 1, 7, 8, 9, 10, 13, then=(0, 2, 3, 4, 5, 6, 11, 12))
)
def test_settings_that_save_memory_or_traffic_do_not_change_the_result(
    folder, references, train_type, variations
):
    cases = [dict(sharding_strategy="full_shard", train_type=train_type) | v for v in variations]
    results = run_ranks(train_cases, 2, folder, STEPS, cases)[0]
    for case, result in zip(cases, results, strict=True):
        assert_equal_run(result, references[case["train_type"]], 1e-5, case)


def test_three_ranks_with_uneven_shards_equal_one_process(folder, references):
    steps = tiny_rows(steps=3, rows_per_step=3, seed=5)
    reference = reference_run(reference_model(folder, "qlora"), steps)
    cases = [dict(sharding_strategy="full_shard", train_type="qlora")]
    (result,) = run_ranks(train_cases, 3, folder, steps, cases)[0]
    assert_equal_run(result, reference, 1e-5, cases[0])


@pytest.mark.parametrize("train_type", ["full", rest("qlora")])
def test_tied_embeddings_and_biases_train_alike_in_every_strategy(tmp_path, train_type):
    folder = save_tiny(tmp_path, "qwen2", tie_word_embeddings=True)
    cases = [dict(sharding_strategy=s, train_type=train_type) for s in WORLDS[2]]
    results = run_ranks(train_cases, 2, folder, STEPS, cases)[0]
    reference = reference_run(reference_model(folder, train_type), STEPS)
    for case, result in zip(cases, results, strict=True):
        assert_equal_run(result, reference, 1e-5, case)


def test_bf16_compute_with_fp32_adapters_stays_within_bf16_rounding(folder):
    """bf16 rounds each activation by up to 2^-9 = 0.2%; a loss averages many of them.

    The reference rounds at other places (PEFT multiplies adapters in fp32), so runs may differ by
    about one rounding; the strategies among themselves differ only in the order of sums.
    """
    reference = reference_run(reference_model(folder, "qlora", torch.bfloat16), STEPS)
    cases = [dict(sharding_strategy=s, train_type="qlora", precision="bf16") for s in WORLDS[2]]
    results = run_ranks(train_cases, 2, folder, STEPS, cases)[0]
    for case, result in zip(cases, results, strict=True):
        assert relative(result["losses"], reference[0]) < 2**-9, case
        assert relative(result["losses"], results[0]["losses"]) < 2**-12, case
        assert all(w.dtype == torch.float32 for w in result["weights"].values())
