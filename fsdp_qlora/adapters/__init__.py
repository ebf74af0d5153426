"""LoRA-family adapters: the arithmetic of an adapted layer, and PEFT's bookkeeping."""
from .lora import (
    LoraLinear,
    adapter_counts,
    apply_adapters,
    apply_fp8,
    init_adapters,
    init_magnitudes,
    initial_a,
    lora_config,
    resolve_targets,
    trainable_parameters,
)

__all__ = [
    "LoraLinear", "adapter_counts", "apply_adapters", "apply_fp8", "init_adapters", "init_magnitudes",
    "initial_a", "lora_config", "resolve_targets", "trainable_parameters",
]
