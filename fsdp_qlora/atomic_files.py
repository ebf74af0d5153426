"""Files and folders that are on the disk whole under their name, or not under it at all.

What a user keeps in the way is never deleted: a scratch folder has a hidden name that nobody else
gives, and a folder that is written again hands on what the run did not write. Pure: no torch.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

# What transformers, PEFT and this project write beside trained weights.
_WRITTEN = re.compile(
    r"adapter_config\.json|adapter_model\.safetensors|(generation_)?config\.json|README\.md|"
    r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|fsdp_qlora\.json|tokenizer\..*|"
    r"tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.\w+|merges\.txt|"
    r"chat_template\..*|additional_chat_templates"
)


def sync(path: Path):
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_all(folder: Path):
    """Wait until everything in a folder is on the disk."""
    inside = list(folder.rglob("*"))
    for path in inside:
        if path.is_file():
            sync(path)
    for path in (*filter(Path.is_dir, inside), folder):
        sync(path)


def write_text(path: Path, text: str):
    """A text file that is on the disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def remove_folder(path: Path):
    """Delete a folder, or a link but not what it leads to; a file in its place stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


# ---- a folder that appears whole ---------------------------------------------------------------


class complete_folder:  # noqa: N801  used like a function
    """A context manager: a scratch folder that takes the wanted name only if the block succeeds."""

    def __init__(self, folder: Path):
        self.folder, self.scratch = folder, scratch_of(folder)

    def __enter__(self) -> Path:
        remove_folder(self.scratch)
        self.scratch.mkdir(parents=True)
        return self.scratch

    def __exit__(self, kind, *_):
        if kind is None:
            replace_folder(self.scratch, self.folder)
        else:
            remove_folder(self.scratch)


def scratch_of(folder: Path) -> Path:
    """Where a folder is made before it gets its name; behind a link, on the disk it leads to."""
    return hidden(folder.resolve(), "new")


def hidden(folder: Path, state: str) -> Path:
    """A name beside a folder that only this project gives."""
    return folder.with_name(f".{folder.name}.fsdp_qlora-{state}")


def replace_folder(new: Path, folder: Path):
    """Put a complete folder in place of an older one, of which one is there at any time."""
    folder = folder.resolve()
    old = hidden(folder, "old")
    _sync_all(new)
    if old.is_dir():
        _finish_replacing(old, folder)  # of a run that was killed amid it
    if folder.is_dir():
        folder.rename(old)
    new.rename(folder)
    if old.is_dir():
        _finish_replacing(old, folder)
    sync(folder.parent)


def _finish_replacing(old: Path, folder: Path):
    """Delete what was replaced, but for what nobody here wrote, such as .git: that moves on."""
    if not folder.exists():
        old.rename(folder)
        return
    for path in old.iterdir():
        if not _WRITTEN.fullmatch(path.name) and not os.path.lexists(folder / path.name):
            path.rename(folder / path.name)
    remove_folder(old)
