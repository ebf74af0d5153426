"""Formats of frozen linear weights: what --quant, with --n_bits, can be.

`quantization/` has the arithmetic: blocks of 64 values of a row share their scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Format:
    """One way to store a weight in few bits."""

    name: str
    quant: str  # the --quant that it is under; formats of one --quant differ by --n_bits
    factory: str  # "module:name" of what makes its arithmetic from the row
    bits: int  # of a value, without its share of the scales
    scales: int = 1  # numbers per block: its absmax, or a scale and a zero
    has_kernels: bool = False  # a GPU unpacks it in one kernel, with adapters merged or to fp8

    @property
    def is_bitsandbytes(self) -> bool:
        """Whether bitsandbytes has the same values, where scales are fp32."""
        return self.factory.endswith(":bitsandbytes_4bit")


_MODULE = "fsdp_qlora.quantization.formats"
_ROWS = (
    Format(
        name="nf4", quant="nf4", factory=f"{_MODULE}:bitsandbytes_4bit", bits=4, has_kernels=True
    ),
    Format(
        name="fp4", quant="fp4", factory=f"{_MODULE}:bitsandbytes_4bit", bits=4, has_kernels=True
    ),
    Format(name="int8", quant="int8", factory=f"{_MODULE}:blockwise_int8", bits=8),
    Format(name="hqq8", quant="hqq", factory=f"{_MODULE}:half_quadratic", bits=8, scales=2),
    Format(name="hqq4", quant="hqq", factory=f"{_MODULE}:half_quadratic", bits=4, scales=2),
    Format(name="hqq3", quant="hqq", factory=f"{_MODULE}:half_quadratic", bits=3, scales=2),
    Format(name="hqq2", quant="hqq", factory=f"{_MODULE}:half_quadratic", bits=2, scales=2),
)
FORMATS = {row.name: row for row in _ROWS}
FormatName = Literal["nf4", "fp4", "int8", "hqq8", "hqq4", "hqq3", "hqq2"]
AbsmaxDtype = Literal["fp32", "int8"]
QUANTS = tuple(dict.fromkeys(row.quant for row in _ROWS))
N_BITS = tuple(row.bits for row in _ROWS if row.name != row.quant)


def format_name(quant: str, n_bits: int) -> str:
    """The format of --quant and --n_bits; a --quant that is no format's, such as none, is itself."""
    rows = [row for row in FORMATS.values() if row.quant == quant]
    return next((row.name for row in rows if len(rows) == 1 or row.bits == n_bits), quant)
