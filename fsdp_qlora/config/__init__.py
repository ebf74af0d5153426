"""The settings of a run, their checks, and the flags, recipes and pages made from them. No torch.

Modules, each importing only from those before it: settings, lists, without_effect, options, checks,
combinations, delta_kernels, scan_kernels, run, defaults, migration, recipe, flags, reference.
"""

from .lists import block_policies
from .run import AUTO, BatchPlan, RunConfig, plan_batches

__all__ = ["AUTO", "BatchPlan", "RunConfig", "block_policies", "plan_batches"]
