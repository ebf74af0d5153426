"""Safetensors files as everything here writes them: readable by whom the folder is open to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

_READ_AND_WRITE = 0o666


def write_tensors(tensors: Mapping[str, Tensor], path: str | Path, metadata: dict | None = None):
    """Write a file with its folder's permissions.

    safetensors makes files that their owner alone can read, whatever the umask: a server of another user,
    or of a container, fails on them.
    """
    path = Path(path)
    save_file(dict(tensors), path, metadata)
    path.chmod(path.parent.stat().st_mode & _READ_AND_WRITE)
