"""4-bit weights as bitsandbytes stores them in a checkpoint, which transformers loads as they are.

A linear weight W becomes `W`, its bytes; `W.absmax` and `W.quant_map`, scales and the sixteen values;
and `W.quant_state.bitsandbytes__nf4`, the rest of the state as JSON in bytes. Unlike in
`quantization/formats.py`, blocks run through the flattened weight, and absmax may be quantized too
(`W.nested_absmax`).
https://huggingface.co/docs/transformers/quantization/bitsandbytes
"""

from __future__ import annotations

import math
import re

import torch
from bitsandbytes.functional import (
    QuantState,
    create_dynamic_map,
    dequantize_4bit,
    get_4bit_type,
    quantize_4bit,
)
from torch import Tensor
from transformers import BitsAndBytesConfig

from ..json_input import from_json
from ..quantization.absmax import BLOCKSIZE
from .weight_files import Checkpoint, reason_of

STATE = re.compile(r"(?P<weight>.+)\.quant_state\.bitsandbytes__(?P<quant_type>nf4|fp4)")


def stored_tensors(name: str, weight: Tensor, quant_type: str) -> dict[str, Tensor]:
    """The tensors that stand for a weight (O, I) in a checkpoint, by name."""
    packed, state = quantize_4bit(weight.contiguous(), blocksize=BLOCKSIZE, quant_type=quant_type)
    return {name: packed} | {
        f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()
    }


def stored_bytes(weight_numel: int) -> int:
    """About the size of `stored_tensors`."""
    return weight_numel // 2 + 4 * weight_numel // BLOCKSIZE + 1024


def quantization_config(quant_type: str, compute_dtype: torch.dtype, skip: list[str]) -> dict:
    """config.json's entry that makes transformers load such a checkpoint."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=skip,
    ).to_dict()


def checked_state(checkpoint: Checkpoint, found: re.Match) -> dict:
    """The JSON state of a 4-bit weight, after a look at what else there must be of it.

    found: STATE's match. Raises ValueError naming the weight, what is wrong and the sizes.
    """
    name, stored, where = found["weight"], checkpoint.stored, f"--model_name {checkpoint.folder}"
    try:
        state = from_json(bytes(checkpoint.read(stored[found[0]]).tolist()))
        parts = parts_of(state, found["quant_type"], f"{name}.nested_absmax" in stored)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where}: {found[0]} is damaged ({reason_of(error)}); download the model again"
        ) from error
    for part, (dtype, count) in parts.items():
        there, size = stored.get(name + part), count * dtype.itemsize
        if there and there.nbytes == size and (part == "" or there.dtype == dtype):
            continue
        what = "is missing" if there is None else f"is {there.dtype} of shape {there.shape}"
        raise ValueError(
            f"{where}: {name}{part} {what}, and a weight of shape {tuple(state['shape'])} "
            f"needs {size} bytes of {dtype}; download the model again"
        )
    maps = {
        ".quant_map": get_4bit_type(found["quant_type"], device="cpu"),
        ".nested_quant_map": create_dynamic_map(),
    }
    for part in maps.keys() & parts.keys():
        if not torch.allclose(stored[name + part].read(), maps[part], atol=1e-5):
            raise ValueError(
                f"{where}: {name}{part} holds other values than bitsandbytes' for "
                f"{found['quant_type']}; download the model again, or give the 16-bit one"
            )
    return state


def parts_of(state: dict, quant_type: str, nested: bool) -> dict[str, tuple[torch.dtype, int]]:
    """The tensors of a 4-bit weight by the ends of their names: dtype, and how many values.

    Raises ValueError or KeyError for a state that says nothing of the kind.
    """
    values, (blocksize,) = (
        math.prod(_positive_integers(state["shape"], 2)),
        _positive_integers([state["blocksize"]], 1),
    )
    if state["quant_type"] != quant_type:
        raise ValueError(f"its quant_type is {state['quant_type']}")
    if not isinstance(getattr(torch, state["dtype"]), torch.dtype):
        raise ValueError("it has no dtype")
    scales = -(-values // blocksize)
    parts = {"": (torch.uint8, (values + 1) // 2), ".quant_map": (torch.float32, 16)}
    if not nested and not any("nested" in key for key in state):
        return parts | {".absmax": (torch.float32, scales)}
    if not math.isfinite(state["nested_offset"]):
        raise ValueError("its nested_offset is not a number")
    (nested_blocksize,) = _positive_integers([state["nested_blocksize"]], 1)
    return parts | {
        ".absmax": (torch.uint8, scales),
        ".nested_quant_map": (torch.float32, 256),
        ".nested_absmax": (torch.float32, -(-scales // nested_blocksize)),
    }


def _positive_integers(values, count: int) -> list[int]:
    """Positive integers of this number. Raises ValueError."""
    fits = isinstance(values, list) and len(values) == count
    if fits and all(type(value) is int and value > 0 for value in values):
        return values
    raise ValueError(f"{values} where {count} whole numbers belong")


def packed_weights(checkpoint: Checkpoint) -> dict[str, QuantState]:
    """The state of every 4-bit weight of a checkpoint, by the weight's name; empty if it has none."""
    states = {}
    for key in checkpoint.shapes:
        if not (found := STATE.fullmatch(key)):
            continue
        name = found["weight"]
        checked_state(checkpoint, found)
        parts = {
            k: checkpoint.rows(k, 0, checkpoint.shapes[k][0])
            for k in checkpoint.shapes
            if k.startswith(f"{name}.")
        }
        states[name] = QuantState.from_dict(parts, device=torch.device("cpu"))
    return states


def dense(checkpoint: Checkpoint, name: str, state: QuantState) -> Tensor:
    """The whole weight (O, I) that a 4-bit one stands for, in the dtype it was made from."""
    packed = checkpoint.rows(name, 0, checkpoint.shapes[name][0])
    return dequantize_4bit(packed, state)
