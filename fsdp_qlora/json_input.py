"""JSON and YAML that others wrote: whatever is wrong with it is a ValueError of one line.

Python's parsers end what is nested a thousand times in a RecursionError, which is none. Pure: no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def from_json(text: str | bytes) -> Any:
    """The value that a JSON text stands for. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_object(path: Path) -> dict:
    """The JSON object in a file. Raises ValueError naming the file, or OSError."""
    try:
        found = from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); get the file again") from error
    if isinstance(found, dict):
        return found
    raise ValueError(f"{path}: not a JSON object; get the file again")
