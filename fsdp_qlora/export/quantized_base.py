"""The base as an adapter knew it: rounded in training, written out in full afterwards.

A QLoRA adapter is right beside the weights that it was trained with, not beside the original ones.
Which these were is told by the settings that training saved in the adapter's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..choices import FORMATS
from ..choices.formats import format_name
from ..json_input import from_json, read_object
from ..lora_init import LoraInit, low_rank_rows
from ..quantization.absmax import ABSMAX_DTYPES
from ..quantization.formats import dequantize_rows, quantize_rows
from .adapter_folder import AdapterFolder, Delta
from .save import RUN_FILE


@dataclass(frozen=True)
class BaseQuant:
    """How the linear weights of a base were rounded."""

    quant: str = "none"
    absmax_dtype: str = "fp32"

    def __str__(self) -> str:
        return self.quant + (
            f" with {self.absmax_dtype} scales" if self.absmax_dtype != "fp32" else ""
        )

    @property
    def is_known(self) -> bool:
        """Whether `round_rows` can repeat it."""
        return self.quant in FORMATS and self.absmax_dtype in ABSMAX_DTYPES

    def round_rows(
        self,
        rows: Tensor,
        dtype: torch.dtype = torch.float32,
        taken: Delta | None = None,
        start: int = 0,
    ) -> Tensor:
        """Rows (O, I) of a weight from `start`, as their rounded form stands for them, in `dtype`.

        What the frozen weights lacked in training (`taken_out_of`) is not rounded.
        """
        if taken is not None:
            part = low_rank_rows(taken.a, taken.b, taken.scaling, start, start + len(rows))
            part = part.to(rows.device)
            return (self.round_rows(rows.float() - part) + part).to(dtype)
        packed, absmax = quantize_rows(rows, self.quant, self.absmax_dtype)
        return dequantize_rows(packed, absmax, rows.shape[1], self.quant, dtype)


def taken_out_of(folder: str | Path | None) -> dict[str, Delta]:
    """What each weight of the base lacked in training, by its name, as an adapter's folder has it.

    Half of the rank of such an adapter (lora_init).
    """
    path, found = Path(folder or "") / RUN_FILE, {}
    run = read_object(path) if folder and path.is_file() else {}
    if not LoraInit(run.get("init_lora_weights", "default"), run.get("loftq_iter", 1)).changes_base:
        return found
    adapter = AdapterFolder(folder)
    for name, change in adapter.changes.items():
        if not change.parts:
            continue
        a, b = (adapter.tensor(change.parts[kind]) for kind in "AB")
        rank = len(a) // 2
        found[name] = Delta(a[rank:], -b[:, rank:], change.scaling)
    return found


def trained_quant(folder: str | Path | None) -> BaseQuant:
    """What an adapter was trained on, as its folder says; the original weights if it does not."""
    path = Path(folder or "") / RUN_FILE
    if not folder or not path.is_file():
        return BaseQuant()
    try:
        run = from_json(path.read_text())
        quant = format_name(run["quant"], run.get("n_bits", 4))
        return BaseQuant(quant, run.get("absmax_dtype", "fp32"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} does not say how the base was quantized; give --base_quant none "
            "or a format such as nf4"
        ) from error


def base_quant(choice: str, folder: str | Path | None) -> BaseQuant:
    """What --base_quant asks for: auto is as the adapter in `folder` was trained."""
    return trained_quant(folder) if choice == "auto" else BaseQuant(choice)
