"""Quantized weights kept in a file, so that a later start reads 4 bits of each instead of 16.

One safetensors file per checkpoint and form of quantization. Every rank writes the rows it has just
quantized at their place in it, so that no rank holds more than its own and any number of ranks can
read it; the file takes its name when all of it is there. Each row has a sum of its words: a damaged
one is read from the checkpoint again, and mended. The header lists the hashes of all weights that it
was made from; where the checkpoint's files are not those of then, they are hashed once more.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from xxhash import xxh3_64_hexdigest

from ..dist import (
    from_main,
    gather_over_ranks,
    main_only,
    print_main,
    ranks_from_env,
    sum_over_ranks,
)
from ..writable import check_folder
from .content_hash import stat_of
from .stream import WeightSlice, rank_pieces
from .weight_files import STORED_DTYPES, Checkpoint, FileSpan, fingerprint, first_line, read_header

_VERSION = 2  # of what the file holds; part of its name's hash
NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


class QuantizedCache:
    """A source of weights that takes the quantized ones from a file, or else makes the file.

    Use as a context around `loading.load_weights`; every rank must. What the file lacks comes from
    `base`, the checkpoint. Raises ValueError naming --quantized_cache if `folder` can't be used.
    """

    def __init__(
        self, folder: str | Path, model: nn.Module, base: Checkpoint, device: torch.device
    ):
        self.base, self.device, self.error = base, device, None
        self.damaged: set[tuple[str, int]] = set()
        layers = {piece.key: piece.module for piece in rank_pieces(model) if piece.module}
        name = f"{base.folder.resolve().name}-{_cache_key(layers, base, device)}.safetensors"
        self.path = Path(folder).expanduser() / name
        self.stored = layout(self.path, layers, base)
        problem = self.problem()
        self.complete = sum_over_ranks(int(problem is None))[0] == ranks_from_env().world_size
        if self.complete:
            problem = self.problem_of_base()
            self.complete = problem is None
        if not self.complete:
            self.begin(problem)

    def problem(self) -> str | None:
        """Why the file can't be read, or None."""
        if not self.path.is_file():
            return "it is not there yet"
        try:
            return None if read_header(self.path) == self.stored else "it holds other tensors"
        except (ValueError, OSError) as error:
            return first_line(error)

    def problem_of_base(self) -> str | None:
        """Why the file is not of these weights, or None; every rank must call it."""
        made, content = from_main(lambda: _read_note(self.path)), self.base.content
        if made is None or not made["tensors"].keys() <= content.stored.keys():
            return "it does not say which weights it was made from"
        if from_main(lambda: made["files"] == self.stat_of_base()):
            content.known = made["tensors"]
            return None
        print_main(
            "--quantized_cache: --model_name has other files than before; reading all of them"
        )
        content.read_all(made["tensors"])
        content.gather()
        if content.of_tensors() != made["tensors"]:
            return "--model_name holds other weights than before"
        with main_only():
            if ranks_from_env().is_main:
                self.write_note(self.path)
        return None

    def stat_of_base(self) -> dict[str, list[int]]:
        """By which the checkpoint's files are known again."""
        return {path.name: stat_of(path) for path in sorted(self.base.content.places)}

    def write_note(self, path: Path):
        """Say in the file's header which weights it was made from."""
        made = {"files": self.stat_of_base(), "tensors": self.base.content.of_tensors()}
        with open(path, "rb+") as file:
            file.write(_header_bytes(self.stored, json.dumps(made)))

    def begin(self, problem: str | None):
        """Make an empty file under a passing name; the ranks fill it."""
        size = sum(stored.nbytes for stored in self.stored.values())
        check_folder("quantized_cache", self.path.parent, size, "what is kept there")
        if self.path.is_file():
            print_main(f"--quantized_cache: made anew, for {problem}")
        maker = gather_over_ranks(f"{os.uname().nodename}-{os.getpid()}")[0]
        self.partial = self.path.with_suffix(f".{maker}.partial")
        with main_only():
            if ranks_from_env().is_main:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _remove_abandoned(self.path)
                with open(self.partial, "wb") as file:
                    file.write(_header_bytes(self.stored))
                    file.truncate(file.tell() + size)

    def __enter__(self) -> QuantizedCache:
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.finish()
        elif not self.complete and ranks_from_env().is_main:
            self.partial.unlink(missing_ok=True)

    def finish(self):
        """Give a full file its name, or say what was wrong."""
        failed, mended = sum_over_ranks(int(self.error is not None), len(self.damaged))
        reason = next((e for e in gather_over_ranks(self.error) if e), None)
        if mended:
            print_main(
                f"--quantized_cache: {mended} damaged parts of {self.path} were read from the "
                f"checkpoint{'' if failed else ' and written again'}"
            )
        if self.complete:
            return
        self.base.content.gather()
        if failed:
            print_main(f"--quantized_cache: not written, for {reason}")
        with main_only():
            if ranks_from_env().is_main:
                if failed:
                    self.partial.unlink(missing_ok=True)
                else:
                    self.write_note(self.partial)
                    os.replace(self.partial, self.path)
        if not failed:
            print_main(f"--quantized_cache: written to {self.path}")

    # ---- a source, as `loading.load_weights` asks it ----

    def spans(self, piece: WeightSlice) -> list[FileSpan]:
        if not (self.complete and piece.module):
            return self.base.spans(piece)
        return [self.stored[name].rows(piece.start, piece.stop) for name in _entries(piece.key)]

    def values(self, piece: WeightSlice, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        if not (self.complete and piece.module):
            return self.base.values(piece, tensors)
        packed, absmax, sums = tensors
        if torch.equal(_row_sums(packed, absmax, piece.start), sums):
            return packed, absmax
        self.damaged.add((piece.key, piece.start))
        read = [self.base.read(span).to(self.device) for span in self.base.spans(piece)]
        return self.base.values(piece, read)

    def read(self, span: FileSpan, buffer: Tensor | None = None) -> Tensor:
        """The values of a span, of this file or the checkpoint's."""
        if span.path != self.path:
            return self.base.read(span, buffer)
        return span.read() if buffer is None else span.read_into(buffer)

    def placed(self, piece: WeightSlice):
        """Write the piece as it is in the model, unless it came from here."""
        if not piece.module or not piece.first_copy or self.error:
            return
        if self.complete and (piece.key, piece.start) not in self.damaged:
            return
        held = (piece.local, piece.absmax, _row_sums(piece.local, piece.absmax, piece.start))
        try:
            with open(self.path if self.complete else self.partial, "rb+", buffering=0) as file:
                for name, tensor in zip(_entries(piece.key), held, strict=True):
                    file.seek(self.stored[name].rows(piece.start, piece.stop).offset)
                    _write_all(file, tensor)
        except OSError as error:
            self.error = first_line(error)


def _entries(key: str) -> tuple[str, str, str]:
    """Names in the file of a weight's bytes, its scales and the sums of its rows."""
    return key, f"{key}.absmax", f"{key}.row_sums"


def _row_sums(packed: Tensor, absmax: Tensor, first: int) -> Tensor:
    """int64 (O,): each row's 32-bit words added up, each times a number of its place, so that words and
    rows in another's place are seen; never the zero of a hole in the file.

    first: the number of the first row.
    """
    found = torch.arange(first, first + packed.shape[0], device=packed.device) * 7919 + 1
    for part in (packed, absmax):
        words = part.contiguous().view(torch.int32)
        place = torch.arange(words.shape[1], device=words.device)
        found = found * 31 + (words * (2 * place + 1)).sum(1)
    return found


def _cache_key(layers: dict, base: Checkpoint, device: torch.device) -> str:
    """A hash of the checkpoint, and of which layers take which form on which kind of device."""
    forms = {key: (m.quant_type, m.absmax_dtype) for key, m in layers.items()}
    text = json.dumps([_VERSION, fingerprint(base), device.type, forms], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def layout(path: Path, layers: dict, base: Checkpoint) -> dict[str, FileSpan]:
    """Where each tensor of the file lies, behind a header with room for what `base` is known by."""
    found, offset = {}, 0
    for key, module in layers.items():
        shapes = (
            module.weight,
            module.absmax,
            torch.empty(module.weight.shape[:1], device="meta", dtype=torch.int64),
        )
        for name, tensor in zip(_entries(key), shapes, strict=True):
            found[name] = FileSpan(path, offset, tensor.dtype, tuple(tensor.shape))
            offset += found[name].nbytes
    room = sum(2 * len(name) + 50 for name in base.content.stored)
    room += sum(2 * len(path.name) + 120 for path in base.content.places)
    start = -(-(len(_header_bytes(found)) + room + 200) // 8) * 8
    return {name: stored._replace(offset=start + stored.offset) for name, stored in found.items()}


def _header_bytes(stored: dict[str, FileSpan], note: str = "") -> bytes:
    """The head of a safetensors file with these tensors, as long as the first one's offset leaves.

    note: a text that is kept in it.
    """
    first = min((s.offset for s in stored.values()), default=0)
    header: dict = {"__metadata__": {"note": note, "sum": xxh3_64_hexdigest(note.encode())}}
    header |= {
        name: {
            "dtype": NAMES[s.dtype],
            "shape": list(s.shape),
            "data_offsets": [s.offset - first, s.offset - first + s.nbytes],
        }
        for name, s in stored.items()
    }
    text = json.dumps(header).encode()
    text += b" " * max(first - 8 - len(text), -len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _read_note(path: Path) -> dict | None:
    """What `write_note` wrote, or None if it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata()
        if xxh3_64_hexdigest(found["note"].encode()) != found["sum"]:
            return None
        return json.loads(found["note"])
    except (SafetensorError, OSError, ValueError, LookupError, TypeError):
        return None


def _write_all(file, tensor: Tensor):
    """Write a tensor's bytes."""
    left = memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).cast("B")
    while left:
        left = left[file.write(left) :]


def _remove_abandoned(path: Path):
    """Remove what killed runs of this machine left of the file."""
    for partial in path.parent.glob(f"{path.stem}.{os.uname().nodename}-*.partial"):
        process = partial.stem.rpartition("-")[2]
        if not Path("/proc", process).exists():
            partial.unlink(missing_ok=True)
