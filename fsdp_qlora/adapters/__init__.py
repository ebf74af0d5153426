"""LoRA-family adapters: the arithmetic of an adapted layer, and PEFT's bookkeeping.

Modules, each importing only from those before it: dropout_kernels, dropout, lora_ops,
shared_inputs, dora, merging, biases, targets, lora_layer, lora, fp8_layers, peft_names,
modules_to_save, settings.
"""

from .fp8_layers import apply_fp8, keep_fp8_weights
from .lora import (
    adapter_counts,
    apply_adapters,
    is_of_adapter,
    lora_config,
    trainable_parameters,
)
from .lora_layer import LoraLinear
from .targets import resolve_targets

__all__ = [
    "LoraLinear",
    "adapter_counts",
    "apply_adapters",
    "apply_fp8",
    "is_of_adapter",
    "keep_fp8_weights",
    "lora_config",
    "resolve_targets",
    "trainable_parameters",
]
