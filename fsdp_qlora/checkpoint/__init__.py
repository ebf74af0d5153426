"""Checkpoints: what a run needs to go on as if it had never been stopped."""
from .folder import checkpoints_of
from .resume import Found, find_run, mark_finished
from .state import Boundary, RunState
from .writer import CheckpointWriter

__all__ = ["Boundary", "CheckpointWriter", "Found", "RunState", "checkpoints_of", "find_run",
           "mark_finished"]
