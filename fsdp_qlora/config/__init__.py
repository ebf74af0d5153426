"""The settings of a run, their checks, and the flags, recipes and pages made from them. No torch."""
from .run import (
    AUTO,
    BatchPlan,
    RunConfig,
    block_policies,
    plan_batches,
)

__all__ = ["AUTO", "BatchPlan", "RunConfig", "block_policies", "plan_batches"]
