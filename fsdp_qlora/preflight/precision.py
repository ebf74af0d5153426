"""bf16 on a CPU: without instructions for it, a matmul takes 20 to 50 times as long as in fp32."""

from __future__ import annotations

import torch

from ..config import RunConfig


def faster_precision(config: RunConfig, given: set[str]) -> list[str]:
    """The flags of fp32 for a run on such a CPU, where no precision was given."""
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    if "precision" in given or on_gpu or config.product_dtype != "bf16" or has_bf16_instructions():
        return []
    return ["--precision", "fp32"]


def precision_line(config: RunConfig, device: torch.device) -> str:
    """What a CPU without instructions for bf16 means for a run; empty where that is nothing."""
    if device.type == "cuda" or has_bf16_instructions():
        return ""
    if config.product_dtype == "bf16":
        return (
            "this CPU has no instructions for bf16, so matmuls in it are slow: --precision fp32 is many "
            "times faster here"
        )
    if config.precision == "fp32":
        return "matmuls in fp32, as this CPU has no instructions for bf16"
    return ""


def has_bf16_instructions() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU: AVX-512 and newer, and Arm with bf16."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
