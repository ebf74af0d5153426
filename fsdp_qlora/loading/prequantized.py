"""Checkpoints whose weights come quantized: by which class each kind is read.

4-bit weights of bitsandbytes load as they are, byte for byte. There the packed bytes of a weight are
one flat run, with blocks of 64 along it, which are those of our rows where a row is whole blocks.
Weights in the formats of native_formats.py become numbers as they stream in. Others are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..quantization.absmax import BLOCKSIZE, STORAGE_DTYPE, encode_absmax
from ..quantization.formats import dequantize_rows
from .bnb_4bit import STATE, checked_state
from .native_formats import FORMATS, NativeCheckpoint, native_kind
from .weight_files import Checkpoint, FileSpan


def open_weights(folder: str | Path, quantization: dict | None, model_name: str) -> Checkpoint:
    """The checkpoint of a folder, by the `quantization_config` of its config.json.

    Raises ValueError naming --model_name and the kind of quantization if it can't be trained on.
    """
    check_kind(quantization, model_name)
    kind = kind_of(quantization)
    if not kind:
        return Checkpoint(folder)
    if kind == "bitsandbytes":
        return FourBitCheckpoint(folder)
    return NativeCheckpoint(folder, kind, quantization)


def check_kind(quantization: dict | None, model_name: str):
    """Refuse a kind of quantization that can't be trained on, which config.json alone tells."""
    kind = kind_of(quantization)
    if kind and kind != "bitsandbytes" and kind not in FORMATS:
        raise ValueError(
            f"--model_name {model_name}: its weights are quantized with {kind}, which can't "
            "be trained on here; give the 16-bit model it was made from, or one in "
            "bitsandbytes' 4 bits"
        )


def quantization_of(settings: PretrainedConfig) -> dict | None:
    """The `quantization_config` of a config.json, which a wrapper may have for its text alone."""
    found = settings.to_dict()
    return found.get("quantization_config") or (found.get("text_config") or {}).get(
        "quantization_config"
    )


def kind_of(quantization: dict | None) -> str | None:
    """The kind of quantization in the words of config.json, more exactly where that matters."""
    if not quantization:
        return None
    if quantization.get("quant_method", "bitsandbytes") == "bitsandbytes":
        named = "quant_method" in quantization or "load_in_4bit" in quantization
        in_8_bits = named and not quantization.get("load_in_4bit")
        return "bitsandbytes" + " in 8 bits" * in_8_bits if named else "an unknown method"
    return native_kind(quantization)


def layers_to_quantize(checkpoint: Checkpoint, quant: str) -> set[str] | None:
    """Names of the layers that the checkpoint has in 4 bits, or None if the choice is free.

    Raises ValueError if they are not in the format `quant`.
    """
    base = getattr(checkpoint, "base", checkpoint)  # of an expanded one
    if not isinstance(base, FourBitCheckpoint):
        return None
    others = base.quant_types - {quant}
    if others:
        raise ValueError(
            f"--quant {quant}: the weights of {checkpoint.folder} are stored as "
            f"{', '.join(sorted(others))}; use --quant {min(others)}"
        )
    return checkpoint.quantized_layers


@dataclass(frozen=True)
class _Nested:
    """How absmax itself is quantized: value = code[byte] * scale of its block + offset."""

    scale: FileSpan  # float32, one for each block of `blocksize` scales
    code: FileSpan  # float32 (256,)
    offset: float
    blocksize: int


@dataclass(frozen=True)
class _FourBitWeight:
    """A 4-bit weight in a checkpoint."""

    shape: tuple[int, int]  # (O, I)
    quant_type: str
    dtype: torch.dtype  # of the weight it was made from
    packed: FileSpan  # uint8 (O, I/2)
    absmax: FileSpan  # float32, or uint8 if nested: (O, I/64)
    nested: _Nested | None


class FourBitCheckpoint(Checkpoint):
    """A checkpoint that transformers saved with bitsandbytes' 4-bit weights.

    Raises ValueError for weights that can't be split by rows.
    """

    def __init__(self, folder: str | Path):
        super().__init__(folder)
        found = [m for m in map(STATE.fullmatch, self.stored) if m]
        if not found:
            raise ValueError(
                f"--model_name {self.folder}: config.json says that its weights are in 4 "
                "bits of bitsandbytes, and the files hold no such weight; take "
                "quantization_config out of config.json, or download the model again"
            )
        self.weights = {m["weight"]: self.weight(m) for m in found}

    def weight(self, state_name) -> _FourBitWeight:
        """The weight whose state STATE has matched."""
        name = state_name["weight"]
        state, part = checked_state(self, state_name), lambda key: self.stored[f"{name}.{key}"]
        out, wide = shape = tuple(state["shape"])
        if state["blocksize"] != BLOCKSIZE or wide % BLOCKSIZE:
            raise ValueError(
                f"--model_name {self.folder}: {name} has rows of {wide} values in blocks "
                f"of {state['blocksize']}, which can't be split by rows; give the 16-bit "
                "model"
            )
        nested = None
        if "nested_offset" in state:
            nested = _Nested(
                part("nested_absmax"),
                part("nested_quant_map"),
                float(state["nested_offset"]),
                state["nested_blocksize"],
            )
        absmax = part("absmax")
        return _FourBitWeight(
            shape,
            state_name["quant_type"],
            getattr(torch, state["dtype"]),
            self.stored[name].seen_as(torch.uint8, (out, wide // 2)),
            absmax.seen_as(absmax.dtype, (out, wide // BLOCKSIZE)),
            nested,
        )

    def rename(self, names: dict[str, str]):
        super().rename(names)
        self.weights = {names.get(name, name): weight for name, weight in self.weights.items()}

    def check_numbers(self, key: str):
        if key not in self.weights:
            super().check_numbers(key)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes as they are before quantization."""
        return super().shapes | {name: w.shape for name, w in self.weights.items()}

    @property
    def quantized_layers(self) -> set[str]:
        """Names of the layers whose weights are in 4 bits."""
        return {name.removesuffix(".weight") for name in self.weights}

    @property
    def quant_types(self) -> set[str]:
        """nf4, fp4, or both."""
        return {w.quant_type for w in self.weights.values()}

    def spans(self, piece) -> list[FileSpan]:
        weight = self.weights.get(piece.key)
        if not weight:
            return super().spans(piece)
        rows = [s.rows(piece.start, piece.stop) for s in (weight.packed, weight.absmax)]
        if not weight.nested:
            return rows
        first, last = _nested_range(piece, weight)
        return [*rows, weight.nested.scale.rows(first, last), weight.nested.code]

    def values(self, piece, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        """Bytes and scales for a quantized layer, numbers for any other."""
        weight = self.weights.get(piece.key)
        if not weight:
            return super().values(piece, tensors)
        packed, absmax = tensors[0].view(STORAGE_DTYPE), tensors[1]
        if weight.nested:
            absmax = _plain_absmax(piece, weight, *tensors[1:])
        if piece.module is None:
            return (
                dequantize_rows(packed, absmax, weight.shape[1], weight.quant_type, weight.dtype),
            )
        return packed, encode_absmax(absmax) if piece.module.absmax_dtype == "int8" else absmax


def _nested_range(piece, weight: _FourBitWeight) -> tuple[int, int]:
    """Which of the scales' own blocks the piece's rows need: (first, last + 1)."""
    blocks, size = weight.absmax.shape[1], weight.nested.blocksize
    return piece.start * blocks // size, -(-piece.stop * blocks // size)


def _plain_absmax(
    piece, weight: _FourBitWeight, absmax: Tensor, scale: Tensor, code: Tensor
) -> Tensor:
    """float32 scales (O, I/64) from nested ones (uint8), as bitsandbytes computes them."""
    first, _ = _nested_range(piece, weight)
    at = torch.arange(absmax.numel(), device=absmax.device) + piece.start * absmax.shape[1]
    block = at // weight.nested.blocksize - first
    return code[absmax.int()] * scale[block].view(absmax.shape) + weight.nested.offset
