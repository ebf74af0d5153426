"""Tensors in safetensors files: found and checked by their headers, read by rows.

A row slice of a tensor is one run of bytes, so it is read straight into the memory that wants it:
on a GPU machine a pinned buffer. What is wrong with a folder is found from the headers, before any
rank waits for another. The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..json_input import from_json
from .content_hash import ContentHash

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


NUMBERS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
# How quantizers name the scales of a weight, after its name or its layer's.
_SCALES = ("_scale_inv", "_scale", "_scb", ".absmax", ".SCB", ".scale")
_LAYER_SCALES = ("SCB", "scales", "weight_scale", "weight_scale_inv")


def _scales_beside(key: str) -> list[str]:
    """Names that a tensor's scales may have."""
    layer = key.removesuffix(".weight")
    return [key + end for end in _SCALES] + [
        f"{layer}.{end}" for end in _LAYER_SCALES if layer != key
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """As people write it: float8_e4m3fn."""
    return str(dtype).removeprefix("torch.")


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def reason_of(error: Exception) -> str:
    """An exception and what caused it in one line, without the full stop."""
    kind = f"{type(error).__name__} " if isinstance(error, (KeyError, AttributeError)) else ""
    cause = f" {first_line(error.__cause__)}" if isinstance(error.__cause__, Exception) else ""
    return (kind + first_line(error) + cause).rstrip(". ")


class FileSpan(NamedTuple):
    """A tensor, or some of its rows, in a file."""

    path: Path
    offset: int  # bytes from the file's start
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> FileSpan:
        """Rows (start, stop); a scalar stays whole. Raises ValueError for rows behind the last."""
        if not self.shape:
            return self
        if stop > self.shape[0]:  # the next tensor's bytes are there
            raise ValueError(
                f"{self.path}: a weight has {self.shape[0]} rows there and {stop} or more in the model, "
                "which has been resized since, or is another; make it anew with the size of its files"
            )
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return self._replace(
            offset=self.offset + start * row_bytes, shape=(stop - start, *self.shape[1:])
        )

    def seen_as(self, dtype: torch.dtype, shape: tuple[int, ...]) -> FileSpan:
        """The same bytes under another type and shape, whose first number may be -1 for what is left."""
        if shape[0] == -1:
            shape = (math.prod(self.shape) // math.prod(shape[1:]), *shape[1:])
        return self._replace(dtype=dtype, shape=tuple(shape))

    def bytes_of(self, start: int, stop: int) -> FileSpan:
        """Some of its bytes, as such."""
        return self._replace(offset=self.offset + start, dtype=torch.uint8, shape=(stop - start,))

    def read(self) -> Tensor:
        """The values, on the host."""
        return self.read_into(torch.empty(self.nbytes, dtype=torch.uint8))

    def read_into(self, buffer: Tensor) -> Tensor:
        """Fill `buffer`, bytes of the right number; returns it as what it holds."""
        left = memoryview(buffer.numpy())
        try:
            with open(self.path, "rb", buffering=0) as file:  # reading lets other threads run
                file.seek(self.offset)
                while left:
                    count = file.readinto(left)
                    if not count:
                        raise OSError("the file has become shorter")
                    left = left[count:]
        except OSError as error:
            raise ValueError(
                f"{self.path}: can't read from byte {self.offset} on: {error}"
            ) from error
        return buffer.view(self.dtype).view(self.shape)


class Piece(Protocol):
    """Rows start to stop of the tensor `key` (`stream.rank_pieces`)."""

    key: str
    start: int
    stop: int


class Checkpoint:
    """The tensors of a folder of safetensors files.

    Raises ValueError, naming the file, for a missing, truncated or foreign file.
    """

    unused: Sequence[str] = ()  # tensors that the model has no place for, see key_mapping.py

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.stored: dict[str, FileSpan] = {}
        for path in self.safetensors_files():
            self.add(path)
        self.check_index()
        self.made: dict = {}  # tensors that are not in the files as the model has them (key_mapping.py)
        self.content = ContentHash(self.stored)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: t.shape for name, t in (self.stored | self.made).items()}

    def rename(self, names: dict[str, str]) -> None:
        """Know tensors by other names; `names` maps those in the files to those."""
        self.stored = {names.get(name, name): stored for name, stored in self.stored.items()}

    def safetensors_files(self) -> list[Path]:
        files = sorted(self.folder.glob("*.safetensors"))
        if files:
            return files
        bins = sorted(self.folder.glob("*.bin")) + sorted(self.folder.glob("*.pth"))
        remedy = (
            f"only {bins[0].name} and the like; convert with model.save_pretrained(folder, "
            "safe_serialization=True)"
            if bins
            else "no *.safetensors file"
        )
        raise ValueError(f"--model_name {self.folder}: it holds {remedy}")

    def add(self, path: Path) -> None:
        """Take a file's tensors in; one that is in two files may have two values."""
        found = read_header(path)
        for name in found.keys() & self.stored.keys():
            other = self.stored[name].path.name
            raise ValueError(
                f"--model_name {self.folder}: {other} and {path.name} both hold {name}; "
                "keep one of the two, that of the model you want"
            )
        self.stored |= found

    def check_index(self) -> None:
        """Every file that the index names must be there."""
        index = self.folder / "model.safetensors.index.json"
        if not index.is_file():
            return
        try:
            names = sorted(set(from_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{index} is not an index of safetensors files ({first_line(error)}); "
                "it may be a pointer or an error page: download it again"
            ) from error
        for name in names:
            if not str(name).endswith(".safetensors"):
                raise ValueError(
                    f"{index} names {name}, which is not a safetensors file; convert it with "
                    "model.save_pretrained(folder, safe_serialization=True)"
                )
            if not (self.folder / name).is_file():
                raise ValueError(f"{index} names {name}, which is missing; download it again")

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows (start, stop) of a tensor, on the host, as stored."""
        if made := self.made.get(name):
            return made.rows([span.read() for span in made.spans(start, stop)], start, stop)
        return self.stored[name].rows(start, stop).read()

    def whole(self, name: str) -> Tensor:
        """A tensor on the host, as stored."""
        if name in self.stored:
            return self.stored[name].read()
        return self.rows(name, 0, self.made[name].shape[0])

    def differ(self, first: str, second: str) -> bool:
        """Whether two tensors hold different numbers, as a sample tells: training changes all of them."""
        one, other = self.stored[first], self.stored[second]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return True
        size, last = min(_SAMPLE_BYTES, one.nbytes), SAMPLES - 1
        starts = [(one.nbytes - size) * i // last for i in range(SAMPLES)]
        return any(
            not torch.equal(one.bytes_of(s, s + size).read(), other.bytes_of(s, s + size).read())
            for s in starts
        )

    def check_numbers(self, key: str) -> None:
        """Refuse a tensor whose stored values are not its numbers, but for scales that nothing reads."""
        made = self.made.get(key)
        for part in [self.stored[key]] if made is None else made.numbers:
            if part.dtype not in NUMBERS:
                raise ValueError(
                    f"{self.folder}: {key} is stored as {dtype_name(part.dtype)} of shape "
                    f"{part.shape} without scales in a known layout; give the 16-bit model "
                    "that it was made from"
                )
        for name in _scales_beside(key):
            if name in self.stored:
                raise ValueError(
                    f"{self.folder}: {key} has scales, {name} of shape "
                    f"{self.stored[name].shape}, which config.json does not mention; give "
                    "the 16-bit model that it was made from"
                )

    # What `loading.load_weights` asks of a source of weights; a piece is some rows of a parameter.

    def read(self, span: FileSpan, buffer: Tensor | None = None) -> Tensor:
        """The values of a span, in `buffer` if that is given; they are hashed on the way."""
        if buffer is None:
            buffer = torch.empty(span.nbytes, dtype=torch.uint8)
        values = span.read_into(buffer)
        self.content.take(span, memoryview(buffer.numpy()))
        return values

    def spans(self, piece: Piece) -> list[FileSpan]:
        """What must be read for a piece."""
        if made := self.made.get(piece.key):
            return made.spans(piece.start, piece.stop)
        return [self.stored[piece.key].rows(piece.start, piece.stop)]

    def values(self, piece: Piece, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """The piece's values, from what was read: rows of numbers, or packed bytes and scales."""
        if made := self.made.get(piece.key):
            return (made.rows(tensors, piece.start, piece.stop),)
        return (tensors[0],)

    def placed(self, piece: Piece) -> None:
        """Told when a piece is in the model."""


def read_header(path: Path) -> dict[str, FileSpan]:
    """The tensors of one file. safetensors itself checks that they cover it, each by its own bytes."""
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.is_file() else 0
        reason = first_line(error).removeprefix("Error while deserializing header: ")
        raise ValueError(
            f"{path} is not a safetensors file, or not a whole one ({size} bytes: "
            f"{reason}); it may be cut, a pointer or an error page: download it again"
        ) from error
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = from_json(file.read(length))
    header.pop("__metadata__", None)
    found = {
        name: FileSpan(
            path, 8 + length + entry["data_offsets"][0], entry["dtype"], tuple(entry["shape"])
        )
        for name, entry in header.items()
    }
    return {
        name: stored._replace(dtype=_known_dtype(stored, name)) for name, stored in found.items()
    }


def _known_dtype(stored: FileSpan, name: str) -> torch.dtype:
    """The torch dtype of a tensor whose header says `stored.dtype`."""
    if stored.dtype in STORED_DTYPES:
        return STORED_DTYPES[stored.dtype]
    raise ValueError(
        f"{stored.path}: {name} is of type {stored.dtype}, which can't be read; give the "
        "model in bf16"
    )


SAMPLES, _SAMPLE_BYTES = 3, 256  # of each tensor


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of names, types, shapes and a sample of each tensor's bytes; not of where the files lie.

    Training changes all values of a tensor, so a few of each tell two checkpoints apart.
    """
    digest = hashlib.sha256()
    for name, stored in sorted(checkpoint.content.stored.items()):
        digest.update(f"{name} {stored.dtype} {stored.shape}\n".encode())
        size = min(_SAMPLE_BYTES, stored.nbytes)
        with open(stored.path, "rb") as file:
            for i in range(SAMPLES):
                file.seek(stored.offset + (stored.nbytes - size) * i // (SAMPLES - 1))
                digest.update(file.read(size))
    return digest.hexdigest()


class RandomCheckpoint(Checkpoint):
    """Random weights of a model's shape, for benchmarks: any rows, without the rest."""

    content = None

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device, seed: int = 0):
        self.random_shapes, self.device, self.seed = shapes, device, seed

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self.random_shapes

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Normal values of standard deviation 0.02, ones for norms."""
        shape = (stop - start, *self.shapes[name][1:])
        if len(shape) == 1:
            return torch.ones(shape, device=self.device)
        seed = hash_seed(f"{self.seed}:{name}:{start}")
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(
            0, 0.02, generator=generator
        )

    def spans(self, piece: Piece) -> list[FileSpan]:
        return []

    def values(self, piece: Piece, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return (self.rows(piece.key, piece.start, piece.stop),)


def hash_seed(text: str) -> int:
    """A seed from a text, equal in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
