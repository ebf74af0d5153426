"""Mixtures of experts: all experts of a block as rows of two linear layers, and LoRA on them.

Modules, each importing only from those before it: row_sums, fp8_products, grouped_matmul, routing, balance,
stacked, lora_ops, lora.
"""

from .balance import apply_router_balance, check_router_balance
from .fp8_products import fits_grouped_fp8, grouped_fp8_problem
from .lora import (
    adapt_experts,
    adaptable_stacks,
    expert_parameters,
    is_target,
    names_of_wrappers,
    target_ends,
)
from .routing import ExpertLoad
from .stacked import (
    STACKS,
    StackedExperts,
    apply_stacked_experts,
    check_quantizable,
    each_of_stacks,
    fits_grouped_kernel,
    is_stackable,
    mixtures_of,
    stacked_weights,
)

__all__ = [
    "STACKS",
    "ExpertLoad",
    "StackedExperts",
    "adapt_experts",
    "adaptable_stacks",
    "apply_router_balance",
    "apply_stacked_experts",
    "check_quantizable",
    "check_router_balance",
    "each_of_stacks",
    "expert_parameters",
    "fits_grouped_fp8",
    "fits_grouped_kernel",
    "grouped_fp8_problem",
    "is_stackable",
    "is_target",
    "mixtures_of",
    "names_of_wrappers",
    "stacked_weights",
    "target_ends",
]
