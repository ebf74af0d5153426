"""Every setting of a run, once: its name, default and help.

The command line, recipes, their schema and docs/flags.md are made from these fields, so a setting is
written in one place. Names follow the original fsdp_qlora script where it had them. Pure: no torch.

A module for each part of a run. Modules, each importing only from those before it: model, adapter, data,
batch, sharding, optimizer, output, launch.
"""

from .adapter import OLD_ALL_TARGETS, AdapterOptions
from .batch import BatchOptions
from .data import DataOptions, EvaluationOptions
from .launch import LaunchOptions, ProfileOptions
from .model import PRECISIONS, TRAIN_TYPES, ModelOptions
from .optimizer import OptimizerOptions
from .output import CheckpointOptions, OutputOptions
from .sharding import ShardingOptions

__all__ = [
    "OLD_ALL_TARGETS",
    "PRECISIONS",
    "TRAIN_TYPES",
    "AdapterOptions",
    "BatchOptions",
    "CheckpointOptions",
    "DataOptions",
    "EvaluationOptions",
    "LaunchOptions",
    "ModelOptions",
    "OptimizerOptions",
    "OutputOptions",
    "ProfileOptions",
    "ShardingOptions",
]
