"""AdamW whose states take 2 or 1 bytes instead of 4, for weights that are sharded or not.

What full fine-tuning of 8 billion weights needs to fit 80 GB: 2 bytes of weight, 2 of gradient, and
two states of 1 byte. Arithmetic is in float32; bfloat16 results are rounded stochastically
(`rounding.py`), weights and states alike.

8-bit states are block-wise quantized, arXiv:2110.02861, by bitsandbytes' ops. A block never spans two
rows, so states are sharded by rows as their weights are, and can be saved, loaded and cut anew for
another number of ranks. bitsandbytes' own AdamW8bit fails on sharded tensors; torchao's takes its
rounding from each rank's random generator, which lets replicas drift apart (docs/LOG.md).

Shapes: a weight (..., O, I), its codes likewise, its scales (..., O, I / blocksize).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..choices.optimizers import CHUNK, TOGETHER
from ..dist import local_rows
from .base import ShardedOptimizer, int32, sent, zeros_beside
from .rounding import element_bits, hashed, store

_BLOCKSIZES = (256, 128, 64)
_MIN_8BIT_SIZE = 4096  # smaller weights keep float32 states, as in bitsandbytes
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}  # signed?


class CompactAdamW(ShardedOptimizer):
    """AdamW with states in "bf16", or in "8bit" where a weight's rows are whole blocks."""

    def __init__(
        self,
        params,
        lr: float,
        state_dtype: str,
        betas=(0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.state_dtype = state_dtype

    def new_state(self, p: Tensor) -> dict[str, Tensor]:
        """Zero moments of a weight; 8-bit ones have scales beside their codes."""
        eight = self.state_dtype == "8bit"
        block = blocksize(p) if eight else None
        dtype = torch.uint8 if block else torch.float32 if eight else torch.bfloat16
        state = {moment: zeros_beside(p, p.shape[-1:], dtype) for moment in _MOMENTS}
        if not block:
            return state
        return state | {
            f"{moment}_absmax": zeros_beside(p, (p.shape[-1] // block,), torch.float32)
            for moment in _MOMENTS
        }

    def update_all(self, due):
        """AdamW's update of every weight and its moments, in place.

        Small weights of one kind are updated together: adapters are hundreds, and each would be some ten
        launches that take longer than its values.
        """
        for batch in batches(piece for each in due for piece in pieces(*each)):
            update(batch)


@dataclass(frozen=True)
class WeightChunk:
    """Values of one weight, as views of all that belongs to them, each (N,) but for the scales."""

    weight: Tensor
    grad: Tensor
    moments: dict[str, Tensor]  # codes, or the moments themselves
    scales: dict[str, Tensor]  # of the codes, (N / blocksize,); empty without codes
    first: int  # place of the first value in the whole weight
    salt: int
    factors: tuple[float, ...]
    device: torch.device  # where it is updated

    @property
    def kind(self) -> tuple:
        """What pieces that are updated together have in common."""
        blocks = [len(self.moments[name]) // len(scale) for name, scale in self.scales.items()]
        return (
            self.weight.dtype,
            self.grad.dtype,
            self.weight.device,
            self.device,
            *blocks,
            *(m.dtype for m in self.moments.values()),
            *self.factors,
        )


def pieces(p: Tensor, state: dict[str, Tensor], group: dict, salt: int) -> Iterator[WeightChunk]:
    """This rank's values of a weight, CHUNK at a time."""
    weight, first_row, _ = local_rows(p)
    local = {name: local_rows(value)[0].view(-1) for name, value in state.items() if name != "step"}
    first, factors = (
        first_row * (p.numel() // p.shape[0]),
        _update_factors(group, int(state["step"])),
    )
    weight, grad = weight.view(-1), local_rows(p.grad)[0].reshape(-1)
    for start in range(0, len(weight), CHUNK):
        share = start, min(start + CHUNK, len(weight)), len(weight)
        yield WeightChunk(
            cut(weight, *share),
            cut(grad, *share),
            {name: cut(local[name], *share) for name in _MOMENTS},
            {
                name: cut(local[f"{name}_absmax"], *share)
                for name in _MOMENTS
                if f"{name}_absmax" in local
            },
            first + start,
            salt,
            factors,
            _place_of_update(p),
        )


def cut(tensor: Tensor, start: int, stop: int, count: int) -> Tensor:
    """What belongs to the values (start, stop) of a weight of `count`: one of each, or of each block."""
    block = count // len(tensor)
    return tensor[start // block : stop // block]


def batches(found: Iterable[WeightChunk]) -> Iterator[list[WeightChunk]]:
    """Pieces of one kind together, up to TOGETHER values; larger ones alone."""
    waiting: dict[tuple, list[WeightChunk]] = {}
    for piece in found:
        batch = waiting.setdefault(piece.kind, [])
        if batch and sum(len(other.weight) for other in batch) + len(piece.weight) > TOGETHER:
            yield waiting.pop(piece.kind)
            batch = waiting.setdefault(piece.kind, [])
        batch.append(piece)
    yield from waiting.values()


def update(batch: list[WeightChunk]):
    """AdamW's update of pieces of one kind."""
    device, factors = batch[0].device, batch[0].factors
    weights = [piece.weight for piece in batch]
    weight = joined(weights, device)
    moments = [unpacked(batch, name) for name in _MOMENTS]
    run = _compiled_update() if device.type == "cuda" else _adamw_update
    run(
        weight,
        joined([piece.grad for piece in batch], device),
        *moments,
        sent(list(factors), torch.float32, device),
        _weight_offsets(batch),
    )
    for name, moment in zip(_MOMENTS, moments, strict=True):
        pack(batch, name, moment)
    give_back(weight, weights)


def joined(parts: list[Tensor], device: torch.device) -> Tensor:
    """Tensors (N,) behind one another on `device`; a single one that is there is itself."""
    parts = [part.to(device, non_blocking=True) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def give_back(whole: Tensor, parts: list[Tensor]):
    """The other way: write what was updated where it came from."""
    if len(parts) == 1 and whole is parts[0]:
        return
    split = whole.split([len(part) for part in parts])
    if whole.device == parts[0].device:
        torch._foreach_copy_(parts, split)
    else:
        for part, new in zip(parts, split, strict=True):
            part.copy_(new)


def _weight_offsets(batch: list[WeightChunk]) -> Tensor:
    """Place in its whole weight, less that in the batch, and salt: of all values, or of each (2, N)."""
    device, starts = batch[0].device, [0]
    for piece in batch:
        starts.append(starts[-1] + len(piece.weight))
    of_pieces = [
        [int32(piece.first - start) for piece, start in zip(batch, starts, strict=False)],
        [piece.salt for piece in batch],
    ]
    sent_there = sent(of_pieces, torch.int32, device)
    if len(batch) == 1:
        return sent_there[:, 0]
    # repeat_interleave gives each piece one warp: 1.7 ms for 13 million values (docs/LOG.md).
    index = torch.arange(starts[-1], device=device, dtype=torch.int32)
    ends = sent(starts[1:], torch.int32, device)
    return sent_there.index_select(1, torch.bucketize(index, ends, right=True, out_int32=True))


def _place_of_update(p: Tensor) -> torch.device:
    """Where a weight is updated: by the GPU also if it is kept in host memory.

    On the host the many small operations of rounding and quantization would take minutes a step.
    """
    if isinstance(p, DTensor) and p.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return p.device


def blocksize(p: Tensor) -> int | None:
    """The largest block that divides a row, or None where 8 bits are not used."""
    if p.dim() < 2 or p.numel() < _MIN_8BIT_SIZE:
        return None
    return next((size for size in _BLOCKSIZES if p.shape[-1] % size == 0), None)


def _update_factors(group: dict, step: int) -> tuple[float, ...]:
    """Numbers of one step: decay, step size, sqrt of the second bias correction, betas, eps."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    return (
        1 - lr * group["weight_decay"],
        lr / (1 - beta1**step),
        (1 - beta2**step) ** 0.5,
        beta1,
        beta2,
        group["eps"],
    )


def _adamw_update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    factors: Tensor,
    places: Tensor,
):
    """The update of N weights and their moments, in place.

    `places`, (2,) or (2, N), is as in `element_bits`. Numbers that change with the step are tensors, so
    that the compiled form is compiled once.
    """
    decay, step_size, bias, beta1, beta2, eps = factors.unbind()
    grad = grad.float()
    m = torch.lerp(grad, exp_avg.float(), beta1)
    v = torch.lerp(grad * grad, exp_avg_sq.float(), beta2)
    w = weight.float() * decay - step_size * m / (v.sqrt() / bias + eps)
    bits = element_bits(len(weight), places)
    store(weight, w, bits)
    store(exp_avg, m, bits >> 16)
    store(exp_avg_sq, v, hashed(bits, places[1]))


@cache
def _compiled_update():
    """`_adamw_update` in one kernel: each value is read and written once."""
    return torch.compile(_adamw_update, fullgraph=True, dynamic=True)


def unpacked(batch: list[WeightChunk], name: str) -> Tensor:
    """A moment to update: itself, a copy, or 8-bit codes made float32, where the batch is updated."""
    device, scales = batch[0].device, [piece.scales[name] for piece in batch if piece.scales]
    codes = joined([piece.moments[name] for piece in batch], device)
    if not scales:
        return codes
    absmax = joined(scales, device)
    return torch.ops.bitsandbytes.dequantize_blockwise(
        codes, absmax, _code_table(_MOMENTS[name], device), len(codes) // len(absmax), torch.float32
    )


def pack(batch: list[WeightChunk], name: str, moment: Tensor):
    """Write an updated moment back, to its codes if there are."""
    own, scales = (
        [piece.moments[name] for piece in batch],
        [p.scales[name] for p in batch if p.scales],
    )
    if not scales:
        return give_back(moment, own)
    block = len(own[0]) // len(scales[0])
    codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(
        moment, _code_table(_MOMENTS[name], moment.device), block
    )
    give_back(codes, own)
    give_back(absmax, scales)


@cache
def _code_table(signed: bool, device: torch.device) -> Tensor:
    """The 256 values of a code: dynamic exponents, between -1 or 0 and 1."""
    return create_dynamic_map(signed=signed).to(device)
