"""A run as one HTML page, made of its metrics.jsonl; nothing is loaded from elsewhere. No torch."""
from .page import write_report

__all__ = ["write_report"]
