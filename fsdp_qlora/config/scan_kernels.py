"""Whether Mamba 2 runs on mamba-ssm's kernels: for runs and for estimates. Pure: no torch."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

# transformers takes the first's kernels wherever it is installed, and these call the second's.
_PACKAGES = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}


@cache
def why_mamba2_on_plain_torch() -> tuple[str, str] | None:
    """Why Mamba 2 runs on this project's op of plain torch, and the remedy; None if on kernels."""
    missing = [name for package, name in _PACKAGES.items() if find_spec(package) is None]
    if not missing:
        return None
    reason = f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed"
    return reason, f"pip install {' '.join(missing)}"
