"""Which attention a run takes and whether it makes masks, by its settings and the model's shape alone.

model/attention.py chooses by the model's code, and the tests compare the two for every type of model.
"""

from __future__ import annotations

from ..catalog.arch import ModelShape
from ..catalog.machine import Machine
from ..config import RunConfig
from ..config.run import has_flash_attention_4

_LARGEST_HEAD, _LEAST_FOR_FA4 = 256, 64


def attention_of(config: RunConfig, shape: ModelShape, machine: Machine) -> str:
    """The name of the attention, as model/attention.py has them."""
    traits, wanted, packing = shape.traits, config.attn_implementation, config.packing
    auto, suffix = wanted == "auto", "_packed" if packing else ""
    if auto and traits.softcap:
        return "eager" if machine.is_cpu else "flex_attention"
    if auto and traits.attention == "own":
        return "eager"
    if not auto and wanted not in ("sdpa", "varlen", "flash_attention_4"):
        return wanted
    flash = _has_flash_kernels(config, shape, machine)
    if wanted in ("auto", "flash_attention_4") and flash and _has_fa4(shape, machine):
        return "fa4" + suffix
    if traits.attention == "sinks":
        return "torch_fa" + suffix if flash or machine.is_cpu else "eager"
    if packing:
        return "varlen" if flash else "sdpa"
    return "torch_fa" if auto and flash and _sees_windows(shape) else "sdpa"


def makes_masks(config: RunConfig, shape: ModelShape, attention: str) -> bool:
    """Whether each block's attention takes a mask of T x T, beside the scores that eager keeps."""
    return attention == "sdpa" and (config.packing or _sees_windows(shape))


def _sees_windows(shape: ModelShape) -> bool:
    """True of a model of attention alone, where some layers see a window."""
    return shape.traits.windows and not _has_mixers(shape)


def _has_mixers(shape: ModelShape) -> bool:
    """Whether some layers are no attention, or one that is neither causal alone nor of a window."""
    return shape.traits.mixers or shape.has_state


def _has_flash_kernels(config: RunConfig, shape: ModelShape, machine: Machine) -> bool:
    """Whether torch's FlashAttention takes the model's heads on these GPUs."""
    sizes = [kind.head_dim for kind, _ in shape.block_kinds() if kind.heads]
    fits = max(sizes) <= _LARGEST_HEAD and not any(size % 8 for size in sizes)
    ampere = not machine.is_cpu and machine.gpu.has_bf16
    return fits and ampere and config.product_dtype != "fp32" and shape.traits.attention != "masked"


def _has_fa4(shape: ModelShape, machine: Machine) -> bool:
    """Whether FlashAttention 4 is installed here and has kernels: for Hopper, and Blackwell's large cards."""
    large = bool(machine.gpu.fp8_tflops and machine.gpu.nvlink_gb_s)
    fits = (
        not _has_mixers(shape) and min(k.head_dim for k, _ in shape.block_kinds()) >= _LEAST_FOR_FA4
    )
    return has_flash_attention_4() and large and fits
