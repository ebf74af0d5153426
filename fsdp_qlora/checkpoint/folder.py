"""Checkpoint folders: complete or absent, verified by hash, pruned so that a good one is always left.

    checkpoints/step-000100/         the name appears when everything in it is on the disk
        manifest.json                SHA-256 and size of every other file; written last
        run.json                     step, settings, schedule, position in the data
        rank-00000.safetensors       a rank's optimizer rows and random states
        adapter/                     the adapter as PEFT reads it
    checkpoints/.step-000200.tmp/    being written, or left by a run that was killed

Either of these may be a link to a folder elsewhere. What else lies among them is somebody else's: it
is never deleted. No torch here: whatever happens to files can be tested fast.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path

from ..atomic_files import remove_folder, sync, write_text
from ..json_input import from_json

MANIFEST, RUN = "manifest.json", "run.json"
_ASIDE = (
    ".aside"  # a damaged checkpoint, or one of a past that was left; gone after the next good one
)
_SCRATCH = re.compile(
    r"\.step-\d+(\.aside)?\.(tmp|gone|[0-9a-f]{32})"
)  # half written, deleted or copied


def checkpoints_of(output_dir: str | Path) -> Path:
    """Where the checkpoints of a run are."""
    return Path(output_dir) / "checkpoints"


def step_folder(root: Path, step: int) -> Path:
    """The checkpoint after `step` optimizer steps."""
    return root / f"step-{step:06}"


def scratch_folder(root: Path, step: int) -> Path:
    """Where that checkpoint is made."""
    return root / f".step-{step:06}.tmp"


def step_of(folder: Path) -> int:
    """The step in a checkpoint's name; -1 where the name is another."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() and digits != folder.name else -1


def all_checkpoints(root: Path) -> list[Path]:
    """Checkpoints by name, the newest first; whole or not."""
    if not root.is_dir():
        return []
    return sorted(
        (f for f in root.iterdir() if step_of(f) >= 0 and f.is_dir()), key=step_of, reverse=True
    )


# ---- writing -----------------------------------------------------------------------------------


def seal(scratch: Path, folder: Path):
    """Hash every file of a finished scratch folder, write the manifest, give the folder its name."""
    inside = sorted(p for p in scratch.rglob("*") if p.is_file())
    for path in inside:
        sync(path)
    files = {
        str(p.relative_to(scratch)): {"bytes": p.stat().st_size, "sha256": sha256(p)}
        for p in inside
    }
    write_text(scratch / MANIFEST, _manifest_text(files))
    for path in (*(p for p in scratch.rglob("*") if p.is_dir()), scratch):
        sync(path)
    if os.path.lexists(folder):
        set_aside(folder)
    scratch.rename(folder)
    sync(folder.parent)


def _manifest_text(files: dict) -> str:
    """The one way a manifest is written: any other spelling of it is damage."""
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def sha256(path: Path) -> str:
    """Hash of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- reading -----------------------------------------------------------------------------------


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every byte is as it was written."""
    try:
        text = (folder / MANIFEST).read_text()
        files = from_json(text)["files"]
        if text != _manifest_text(files):
            return f"{MANIFEST} is damaged"
        if RUN not in files:
            return f"{RUN} is not in {MANIFEST}"
        for name, expected in files.items():
            if (size := (folder / name).stat().st_size) != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if sha256(folder / name) != expected["sha256"]:
                return f"{name} is damaged"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it can't be read ({type(error).__name__}: {error})"
    return None


def newest_whole(root: Path, say: Callable[[str], None], keep: bool = False) -> Path | None:
    """The newest checkpoint without a fault; each that has one is said and, unless `keep`, set aside."""
    for folder in all_checkpoints(root):
        fault = fault_of(folder)
        if fault is None:
            return folder
        say(f"warning: {folder} is not used: {fault}; looking for an earlier one")
        if not keep:
            set_aside(folder)
    return None


def read_run(folder: Path) -> dict:
    """run.json of a checkpoint."""
    return json.loads((folder / RUN).read_text())


# ---- tidying -----------------------------------------------------------------------------------


def set_aside(folder: Path):
    """Take a checkpoint out of the list; `prune` deletes it after the next good one."""
    target = folder.with_name(folder.name + _ASIDE)
    remove_folder(target)
    folder.rename(target)


def set_newer_aside(root: Path, step: int):
    """A run that resumes from `step` leaves the checkpoints after it behind."""
    for folder in all_checkpoints(root):
        if step_of(folder) > step:
            set_aside(folder)


def remove_scratch(root: Path):
    """Delete what a killed run left half written or half deleted."""
    for folder in root.iterdir() if root.is_dir() else ():
        if _SCRATCH.fullmatch(folder.name):
            remove_folder(folder)


def prune(root: Path, keep: int, protected: Iterable[Path] = ()) -> list[Path]:
    """Delete all but the newest `keep`, the one of lowest held-out loss and the `protected`.

    A folder loses its name before its files, so that a kill leaves none that looks complete.
    """
    folders = all_checkpoints(root)
    kept = {*folders[:keep], *protected, _best_of(folders)}
    gone = [f for f in folders if f not in kept] + [f for f in root.iterdir() if _is_aside(f)]
    for folder in gone:
        dying = folder.with_name(f".{folder.name}.gone")
        remove_folder(dying)
        folder.rename(dying)
        remove_folder(dying)
    return gone


def _is_aside(folder: Path) -> bool:
    """Whether `set_aside` gave a folder, or a link, its name."""
    was_checkpoint = folder.name.endswith(_ASIDE) and step_of(folder.with_suffix("")) >= 0
    return was_checkpoint and (folder.is_dir() or folder.is_symlink())


def _best_of(folders: list[Path]) -> Path | None:
    """The checkpoint whose weights had the lowest held-out loss, of those that were evaluated."""
    losses = {folder: loss for folder in folders if (loss := _held_out_loss_of(folder)) is not None}
    return min(losses, key=losses.get, default=None)


def _held_out_loss_of(folder: Path) -> float | None:
    """The held-out loss of a checkpoint's weights, if they were evaluated."""
    try:
        run = read_run(folder)
        last = run["evaluator"]["last"]
        return last["eval_loss"] if last and last["step"] == run["step"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ---- an earlier run ----------------------------------------------------------------------------

_EARLIER = "earlier-"
WEIGHTS = ("adapter", "model")
LEFT_BY_A_RUN = (
    *WEIGHTS,
    *(f"{name}-best" for name in WEIGHTS),
    "checkpoints",
    "metrics.jsonl",
    "loss.png",
    "memory.png",
    "tensorboard",
    "report.html",
)


def keep_earlier(output_dir: Path, names: Iterable[str] = LEFT_BY_A_RUN) -> Path | None:
    """Move what an earlier run left into a folder of its own there, which nothing overwrites.

    None if it left nothing. A crash in between leaves each thing in one of two places.
    """
    left = [path for name in names if (path := output_dir / name).exists()]
    if not any(_is_worth_keeping(path) for path in left):
        return None
    kept = _first_free(output_dir)
    kept.mkdir()
    for path in left:
        move(path, kept / path.name)
    return kept


def _first_free(folder: Path) -> Path:
    """A name for what an earlier run left in a folder."""
    return next(f for n in count(1) if not os.path.lexists(f := folder / f"{_EARLIER}{n}"))


def move(path: Path, target: Path):
    """Rename. A link to a folder stays, for the next run to use that disk: its contents move there."""
    if path.is_symlink() and path.is_dir():
        real = path.resolve()
        inside = [p for p in real.iterdir() if not p.name.startswith(_EARLIER)]
        kept = _first_free(real)
        kept.mkdir()
        target.symlink_to(kept)
        for p in inside:
            p.rename(kept / p.name)
        return
    for link in (path, *(path.iterdir() if path.is_dir() else ())):
        if link.is_symlink():
            _make_absolute(link)
    path.rename(target)


def _make_absolute(link: Path):
    """Let a link lead where it does from anywhere."""
    real = link.resolve()
    link.unlink()
    link.symlink_to(real)


def _is_worth_keeping(path: Path) -> bool:
    """Whether a run got as far as to write something there."""
    if path.name == "metrics.jsonl":
        return '"kind": "step"' in path.read_text(errors="replace")
    if path.is_dir():
        return any(not p.name.startswith(_EARLIER) for p in path.iterdir())
    return path.stat().st_size > 0
