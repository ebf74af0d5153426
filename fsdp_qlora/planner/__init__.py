"""What to train with: the ladder a person would climb, and the search that finds what is fastest.

Both ask the estimates. The ladder is the order of explanation: each rung adds one way to save memory
to those before, and says what it needs and why it is not the answer. The search tries every strategy,
offload and micro-batch with the mix of activation policies that is fastest within the card's memory,
and ranks what fits by predicted time. `--global_batch_size` is the user's and never changed. Pure: no
torch.

Modules, each importing only from those before it: ladder, search, proposal, report, picture.
"""

from __future__ import annotations

from .ladder import BEYOND, LADDER, Rung, climb, flags_of, rungs, savings
from .picture import draw
from .proposal import Proposal, free_settings, propose
from .report import as_json, packing_line, report
from .search import search

__all__ = [
    "BEYOND",
    "LADDER",
    "Proposal",
    "Rung",
    "as_json",
    "climb",
    "draw",
    "flags_of",
    "free_settings",
    "propose",
    "packing_line",
    "report",
    "rungs",
    "savings",
    "search",
]
