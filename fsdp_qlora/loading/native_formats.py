"""Weights that a model's makers quantized, as numbers: one row of FORMATS for each way of storing them.

DeepSeek and Qwen publish fp8 with scales per block, gpt-oss MXFP4, Kimi K2 packed integers, others
GPTQ or AWQ. Each weight becomes an object that says which bytes hold some of its rows, and what these
stand for; so it is streamed, stacked and sharded by rows as any other, and rounded to what --quant says.

https://huggingface.co/docs/transformers/quantization/finegrained_fp8
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
https://github.com/vllm-project/compressed-tensors, https://arxiv.org/abs/2210.17323 (GPTQ),
https://arxiv.org/abs/2306.00978 (AWQ)

Shapes: O outputs, I inputs, G groups of inputs that share a scale, E experts, P integers of an int32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .weight_files import NUMBERS, Checkpoint, FileSpan, dtype_name

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)  # scales that are powers of two
# The 4 bits of MXFP4: sign, two of the exponent, one of the mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_OF_ACTIVATIONS = (".activation_scale", ".input_scale")  # which are not quantized here
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ keeps the integers of a word


@dataclass(frozen=True)
class Parts:
    """The tensors in the files that make up one weight, by what follows its layer's name."""

    folder: Path
    name: str  # of the weight
    found: dict[str, FileSpan]
    settings: dict  # quantization_config

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns of a weight that share a scale, if quantization_config says so."""
        groups = (self.settings.get("config_groups") or {}).values()
        blocks = [(g.get("weights") or {}).get("block_structure") for g in groups]
        size = next((b for b in (self.settings.get("weight_block_size"), *blocks) if b), None)
        return tuple(size) if size else None

    @property
    def by_row(self) -> bool:
        """Whether each row of a weight may have a scale of its own."""
        return self.settings.get("quant_method") == "compressed-tensors"

    def get(self, end: str, *dtypes: torch.dtype, dims: int | None = None) -> FileSpan:
        """A part that must be there in one of these types, of so many dimensions. ValueError names it."""
        part = self.found.get(end)
        self.check(part is not None, f"has no {end} beside it")
        self.check(
            (not dtypes or part.dtype in dtypes) and dims in (None, len(part.shape)),
            f"has {end} as {dtype_name(part.dtype)} of shape {part.shape}",
        )
        return part

    def check(self, holds: bool, fault: str):
        if not holds:
            raise ValueError(
                f"--model_name {self.folder}: {self.name} {fault}; download the model again, or "
                "give the 16-bit one"
            )


class _Weight:
    """A weight of numbers that is stored otherwise."""

    numbers: tuple[FileSpan, ...] = ()  # what of it is stored as the numbers that it stands for


class _Fp8(_Weight):
    """fp8 (..., O, I) with a scale for each block, each row, or all: value x scale."""

    def __init__(self, parts: Parts, scale: str):
        self.stored, self.scale = parts.found[""], parts.found[scale]
        parts.check(len(self.stored.shape) > 1, f"has shape {self.stored.shape}")
        self.shape, shape = self.stored.shape, self.scale.shape
        out, wide = self.shape[-2:]
        by_row = parts.by_row and math.prod(shape) == out
        self.block = (1, wide) if by_row else parts.block or (out, wide)
        blocks = tuple(-(-n // size) for n, size in zip(self.shape[-2:], self.block, strict=True))
        whole = (*self.shape[:-2], *blocks)
        parts.check(
            self.stored.dtype in _FP8
            and self.scale.dtype in (*NUMBERS, *_EXPONENTS)
            and (shape == whole or blocks[1] == 1 and math.prod(shape) == math.prod(whole)),
            f"is {dtype_name(self.stored.dtype)} of shape {self.shape}, which needs scales of shape "
            f"{whole}, and its {scale} is {dtype_name(self.scale.dtype)} of shape {shape}",
        )
        self.scale = self.scale.seen_as(self.scale.dtype, whole)

    def spans(self, start: int, stop: int) -> list[FileSpan]:
        return [self.stored.rows(start, stop), self.scale.rows(*self._blocks(start, stop))]

    def _blocks(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of scales that rows of the weight need: experts of a stack, or blocks."""
        size = self.block[0] if len(self.shape) == 2 else 1
        return start // size, -(-stop // size)

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        value, scale = tensors[0].float(), _scales(tensors[1])
        if len(self.shape) == 2:
            row = torch.arange(start, stop, device=value.device) // self.block[0]
            scale = scale[row - start // self.block[0]]
        else:
            scale = scale.repeat_interleave(self.block[0], dim=-2)[:, : value.shape[-2]]
        return value * scale.repeat_interleave(self.block[1], dim=-1)[..., : value.shape[-1]]


class _Mxfp4(_Weight):
    """Experts of gpt-oss: 32 values of a group in 16 bytes, (E, O, G, 16), scales 2^(byte - 127).

    transformers' parameter is (E, I, O).
    """

    def __init__(self, parts: Parts):
        self.stored = parts.get("_blocks", torch.uint8)
        self.scale, shape = parts.get("_scales", torch.uint8), self.stored.shape
        parts.check(
            len(shape) == 4 and shape[3] == 16 and self.scale.shape == shape[:3],
            f"is MXFP4 of shape {shape}, and its scales are of shape {self.scale.shape}",
        )
        self.shape = (shape[0], shape[2] * 32, shape[1])

    def spans(self, start: int, stop: int) -> list[FileSpan]:
        return [self.stored.rows(start, stop), self.scale.rows(start, stop)]

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=tensors[0].device)
        pairs = torch.stack([tensors[0] & 15, tensors[0] >> 4], dim=-1)
        numbers = values[pairs.int()].flatten(-2) * _scales(tensors[1])[..., None]
        return numbers.flatten(-2).transpose(1, 2)


class _PackedRows(_Weight):
    """compressed-tensors' integers (O, I / P), the lowest bits first, less half their range.

    Scales are (O, G), and zeros (O / P, G) if there are some.
    """

    def __init__(self, parts: Parts, bits: int):
        self.bits, self.each = bits, 32 // bits
        self.stored = parts.get("weight_packed", torch.int32, dims=2)
        self.scale = parts.get("weight_scale", *NUMBERS, dims=2)
        self.zero, self.group_of = (
            parts.found.get(end) for end in ("weight_zero_point", "weight_g_idx")
        )
        self.shape = tuple(parts.get("weight_shape", torch.int64, torch.int32).read().tolist())
        rows, words = self.stored.shape
        parts.check(
            len(self.shape) == 2
            and (rows, words) == (self.shape[0], -(-self.shape[1] // self.each))
            and self.scale.shape[0] in (1, rows),
            f"is packed in {bits} bits of shape {(rows, words)} for a weight of shape {self.shape}, with "
            f"scales of shape {self.scale.shape}",
        )

    def spans(self, start: int, stop: int) -> list[FileSpan]:
        found = [self.stored.rows(start, stop), self._scale_rows(start, stop)]
        if self.zero:
            found.append(self.zero.rows(start // self.each, -(-stop // self.each)))
        return found + [self.group_of] * bool(self.group_of)

    def _scale_rows(self, start: int, stop: int) -> FileSpan:
        return self.scale.rows(start, stop) if self.scale.shape[0] > 1 else self.scale

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        packed, scale, *more = tensors
        values = unpacked(packed, self.bits)[:, : self.shape[1]].float()
        zero = torch.full_like(scale, 2 ** (self.bits - 1), dtype=torch.float32)
        if self.zero:
            words, first = more[0], start % self.each
            zero = unpacked(words.t(), self.bits).t()[first : first + stop - start].float()
        group = _groups(self.shape[1], scale.shape[1], more[-1] if self.group_of else None)
        group = group.to(packed.device)
        return (values - zero[:, group]) * scale.float()[:, group]


class _PackedColumns(_Weight):
    """The integers of GPTQ (I / P, O) and AWQ (I, O / P), with scales (G, O) and zeros (G, O / P).

    Rows of the weight are columns here, so a strip of each line is read.
    """

    def __init__(self, parts: Parts, along_inputs: bool):
        self.bits = parts.settings.get("bits", 4)
        self.along_inputs, self.each = along_inputs, 32 // self.bits
        self.stored = parts.get("qweight", torch.int32, dims=2)
        self.scale, self.zero = parts.get("scales", *NUMBERS), parts.get("qzeros", torch.int32)
        self.group_of = parts.found.get("g_idx")
        # GPTQ's first format keeps zeros less one; https://github.com/AutoGPTQ/AutoGPTQ/pull/640
        version = parts.settings.get("checkpoint_format", "gptq")
        self.missing = int(along_inputs and version == "gptq")
        lines, words = self.stored.shape
        out = words if along_inputs else words * self.each
        self.shape = (out, lines * self.each if along_inputs else lines)
        groups = self.scale.shape[0]
        parts.check(
            self.scale.shape == (groups, out) and self.zero.shape == (groups, out // self.each),
            f"is packed in {self.bits} bits of shape {(lines, words)}, with scales of shape "
            f"{self.scale.shape} and zeros of shape {self.zero.shape}",
        )

    def _words(self, start: int, stop: int) -> tuple[int, int]:
        """The words along the outputs that hold some of them."""
        return start // self.each, -(-stop // self.each)

    def spans(self, start: int, stop: int) -> list[FileSpan]:
        words = self._words(start, stop)
        found = columns(self.stored, *((start, stop) if self.along_inputs else words))
        found += columns(self.scale, start, stop) + columns(self.zero, *words)
        return found + [self.group_of] * bool(self.group_of)

    def rows(self, tensors: list[Tensor], start: int, stop: int) -> Tensor:
        lines, groups = self.stored.shape[0], self.scale.shape[0]
        packed, scale, zero = (
            torch.cat(part)
            for part in (
                tensors[:lines],
                tensors[lines : lines + groups],
                tensors[lines + groups : lines + 2 * groups],
            )
        )
        first, count = start % self.each, stop - start
        zeros = self._along_outputs(zero)[:, first : first + count] + self.missing
        if self.along_inputs:
            values = unpacked(packed.t(), self.bits).t()  # (I, O)
        else:
            values = self._along_outputs(packed)[:, first : first + count]
        group = _groups(self.shape[1], groups, tensors[-1] if self.group_of else None)
        group = group.to(packed.device)
        return ((values - zeros[group]).float() * scale.float()[group]).t()

    def _along_outputs(self, words: Tensor) -> Tensor:
        """Integers of words that lie along the outputs."""
        order = None if self.along_inputs else _AWQ_ORDER
        return unpacked(words, self.bits, order)


def _scales(stored: Tensor) -> Tensor:
    """Scales as numbers, also of one byte each, 2^(byte - 127)."""
    if stored.dtype in _EXPONENTS:
        return torch.exp2(stored.view(torch.uint8).float() - 127)
    return stored.float()


def unpacked(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned integers (..., N P) of int32 words (..., N), by their `order` in a word."""
    places = torch.tensor(order or range(32 // bits), device=words.device, dtype=torch.int32)
    return ((words[..., None] >> (places * bits)) & (2**bits - 1)).flatten(-2)


def columns(stored: FileSpan, start: int, stop: int) -> list[FileSpan]:
    """Columns (start, stop) of a matrix, a line at a time."""
    size, wide = stored.dtype.itemsize, stored.shape[1]
    return [
        stored._replace(
            offset=stored.offset + (line * wide + start) * size, shape=(1, stop - start)
        )
        for line in range(stored.shape[0])
    ]


def _groups(inputs: int, groups: int, order: Tensor | None) -> Tensor:
    """The group of each input: `order` if the files say, or groups of equal size."""
    return torch.arange(inputs) // -(-inputs // groups) if order is None else order.long()


@dataclass(frozen=True)
class NativeFormat:
    """A way of storing weights: how they are found, and what reads them."""

    mark: str  # the part, after the layer's name or the weight's, that each such weight has
    ends: tuple[str, ...]  # all that belongs to it, likewise
    weight: Callable[[Parts], object]
    words: str  # for what to say of it


def _fp8(mark: str, words: str) -> NativeFormat:
    return NativeFormat(mark, ("", mark), lambda parts: _Fp8(parts, mark), words)


def _compressed(bits: int) -> NativeFormat:
    ends = ("packed", "scale", "shape", "zero_point", "g_idx")
    return NativeFormat(
        "weight_packed",
        tuple(f"weight_{end}" for end in ends),
        lambda parts: _PackedRows(parts, bits),
        f"integers of {bits} bits",
    )


_OF_LAYERS = ("qweight", "qzeros", "scales", "g_idx")
FORMATS = {
    "fp8": _fp8("_scale_inv", "fp8 with scales"),
    "compressed-tensors float-quantized": _fp8("_scale", "fp8 with scales"),
    "compressed-tensors pack-quantized of 4 bits": _compressed(4),
    "compressed-tensors pack-quantized of 8 bits": _compressed(8),
    "mxfp4": NativeFormat("_blocks", ("_blocks", "_scales"), _Mxfp4, "MXFP4"),
    "gptq": NativeFormat(
        "qweight", _OF_LAYERS, lambda parts: _PackedColumns(parts, True), "GPTQ's 4 or 8 bits"
    ),
    "awq": NativeFormat(
        "qweight", _OF_LAYERS, lambda parts: _PackedColumns(parts, False), "AWQ's 4 bits"
    ),
}


def native_kind(quantization: dict) -> str:
    """The row of FORMATS that a quantization_config means, or in words what it is instead."""
    method = str(quantization.get("quant_method"))
    if method == "compressed-tensors":
        groups = list((quantization.get("config_groups") or {}).values())
        formats = {quantization.get("format"), *(g.get("format") for g in groups)} - {None}
        bits = {(g.get("weights") or {}).get("num_bits") for g in groups}
        if formats == {"pack-quantized"}:
            return f"compressed-tensors pack-quantized of {' and '.join(map(str, bits))} bits"
        return f"compressed-tensors {' and '.join(sorted(formats))}" if formats else method
    if method == "gptq" and quantization.get("bits") not in (4, 8):
        return f"gptq in {quantization.get('bits')} bits"
    if method == "awq" and (
        quantization.get("bits") != 4 or str(quantization.get("version", "gemm")).lower() != "gemm"
    ):
        return f"awq in {quantization.get('bits')} bits, version {quantization.get('version')}"
    return method


class NativeCheckpoint(Checkpoint):
    """A checkpoint with weights in one of FORMATS, which are numbers to whoever reads it.

    Raises ValueError, naming --model_name and the tensor, for parts that are not there or don't fit.
    """

    def __init__(self, folder, kind: str, quantization: dict):
        super().__init__(folder)
        self.stored = {n: s for n, s in self.stored.items() if not n.endswith(_OF_ACTIVATIONS)}
        row = FORMATS[kind]
        found = [name.removesuffix(row.mark) for name in self.stored if name.endswith(row.mark)]
        found = [stem for stem in found if row.ends[0] or stem in self.stored]
        if not found:
            raise ValueError(
                f"--model_name {self.folder}: config.json says that its weights are in {row.words}, and "
                f"the files hold none of them, {row.mark}; take quantization_config out of config.json, "
                "or download the model again"
            )
        for stem in found:
            name = stem if row.mark.startswith("_") else f"{stem}weight"
            ends = {
                end: self.stored.pop(stem + end) for end in row.ends if stem + end in self.stored
            }
            self.made[name] = row.weight(Parts(self.folder, name, ends, quantization))

    def rename(self, names: dict[str, str]):
        super().rename(names)
        self.made = {names.get(name, name): weight for name, weight in self.made.items()}
