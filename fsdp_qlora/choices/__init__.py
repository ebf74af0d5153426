"""What a run can choose from: one table for each choice, one row for each name. Pure: no torch.

A row holds every fact that flags, checks, the estimate, the planner and the code that runs ask of a
name, so that a new one is its row and the module that does the work. What does the work is named as
"module:name" in the row and imported when it is built.

Modules, each importing only from those before it: strategies, optimizers, formats,
policies.
"""

from .formats import FORMATS, AbsmaxDtype, Format, FormatName
from .optimizers import OPTIMIZERS, Optimizer, OptimizerName
from .policies import POLICIES, Policy, PolicyName
from .strategies import STRATEGIES, Strategy, StrategyName, strategy_named

__all__ = [
    "FORMATS",
    "OPTIMIZERS",
    "POLICIES",
    "STRATEGIES",
    "AbsmaxDtype",
    "Format",
    "FormatName",
    "Optimizer",
    "OptimizerName",
    "Policy",
    "PolicyName",
    "Strategy",
    "StrategyName",
    "strategy_named",
]
