"""Which blocks a Llama-Pro model has: those of its base, with copies evenly among them.

A copy of the block before it whose output projections are zero changes nothing, until it is trained;
the base stays as it is. LLaMA Pro is arXiv:2401.02415, which adds 8 blocks to 32. Pure: no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import RunConfig
from .arch import ModelShape

FOLDER = re.compile(r"blk_exp-(\d+)-(\d+)$")  # how the original script names expanded weights


@dataclass(frozen=True)
class Expansion:
    """The blocks of an expanded model."""

    sources: tuple[int, ...]  # for each block, the block of the base whose weights it begins with
    new: tuple[int, ...]  # places of the blocks that were added

    def new_in(self, blocks: str) -> tuple[str, ...]:
        """Names of the new blocks in a model whose list of blocks is called `blocks`."""
        return tuple(f"{blocks}.{place}" for place in self.new)


def expansion(blocks: int, new: int) -> Expansion:
    """One new block after each of the first `new` groups of blocks // new, as in the original script.

    new: how many, or -1 for one in four. Raises ValueError for more than there are blocks.
    """
    if new == -1:
        new = max(1, blocks // 4)
    if not 1 <= new <= blocks:
        raise ValueError(
            f"--llama_pro_blocks {new}: the model has {blocks} blocks; give 1 to {blocks}"
        )
    sources: list[int] = []
    places: list[int] = []
    group = blocks // new
    for block in range(blocks):
        sources.append(block)
        if (block + 1) % group == 0 and len(places) < new:
            places.append(len(sources))
            sources.append(block)
    return Expansion(tuple(sources), tuple(places))


def expansion_of(config: RunConfig, blocks: int) -> Expansion | None:
    """What a run does to a base of `blocks`; None without Llama-Pro.

    Raises ValueError, naming the flag, for a number or a folder that does not suit the base.
    """
    if config.adapter != "llama_pro":
        return None
    if config.llama_pro_path is None:
        return expansion(blocks, config.llama_pro_blocks)
    before, after = _folder_counts(config.llama_pro_path)
    if before == blocks and after <= 2 * before:
        return expansion(blocks, after - before)
    raise ValueError(
        f"--llama_pro_path {config.llama_pro_path} says {before} to {after} blocks, and "
        f"--model_name {config.model_name} has {blocks}; give the base it was made from"
    )


def expanded_shape(shape: ModelShape, config: RunConfig) -> ModelShape:
    """A base's shape as a run makes it."""
    grown = expansion_of(config, shape.layers - shape.new_blocks)
    return replace(shape, layers=len(grown.sources), new_blocks=len(grown.new)) if grown else shape


def _folder_counts(path: str) -> tuple[int, int]:
    """(blocks of the base, blocks after expansion) by the name of a folder of expanded weights.

    Raises ValueError, naming --llama_pro_path, for another name.
    """
    found = FOLDER.search(Path(path).name)
    if not found or not 0 < int(found[1]) < int(found[2]):
        raise ValueError(
            f"--llama_pro_path {path}: the name must end as in blk_exp-32-35, with the "
            "number of blocks before and after; or leave it out, and blocks are added "
            "while the base is read"
        )
    return int(found[1]), int(found[2])
