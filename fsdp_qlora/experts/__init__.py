"""Mixtures of experts: all experts of a block as rows of two linear layers, and LoRA on them.

Modules, each importing only from those before it: grouped_matmul, stacked, lora_ops, lora.
"""

from .lora import adapt_experts, expert_parameters, is_target, names_of_wrappers, target_ends
from .stacked import (
    STACKS,
    StackedExperts,
    apply_stacked_experts,
    check_quantizable,
    each_of_stacks,
    is_stackable,
    stacked_weights,
)

__all__ = [
    "STACKS",
    "StackedExperts",
    "adapt_experts",
    "apply_stacked_experts",
    "check_quantizable",
    "each_of_stacks",
    "expert_parameters",
    "is_stackable",
    "is_target",
    "names_of_wrappers",
    "stacked_weights",
    "target_ends",
]
