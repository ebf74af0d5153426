"""Mixtures of experts: all experts of a block as rows of two linear layers, and LoRA on them.

Modules, each importing only from those before it: row_sums, grouped_matmul, routing, stacked,
lora_ops, lora.
"""

from .lora import adapt_experts, expert_parameters, is_target, names_of_wrappers, target_ends
from .routing import ExpertLoad
from .stacked import (
    STACKS,
    StackedExperts,
    apply_stacked_experts,
    check_quantizable,
    each_of_stacks,
    is_stackable,
    mixtures_of,
    stacked_weights,
)

__all__ = [
    "STACKS",
    "ExpertLoad",
    "StackedExperts",
    "adapt_experts",
    "apply_stacked_experts",
    "check_quantizable",
    "each_of_stacks",
    "expert_parameters",
    "is_stackable",
    "is_target",
    "mixtures_of",
    "names_of_wrappers",
    "stacked_weights",
    "target_ends",
]
