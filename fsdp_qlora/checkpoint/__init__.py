"""Checkpoints: what a run needs to go on as if it had never been stopped.

Modules, each importing only from those before it: folder, disks, tensors, state, writer, identity,
resume.
"""
from .folder import checkpoints_of
from .resume import Found, find_run, mark_finished, settle
from .state import Boundary, RunState, saved_adapter
from .writer import CheckpointWriter

__all__ = ["Boundary", "CheckpointWriter", "Found", "RunState", "checkpoints_of", "find_run",
           "mark_finished", "saved_adapter", "settle"]
