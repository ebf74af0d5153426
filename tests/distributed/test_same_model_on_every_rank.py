"""Ranks start equal and stay equal, though each has its own random state, and clip by one norm.

The usual faults: adapters drawn from each rank's own generator, adapters added after sharding that
no reduction sees, a hybrid strategy that reduces within a group only, and a gradient norm that each
rank takes over its own shard.
"""

from __future__ import annotations

import random

import pytest
import torch

from fsdp_qlora.choices import STRATEGIES
from tests.distributed.test_parity import checksum, flat, relative
from tests.parts import slow
from tests.ranks import run_ranks
from tests.tiny import RANK, SEED, padded_batch, reference_model, save_tiny, tiny_rows

SIMPLE = [s.name for s in STRATEGIES.values() if not s.is_hybrid]  # two ranks have no groups
TRAIN_TYPES = ("full", "lora", "qlora")
STEPS = tiny_rows(steps=5, rows_per_step=4)
RATE = 0.3
MAX_NORM = 0.2  # below the norm of every step of every train type, so that clipping changes it


def train_from_own_seeds(folder: str, steps, cases) -> list[dict]:
    """Checksums after 0, 1 and 5 steps of plain SGD, the norms, and the trained weights."""
    import torch.distributed as dist

    from fsdp_qlora.adapters import trainable_parameters
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor
    from fsdp_qlora.training.step import train_step

    rank, world, results = dist.get_rank(), dist.get_world_size(), []
    for strategy, train_type in cases:
        torch.manual_seed(rank)
        random.seed(rank)
        config = RunConfig(
            model_name=folder,
            precision="fp32",
            lora_rank=RANK,
            lora_alpha=8,
            lora_dropout=0.0,
            seed=SEED,
            sharding_strategy=strategy,
            train_type=train_type,
        )
        model = build_model(config, torch.device("cpu"))
        trained = trainable_parameters(model)
        optimizer = torch.optim.SGD(trained.values(), RATE)
        sums, norms, losses = [checksum(model)], [], []
        for rows in steps:
            result = train_step(
                model,
                optimizer,
                [padded_batch([r]) for r in rows[rank::world]],
                max_grad_norm=MAX_NORM,
            )
            sums.append(checksum(model))
            norms.append(result.grad_norm)
            losses.append(result.loss)
        results.append(
            dict(
                checksums=[sums[i] for i in (0, 1, 5)],
                norms=norms,
                losses=losses,
                weights={n: full_tensor(p.detach()).clone() for n, p in trained.items()},
            )
        )
    return results


def reference(folder: str, train_type: str) -> tuple[list[float], list[float], dict]:
    """The same in one process on whole steps: norms, losses, weights."""
    model = reference_model(folder, train_type)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), RATE)
    norms, losses = [], []
    for rows in STEPS:
        batch = padded_batch(rows)
        logits = model(**{k: batch[k] for k in ("input_ids", "attention_mask")}).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), MAX_NORM).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, losses, {n: p.detach() for n, p in trained.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    "world_size, strategies",
    [(2, SIMPLE), slow(4, list(STRATEGIES))],
)
def test_ranks_seeded_apart_hold_one_model_and_clip_by_its_norm(folder, world_size, strategies):
    cases = [(s, t) for s in strategies for t in TRAIN_TYPES]
    by_rank = run_ranks(train_from_own_seeds, world_size, folder, STEPS, cases)
    expected = {t: reference(folder, t) for t in TRAIN_TYPES}
    for case, *ranks in zip(cases, *by_rank, strict=True):
        for step in range(3):
            assert len({r["checksums"][step] for r in ranks}) == 1, (case, step)
        norms, losses, weights = expected[case[1]]
        assert min(norms) > MAX_NORM, norms
        assert len(set(ranks[0]["checksums"])) == 3, case  # the weights did move
        for rank in ranks:
            assert relative(rank["norms"], norms) < 1e-5, case
        assert relative(ranks[0]["losses"], losses) < 1e-5, case
        assert relative(flat(ranks[0]["weights"], weights), flat(weights, weights)) < 1e-5, case
