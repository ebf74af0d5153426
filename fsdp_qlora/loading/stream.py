"""Stream a safetensors checkpoint into a model that is already sharded.

No rank ever holds the model: it is built on the meta device (meta.py), and each rank reads only its
own rows of each tensor, quantizes them on its device and copies them into its shard. What is wrong with
a folder is found from its file headers (weight_files.py), before any rank waits for another.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from queue import SimpleQueue
from time import perf_counter

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..dist import is_first_copy, local_rows, print_main, ranks_from_env, sum_over_ranks
from ..quantization.formats import quantize_rows
from ..quantization.quantize import QuantLinear
from .weight_files import Checkpoint, FileSpan

PIECE_VALUES = 2**22  # values of a tensor that are read and quantized at a time
_ALIGNMENT = 64  # bytes, of tensors in a staging buffer


@dataclass(frozen=True)
class WeightSlice:
    """Some rows of a parameter: where they come from, and where in the model they go."""

    key: str  # the tensor's name in the checkpoint
    start: int  # rows of the whole tensor
    stop: int
    width: int  # values in a row, unquantized
    local: Tensor  # this rank's storage of these rows
    absmax: Tensor | None = None  # its scales, if the model quantizes it
    module: QuantLinear | None = None
    first_copy: bool = True  # no rank before this one holds the same rows

    def cut(self) -> Iterator[WeightSlice]:
        """The same in pieces of at most PIECE_VALUES values, or one row."""
        step = max(1, PIECE_VALUES // max(1, self.width))
        for start in range(self.start, self.stop, step):
            stop = min(start + step, self.stop)
            mine = slice(start - self.start, stop - self.start)
            yield replace(
                self,
                start=start,
                stop=stop,
                local=self.local[mine],
                absmax=None if self.absmax is None else self.absmax[mine],
            )


_ADDED_BY_PEFT = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)\.")


def checkpoint_key(name: str) -> str:
    """A parameter's name in the checkpoint: without what PEFT put around it."""
    return _ADDED_BY_PEFT.sub(".", name.removeprefix("base_model.model."))


def _base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(checkpoint key, owner, leaf name, parameter) of every tensor that a checkpoint fills.

    A shared tensor comes once, under its first name; adapters and scales come from elsewhere.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if ".lora_" in name or leaf == "absmax" or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            yield checkpoint_key(name), module, leaf, parameter


def _is_packed(module: nn.Module, leaf: str) -> bool:
    """True for the bytes of a quantized weight."""
    return isinstance(module, QuantLinear) and leaf == "weight"


def rank_pieces(model: nn.Module, but: Collection[str] = ()) -> Iterator[WeightSlice]:
    """What this rank must read, in the model's order, a parameter at a time; `but` is there already."""
    for key, module, leaf, parameter in _base_parameters(model):
        if key in but:
            continue
        local, start, stop = local_rows(parameter)
        piece = WeightSlice(
            key,
            start,
            stop,
            math.prod(parameter.shape[1:]),
            local,
            first_copy=is_first_copy(parameter),
        )
        if _is_packed(module, leaf):
            piece = replace(
                piece, width=module.in_features, module=module, absmax=local_rows(module.absmax)[0]
            )
        yield piece


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Every tensor that the model needs from a checkpoint, with its unquantized shape."""

    def unpacked(module) -> tuple[int, int]:
        return module.out_features, module.in_features

    return {
        key: unpacked(module) if _is_packed(module, leaf) else tuple(parameter.shape)
        for key, module, leaf, parameter in _base_parameters(model)
    }


def check_complete(model: nn.Module, checkpoint: Checkpoint, but: Collection[str] = ()):
    """Refuse a checkpoint that lacks a tensor of the model, or has it otherwise: shape, or no numbers.

    `but` names tensors that come from elsewhere. Raises ValueError, so that no weight is ever left
    uninitialised.
    """
    shapes = checkpoint.shapes
    for key, shape in expected_shapes(model).items():
        if key in but:
            continue
        found = shapes.get(key)
        if found is None:
            raise ValueError(
                f"{checkpoint.folder} has no tensor {key}; its files are not those of config.json"
            )
        checkpoint.check_numbers(key)
        if found != shape:
            raise ValueError(
                f"{checkpoint.folder}: {key} has shape {found}, config.json wants "
                f"{shape}; the two are of different models"
            )


def load_buffers(model: nn.Module, checkpoint: Checkpoint):
    """Fill the buffers that a checkpoint holds, such as a router's corrections, on every rank."""
    kept = model.state_dict().keys() & checkpoint.stored.keys()
    for name, buffer in model.named_buffers():
        if name in kept:
            buffer.copy_(checkpoint.read(checkpoint.stored[name]).view(buffer.shape))


def load_weights(
    model: nn.Module,
    source: Checkpoint,
    device: torch.device,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
    but: Collection[str] = (),
) -> None:
    """Fill the model's frozen and trained base weights with this rank's rows, quantizing on `device`.

    `source` is a Checkpoint, or has its methods `spans`, `read`, `values` and `placed`. Reads run ahead
    in `workers` threads, a few pieces at a time. `progress(bytes)` is told of every piece. `but` names
    tensors of the checkpoint that are in the model already. Raises ValueError naming a file that can't
    be read; whether all tensors are there is `check_complete`'s question.
    """
    pieces = (piece for whole in rank_pieces(model, but) for piece in whole.cut())
    with torch.no_grad():
        for piece, tensors in _read_ahead(pieces, source, device, workers or _reader_threads()):
            place(piece, source.values(piece, tensors))
            source.placed(piece)
            if progress:
                progress(sum(t.nbytes for t in tensors))


def place(piece: WeightSlice, values: tuple[Tensor, ...]):
    """Copy a piece's values into the model, quantizing numbers that it wants quantized."""
    if piece.module and len(values) == 1:
        values = quantize_rows(*values, piece.module.quant_type, piece.module.absmax_dtype)
    piece.local.copy_(values[0])
    if piece.module:
        piece.absmax.copy_(values[1])


def _reader_threads() -> int:
    """Threads that read for one rank, unless --loading_workers says."""
    return max(2, min(4, (os.cpu_count() or 1) // ranks_from_env().local_world_size))


def _read_ahead(
    pieces: Iterator[WeightSlice], source: Checkpoint, device: torch.device, workers: int
) -> Iterator[tuple[WeightSlice, list[Tensor]]]:
    """(piece, what its source asked for, on `device`) in order, with some more under way.

    The tensors are valid until the next piece is asked for.
    """
    staging = HostBuffers(device, workers + 2)
    pool = ThreadPoolExecutor(workers)
    ahead = ((piece, pool.submit(staging.read, source, source.spans(piece))) for piece in pieces)
    pending = deque(islice(ahead, workers + 2))
    try:
        while pending:
            piece, future = pending.popleft()
            buffer, tensors = future.result()
            yield piece, [t.to(device, non_blocking=True) for t in tensors]
            staging.release(buffer)
            pending.extend(islice(ahead, 1))
    finally:
        pool.shutdown(cancel_futures=True)


class HostBuffers:
    """Host buffers that threads read into and the device copies from; pinned for CUDA."""

    def __init__(self, device: torch.device, count: int):
        self.pin = device.type == "cuda"
        self.free: SimpleQueue = SimpleQueue()
        for _ in range(count):
            self.free.put((torch.empty(0, dtype=torch.uint8), None))

    def read(self, source: Checkpoint, spans: list[FileSpan]) -> tuple[Tensor, list[Tensor]]:
        """Read spans into one buffer; returns it, and the tensors that it holds."""
        buffer, copied = self.free.get()
        if copied is not None:
            copied.synchronize()
        sizes = [-(-span.nbytes // _ALIGNMENT) * _ALIGNMENT for span in spans]
        if buffer.numel() < sum(sizes):
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self.pin)
        parts = buffer[: sum(sizes)].split(sizes) if spans else []
        return buffer, [
            source.read(span, part[: span.nbytes]) for span, part in zip(spans, parts, strict=True)
        ]

    def release(self, buffer: Tensor):
        """Let a buffer be filled again once the device has copied it."""
        copied = torch.cuda.Event() if self.pin else None
        if copied is not None:
            copied.record()
        self.free.put((buffer, copied))


class LoadProgress:
    """Bytes and their rate while rank 0 loads: a bar on a terminal, and one line at the end."""

    def __init__(self, model: nn.Module, source: Checkpoint, but: Collection[str] = ()):
        spans = (span for piece in rank_pieces(model, but) for span in source.spans(piece))
        self.total, self.start = sum(span.nbytes for span in spans), perf_counter()
        self.bar = tqdm(
            total=self.total,
            desc="loading",
            unit="B",
            unit_scale=True,
            leave=False,
            disable=not (ranks_from_env().is_main and sys.stderr.isatty()),
        )

    def __call__(self, count: int):
        self.bar.update(count)

    def close(self):
        """Wait for the device, and say how much was read in which time, by all ranks."""
        self.bar.close()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        (total,) = sum_over_ranks(self.total)
        seconds = max(perf_counter() - self.start, 1e-6)
        print_main(
            f"loaded {total / 1e9:.1f} GB in {seconds:.1f} s, {total / 1e9 / seconds:.1f} GB/s"
        )
