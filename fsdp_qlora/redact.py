"""Keep secrets out of what is printed and saved: tokens, passwords in URLs, keys in the environment.

Pure: no torch. Everything that a run prints or writes as text goes through here once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HIDDEN = "***"
_SECRET_NAME = re.compile(r"TOKEN|API_?KEY|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8  # characters of a secret; a shorter value would hide words at random
PATTERNS = (
    (re.compile(r"\b([a-z][a-z0-9+.-]*://)[^/\s@'\"]+@", re.IGNORECASE), rf"\1{HIDDEN}@"),
    (
        re.compile(
            r"([?&][\w.-]*(?:token|key|secret|signature|password|credential|sig)[\w.-]*=)[^&\s'\"]+",
            re.IGNORECASE,
        ),
        rf"\1{HIDDEN}",
    ),
    (
        re.compile(r"\b(hf|api_org|sk|ghp|github_pat|glpat|wandb_v1)([_-])[A-Za-z0-9_-]{8,}"),
        rf"\1\2{HIDDEN}",
    ),
)


def redact(text: str) -> str:
    """A text without the secrets of the environment, tokens, or credentials in URLs."""
    for secret in _secrets_of_environment():
        text = text.replace(secret, HIDDEN)
    for pattern, shown in PATTERNS:
        text = pattern.sub(shown, text)
    return text


def _secrets_of_environment() -> list[str]:
    """Values of variables that are named like secrets, longest first."""
    found = {
        value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST
    }
    return sorted(found, key=len, reverse=True)


def redact_all(value):
    """A value of JSON with every text in it redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_all(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact_all(part) for part in value]
    return value


def without_folders(name: str) -> str:
    """A model's or data set's name for others: of a path only its last part, of a URL no secrets."""
    name = redact(name)
    if "://" in name or not (name.startswith(("/", ".", "~")) or Path(name).exists()):
        return name
    return Path(name).name or Path(name).resolve().name
