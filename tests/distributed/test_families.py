"""Every family of `tests.families` on two ranks equals one process of transformers, PEFT, bitsandbytes.

Of each: logits after the streamed load, then losses, gradient norms and adapters of three steps, on
plain weights and on NF4, whole on each rank and sharded. Families share a spawn. `tests/test_families.py`
is the quick part: each of them once in one process.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.distributed.test_parity import assert_equal_run, relative, train_model
from tests.families import EVERY_FAMILY, reference, save_family
from tests.parts import rest, slow
from tests.ranks import run_ranks
from tests.tiny import RANK, SEED, padded_batch, reference_run, tiny_rows

STEPS = tiny_rows(steps=3, rows_per_step=4)
SEEN = padded_batch(tiny_rows(1, 3, seed=11)[0])
# Of each way to build a block one, on NF4 and sharded; the first for every change.
QUICK = ("GPT-2", "Mixtral", "Granite 4 H")
MORE = (
    "Llama 3.2",
    "Gemma 2",
    "Qwen3.5-MoE",
    "Gemma 4",
    "Nemotron 3",
    "Llama 4",
    "gpt-oss",
    "DeepSeek V3",
)
PER_SPAWN = 12  # families
WAYS = [(kind, strategy) for kind in ("lora", "qlora") for strategy in ("ddp", "full_shard")]


def inputs() -> dict:
    return dict(input_ids=SEEN["input_ids"], attention_mask=SEEN["attention_mask"])


def train_families(folders: dict[str, str], ways: list[tuple[str, str]]) -> dict:
    """(family, kind, strategy) -> logits at load and what training gave."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig

    results = {}
    for family, folder in folders.items():
        for kind, strategy in ways:
            config = RunConfig(
                model_name=folder,
                train_type=kind,
                sharding_strategy=strategy,
                precision="fp32",
                lora_rank=RANK,
                lora_alpha=8,
                lora_dropout=0.0,
                seed=SEED,
            )
            model = build_model(config, torch.device("cpu"))
            with torch.no_grad():
                logits = model(**inputs()).logits
            results[family, kind, strategy] = dict(logits=logits) | train_model(model, STEPS)
    return results


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def saved(family: str) -> str:
        return save_family(tmp_path_factory.mktemp("family"), family)

    return saved


@pytest.fixture(scope="module")
def by_rank(folder_of):
    """What each rank gave for these families, trained in these ways, when it is asked for."""

    @cache
    def trained(families: tuple[str, ...], ways: tuple) -> list[dict]:
        folders = {family: folder_of(family) for family in families}
        return run_ranks(train_families, 2, folders, list(ways), timeout=600)

    return trained


def equals_one_process(folder_of, results: list[dict], family: str, kind: str, strategy: str):
    model = reference(folder_of(family), family, kind)
    with torch.no_grad():
        logits = model(**inputs()).logits
    ours, other = (by_case[family, kind, strategy] for by_case in results)
    rows = SEEN["attention_mask"].bool()  # what a model makes of padding means nothing
    assert relative(ours["logits"][rows], logits[rows]) < 1e-5
    assert_equal_run(ours, reference_run(model, STEPS), 2e-5, family)
    assert ours["checksums"] == other["checksums"]


@pytest.mark.parametrize("family", [*QUICK, *map(rest, MORE)])
def test_two_ranks_equal_transformers_in_one_process(folder_of, by_rank, family):
    case, spawn = ("qlora", "full_shard"), QUICK if family in QUICK else MORE
    equals_one_process(folder_of, by_rank(spawn, (case,)), family, *case)


@pytest.mark.parametrize("family", [slow(family) for family in EVERY_FAMILY])
def test_two_ranks_equal_it_on_plain_weights_and_nf4_whole_or_sharded(folder_of, by_rank, family):
    first = list(EVERY_FAMILY).index(family) // PER_SPAWN * PER_SPAWN
    spawn = tuple(EVERY_FAMILY)[first : first + PER_SPAWN]
    for case in WAYS:
        equals_one_process(folder_of, by_rank(spawn, tuple(WAYS)), family, *case)
