"""Whether what a flag names can be written, asked before any work is done and without making anything.

Pure: no torch.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def check_folder(
    flag: str, folder: str | Path, size: int = 0, what: str = "it", given: object = None
):
    """Find out whether files of `size` bytes, which are `what`, can be written into a folder.

    Raises ValueError naming the flag and `given`, if that is not the folder itself.
    """
    fault = fault_of(Path(folder), size, what)
    if fault:
        raise ValueError(f"--{flag} {given or folder}: {fault}; give another folder")


def check_file(flag: str, path: str | Path | None):
    """Find out whether a file can be written; no path is none. Raises ValueError naming the flag."""
    if path is None:
        return
    path = Path(path)
    fault = f"{path} is a folder" if path.is_dir() else fault_of(path.parent)
    if not fault and path.exists() and not os.access(path, os.W_OK):
        fault = "it can't be written to"
    if fault:
        raise ValueError(f"--{flag} {path}: {fault}; give another file")


def fault_of(folder: Path, size: int = 0, what: str = "it") -> str | None:
    """Why files of `size` bytes can't be written there, or None."""
    folder = folder.absolute()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir():
        return f"{there} is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} can't be written to"
    disk = shutil.disk_usage(there)
    if not disk.total:
        return f"{there} does not hold files"  # /proc and the like
    if disk.free >= size:
        return None
    return f"{there} has {_size_text(disk.free)} free, but {what} needs {_size_text(size)}"


def _size_text(count: int) -> str:
    """Bytes as people say them."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"
