"""The hash of a base's files: the same on any number of ranks, another for any other byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsdp_qlora.build import build_model
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.loading import content_hash
from tests.ranks import run_ranks
from tests.tiny import save_tiny

CPU = torch.device("cpu")


def config(folder, **settings) -> RunConfig:
    return RunConfig(
        **dict(model_name=str(folder), precision="fp32", lora_rank=2, device="cpu") | settings
    )


def hashes(cases: list[RunConfig], chunk: int = 512) -> list[str]:
    """The hash of each case's base, with chunks that end amid rows and ranks' parts."""
    content_hash.CHUNK = chunk
    return [build_model(case, CPU).weights_hash for case in cases]


def alone(*cases: RunConfig) -> list[str]:
    with process_group(CPU):
        return hashes(list(cases))


@pytest.fixture
def folder(tmp_path):
    return Path(save_tiny(tmp_path / "model", hidden_size=80, intermediate_size=144, head_dim=20))


def resaved(folder: Path, target: Path, change=lambda tensors: None, parts: int = 1) -> Path:
    """A copy of a model's folder with other weights, in so many files."""
    target.mkdir()
    for path in folder.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    names = sorted(tensors)
    for part in range(parts):
        save_file({n: tensors[n] for n in names[part::parts]}, target / f"model-{part}.safetensors")
    return target


def test_any_ranks_strategies_forms_and_files_give_one_hash(folder, tmp_path):
    cases = [
        config(folder),
        config(folder, quant="none"),
        config(folder, sharding_strategy="ddp"),
        config(folder, init_lora_weights="pissa", quant="none"),
        config(resaved(folder, tmp_path / "parts", parts=3)),
    ]
    (expected,) = set(alone(*cases))
    for world in (2, 3):
        assert run_ranks(hashes, world, cases) == [[expected] * len(cases)] * world


def test_any_other_byte_gives_another_hash(folder, tmp_path):
    def changed(name: str, at: int, by: int):
        def change(tensors):
            tensors[name].view(-1).view(torch.uint8)[at] ^= by

        return change

    norm, weight = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
    end = "model.embed_tokens.weight"
    changes = [
        changed(norm, 0, 1),
        changed(weight, 40_001, 128),
        changed(weight, 511, 1),
        changed(weight, 512, 1),
        changed(end, -1, 64),
    ]

    def swap(tensors):
        rows = tensors[weight]
        tensors[weight] = torch.cat([rows[1:2], rows[:1], rows[2:]])

    def exchange(tensors):
        other = weight.replace("layers.1", "layers.0")
        tensors[weight], tensors[other] = tensors[other], tensors[weight]

    folders = [
        resaved(folder, tmp_path / str(n), change)
        for n, change in enumerate([*changes, swap, exchange])
    ]
    found = alone(*map(config, [folder, *folders]))
    assert len(set(found)) == len(found)


def apart(folder: str, other: str) -> str:
    """What ranks say that read copies of a base of which one is damaged."""
    import torch.distributed as dist

    try:
        return hashes([config([folder, other][dist.get_rank()], sharding_strategy="ddp")])[0]
    except ValueError as error:
        return str(error)


def test_ranks_that_read_the_same_rows_otherwise_are_refused(folder, tmp_path):
    def damage(tensors):
        tensors["model.norm.weight"][7] += 1

    first, second = run_ranks(apart, 2, str(folder), str(resaved(folder, tmp_path / "b", damage)))
    assert (
        first == second and "--model_name holds another model.norm.weight than other ranks" in first
    )
