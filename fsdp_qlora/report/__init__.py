"""A run as one HTML page, made of its metrics.jsonl; nothing is loaded from elsewhere. No torch.

Modules, each importing only from those before it: run_history, charts, page.
"""

from .page import write_report

__all__ = ["write_report"]
