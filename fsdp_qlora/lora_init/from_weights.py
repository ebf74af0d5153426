"""Adapters that begin from the weights they adapt: PiSSA, OLoRA and LoftQ, as PEFT defines them.

    PiSSA  arXiv:2404.02948  the largest R singular values of W
    OLoRA  arXiv:2406.01775  the first R columns and rows of W = Q R
    LoftQ  arXiv:2310.08659  what quantization lost: the R largest singular values of W - Q(W), and again

The first two train what they took: the frozen base is W - scaling B0 A0, quantized or not. LoftQ in
more than one round quantizes such a rest too. What was taken out stays known (`Taken`), so that the
base can be made again, and so that a saved adapter fits the original base (saved.py).

Shapes: I inputs, O outputs, R rank.  W (O, I), A (R, I), B (O, R)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_TILE = 256  # rows that are multiplied together, so that any slice of rows gets the same bits


@dataclass(frozen=True)
class LoraInit:
    """How adapters begin: --init_lora_weights, and LoftQ's rounds of quantizing and correcting."""

    kind: str = "default"
    loftq_iter: int = 1

    @property
    def from_weights(self) -> bool:
        """Whether the first values are made of W."""
        return self.kind != "default"

    @property
    def changes_base(self) -> bool:
        """Whether the frozen weights are W without a part of it."""
        return self.from_weights and (self.kind != "loftq" or self.loftq_iter > 1)


@dataclass
class Taken:
    """What W lacks in the frozen base, scaling B A, as A (R, I) and B (O, R) or this rank's rows."""

    a: Tensor
    b: Tensor


@dataclass
class FirstValues:
    """A and B of an adapter at step 0, and what its base lacks."""

    a: Tensor
    b: Tensor
    taken: Taken | None = None


def first_values(
    weight: Tensor,
    start: LoraInit,
    rank: int,
    scaling: float,
    dtype: torch.dtype,
    rounded: Callable[[Tensor], Tensor],
    seed: int = 0,
) -> FirstValues:
    """An adapter's first values in `dtype`, from its whole W (O, I).

    rounded: what the quantized form of a tensor like W stands for. seed: of PiSSA's fast SVD.
    """
    weight = weight.float()
    if start.kind == "loftq":
        return loftq(weight, start.loftq_iter, rank, scaling, dtype, rounded)
    if start.kind == "olora":
        q, r = torch.linalg.qr(weight)
        a, b = r[:rank], q[:, :rank]
    else:
        a, b = largest(weight, rank, scaling, _fast_steps(start.kind), seed)
    a, b = (t.to(dtype).contiguous() for t in (a, b))
    return FirstValues(a, b, Taken(a, b))


def loftq(
    weight: Tensor,
    rounds: int,
    rank: int,
    scaling: float,
    dtype: torch.dtype,
    rounded: Callable[[Tensor], Tensor],
) -> FirstValues:
    """Quantize what the adapter leaves, give the adapter what quantization lost; some rounds."""
    taken, rest = None, weight
    for i in range(rounds):
        a, b = (t.to(dtype).contiguous() for t in largest(weight - rounded(rest), rank, scaling))
        if i + 1 == rounds:
            return FirstValues(a, b, taken)
        taken = Taken(a, b)
        rest = weight - low_rank_rows(a, b, scaling, 0, len(weight))


def largest(
    weight: Tensor, rank: int, scaling: float, steps: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A, B with scaling B A = the `rank` largest singular values of a weight, shared between both.

    steps: of subspace iteration, for a fast SVD that is nearly right; None is the exact one.
    """
    if steps is None:
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    else:
        with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
            torch.manual_seed(seed)
            u, s, v = torch.svd_lowrank(weight, rank, niter=steps)
        vh = v.t()
    root = (s[:rank] / scaling).sqrt()
    return root[:, None] * vh[:rank], u[:, :rank] * root


def _fast_steps(kind: str) -> int | None:
    """N of `pissa_niter_N`."""
    found = re.fullmatch(r"pissa_niter_(\d+)", kind)
    return int(found[1]) if found else None


def low_rank_rows(a: Tensor, b: Tensor, scaling: float, start: int, stop: int) -> Tensor:
    """Rows (start, stop) of scaling B A in fp32, from the whole A and B; equal bits for any slice."""
    a, b, first = a.float(), b.float(), start // _TILE * _TILE
    tiles = [b[row : row + _TILE] @ a for row in range(first, stop, _TILE)]
    if not tiles:
        return a.new_empty(0, a.shape[1])
    return torch.cat(tiles)[start - first : stop - first] * scaling
