"""Whether delta nets run on flash-linear-attention's kernels: for runs and for estimates. Pure: no torch."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from importlib.util import find_spec

from packaging.version import Version

# Versions that give gated delta nets wrong gradients on Hopper, but for kernels of tilelang's
# (https://github.com/fla-org/flash-linear-attention/issues/640).
_WRONG_TRITON = Version("3.4"), Version("3.7.1")


@cache
def has_flash_linear_attention() -> bool:
    """Whether transformers finds the package's kernels here; else delta nets run on plain torch."""
    return find_spec("fla") is not None


@cache
def why_on_plain_torch(on_hopper: bool, by_channel: bool) -> tuple[str, str] | None:
    """Why delta nets run on this project's op of plain torch, and the remedy; None if on kernels.

    on_hopper: the GPU is an H100, H200 or the like; by_channel: decays are, as in Kimi Linear.
    """
    if not has_flash_linear_attention():
        return "flash-linear-attention is not installed", "pip install flash-linear-attention"
    if not on_hopper or by_channel or find_spec("tilelang") is not None:
        return None
    try:
        triton = Version(metadata.version("triton"))
    except metadata.PackageNotFoundError:
        return None
    if not _WRONG_TRITON[0] <= triton < _WRONG_TRITON[1]:
        return None
    wrong = f"flash-linear-attention's kernels give wrong gradients on Hopper with Triton {triton}"
    return wrong, "pip install tilelang"
