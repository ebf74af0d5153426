"""The base as an adapter knew it: rounded in training, written out in full afterwards.

A QLoRA adapter is right beside the weights that it was trained with, not beside the original ones.
Which these were is told by the settings that training saved in the adapter's folder.
"""
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..quantization.formats import FORMATS, dequantize_rows, quantize_rows
from .save import RUN_FILE


@dataclass(frozen=True)
class BaseQuant:
    """How the linear weights of a base were rounded."""
    quant: str = "none"
    absmax_dtype: str = "fp32"

    def __str__(self) -> str:
        return self.quant + (f" with {self.absmax_dtype} scales" if self.absmax_dtype != "fp32" else "")

    @property
    def is_known(self) -> bool:
        """Whether `round_rows` can repeat it."""
        return self.quant in FORMATS

    def round_rows(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows (O, I) of a weight, as their rounded form stands for them, in `dtype`."""
        packed, absmax = quantize_rows(rows, self.quant, self.absmax_dtype)
        return dequantize_rows(packed, absmax, rows.shape[1], self.quant, dtype)


def trained_quant(folder: str | Path | None) -> BaseQuant:
    """What an adapter was trained on, as its folder says; the original weights if it does not."""
    path = Path(folder or "") / RUN_FILE
    if not folder or not path.is_file(): return BaseQuant()
    try:
        run = json.loads(path.read_text())
        bits = run.get("n_bits", 4) if run["quant"] == "hqq" else ""
        return BaseQuant(f"{run['quant']}{bits}", run.get("absmax_dtype", "fp32"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not say how the base was quantized; give --base_quant none "
                         "or a format such as nf4") from error


def base_quant(choice: str, folder: str | Path | None) -> BaseQuant:
    """What --base_quant asks for: auto is as the adapter in `folder` was trained."""
    return trained_quant(folder) if choice == "auto" else BaseQuant(choice)
