"""Checkpoints: what a run needs to go on as if it had never been stopped.

Modules, each importing only from those before it: folder, separate_disks, tensors, state, writer,
content, identity, resume.
"""

from .content import check_same_on_every_rank, content_of
from .folder import checkpoints_of
from .identity import is_other, per_step
from .resume import Found, find_run, mark_finished, settle
from .state import Boundary, RunState, saved_adapter
from .writer import CheckpointWriter

__all__ = [
    "Boundary",
    "CheckpointWriter",
    "Found",
    "RunState",
    "check_same_on_every_rank",
    "checkpoints_of",
    "content_of",
    "find_run",
    "is_other",
    "mark_finished",
    "per_step",
    "saved_adapter",
    "settle",
]
