"""4-bit weights as bitsandbytes stores them in a checkpoint, which transformers loads as they are.

A linear weight W becomes `W`, its bytes; `W.absmax` and `W.quant_map`, scales and the sixteen values;
and `W.quant_state.bitsandbytes__nf4`, the rest of the state as JSON in bytes. Unlike in
`quantization/fourbit.py`, blocks run through the flattened weight, and absmax may be quantized too
(`W.nested_absmax`).
https://huggingface.co/docs/transformers/quantization/bitsandbytes
"""
from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import Tensor
from transformers import BitsAndBytesConfig

from ..quantization.fourbit import BLOCKSIZE

if TYPE_CHECKING:
    from .weight_files import Checkpoint

STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(?P<quant_type>nf4|fp4)")


def stored_tensors(name: str, weight: Tensor, quant_type: str) -> dict[str, Tensor]:
    """The tensors that stand for a weight (O, I) in a checkpoint, by name."""
    packed, state = quantize_4bit(weight.contiguous(), blocksize=BLOCKSIZE, quant_type=quant_type)
    return {name: packed} | {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}


def stored_bytes(weight_numel: int) -> int:
    """About the size of `stored_tensors`."""
    return weight_numel // 2 + 4 * weight_numel // BLOCKSIZE + 1024


def quantization_config(quant_type: str, compute_dtype: torch.dtype, skip: list[str]) -> dict:
    """config.json's entry that makes transformers load such a checkpoint."""
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=quant_type,
                              bnb_4bit_compute_dtype=compute_dtype,
                              llm_int8_skip_modules=skip).to_dict()


def packed_weights(checkpoint: Checkpoint) -> dict[str, QuantState]:
    """The state of every 4-bit weight of a checkpoint, by the weight's name; empty if it has none."""
    states = {}
    for key in checkpoint.shapes:
        if not (found := STATE.fullmatch(key)): continue
        name = found["weight"]
        parts = {k: checkpoint.rows(k, 0, checkpoint.shapes[k][0])
                 for k in checkpoint.shapes if k.startswith(f"{name}.")}
        states[name] = QuantState.from_dict(parts, device=torch.device("cpu"))
    return states


def dense(checkpoint: Checkpoint, name: str, state: QuantState) -> Tensor:
    """The whole weight (O, I) that a 4-bit one stands for, in the dtype it was made from."""
    packed = checkpoint.rows(name, 0, checkpoint.shapes[name][0])
    return dequantize_4bit(packed, state)
