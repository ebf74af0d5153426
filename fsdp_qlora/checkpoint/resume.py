"""Finds the checkpoint that a run resumes from.

Rank 0 looks and verifies; the others are told, so that all start from the same one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ..atomic_files import sync, write_text
from ..config import RunConfig
from ..config.run import settings_that
from ..config.settings import AUTO, DEFINES_WEIGHTS, RUN_LENGTH, counted, shown
from ..data import Source, Subset, TokenizedDataset
from ..dist import from_main, print_main, ranks_from_env
from ..json_input import from_json
from ..observe.metrics import HISTORY, read_record
from .folder import (
    LEFT_BY_A_RUN,
    MANIFEST,
    WEIGHTS,
    checkpoints_of,
    fault_of,
    keep_earlier,
    newest_whole,
    read_run,
    remove_scratch,
    set_newer_aside,
    step_of,
)
from .identity import differences, is_other, steps_asked, with_batch_of
from .separate_disks import Disks, find_disks

FINISHED = "finished.json"  # beside the checkpoints of a run that came to its end
_OF_ITS_END = (
    *WEIGHTS,
    "metrics.jsonl",
    "loss.png",
)  # what a run that resumes from there writes again


@dataclass
class Found:
    """Where a run stands when it starts."""

    content: dict[str, str]  # hashes of what the run is made from (content.py)
    folder: Path | None = None  # the checkpoint, or None at the beginning
    run: dict | None = None  # its run.json
    metrics: tuple[dict, ...] = ()  # what metrics.jsonl says up to there
    disks: Disks | None = None  # how its files come to machines that don't see them

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.run["step"] if self.run else 0

    def settings(self, config: RunConfig) -> RunConfig:
        """`config` with the rows per step of the run that resumes."""
        return config if self.run is None else with_batch_of(self.run, config, world_size())


def world_size() -> int:
    """How many ranks run now."""
    return ranks_from_env().world_size


def find_run(
    config: RunConfig, dataset: TokenizedDataset | Subset | Source, content: dict[str, str]
) -> Found:
    """Where to go on from, as --resume says; every rank must call it.

    Raises ValueError on every rank if --resume is a path without a whole checkpoint, or if the
    checkpoint is of another run, with what differs.
    """
    out, root = Path(config.output_dir), checkpoints_of(config.output_dir)
    disks = find_disks(out)
    if disks.rank in disks.takers:
        remove_scratch(root)
    disks.bring_newest(out, lambda: config.resume == "auto" and not (root / FINISHED).exists())
    found = replace(from_main(lambda: look(config, dataset, content)), disks=disks)
    if found.folder:
        print_main(
            f"resumed from {found.folder}: step {found.run['step']} of a run that "
            f"{counted(found.run['world_size'], 'rank')} ran on"
        )
    return found


def look(
    config: RunConfig, dataset: TokenizedDataset | Subset | Source, content: dict[str, str]
) -> Found:
    """What `find_run` finds, on rank 0; leaves the folder ready for a run that starts over."""
    root = checkpoints_of(config.output_dir)
    remove_scratch(root)
    found = resumable(config, dataset, content, chosen(config, root), world_size())
    if not (found.folder and _is_inside(found.folder, root)):
        _make_room(config, LEFT_BY_A_RUN)
    return found


def resumable(
    config: RunConfig,
    dataset: TokenizedDataset | Subset | Source,
    content: dict[str, str] | None,
    folder: Path | None,
    ranks: int,
) -> Found:
    """Where a run on so many ranks goes on from, given a checkpoint; changes nothing.

    content: None compares settings alone. Raises ValueError as `find_run` does.
    """
    root, run = checkpoints_of(config.output_dir), read_run(folder) if folder else None
    content = content or (run or {}).get("content", {})
    if run is None or _has_ended(config, dataset, content, root, run, ranks):
        return Found(content)
    ended = config.resume == "auto" and (root / FINISHED).exists()
    _check_same_run(config, differences(run, config, content, ranks), folder, ended)
    _check_length(config, run, dataset, folder)
    kept = _kept_metrics(folder.parent.parent / "metrics.jsonl", run)
    return Found(content, folder, run, tuple(kept))


def _is_inside(folder: Path, root: Path) -> bool:
    """Whether a checkpoint, which may be a link, is among those of the run's own folder."""
    return folder.parent.resolve() == root.resolve()


def settle(found: Found, config: RunConfig, weights: str | None):
    """Once the base is in the model: refuse another than the checkpoint's, or leave the run's folder as
    it was at that checkpoint. On rank 0.

    weights: the hash of all of the base; the checkpoint of an older version has none.
    """
    if not found.folder:
        return
    root, saved = checkpoints_of(config.output_dir), found.run["content"]
    if is_other("weights", saved, {"weights": weights}):
        was = found.run["config"]["model_name"]
        _check_same_run(
            config, {"model_name": f"--model_name has different weights from {was}"}, found.folder
        )
    if not _is_inside(found.folder, root):
        return
    if (root / FINISHED).exists():
        _make_room(config, _OF_ITS_END)
    set_newer_aside(root, found.step)
    (root / FINISHED).unlink(missing_ok=True)


def check_base_stays(config: RunConfig, names: tuple[str, ...] = LEFT_BY_A_RUN):
    """Refuse an --output_dir where the base is one of `names`, which a run replaces or moves."""
    out, base = Path(config.output_dir), Path(config.model_name).resolve()
    if any(base.is_relative_to((out / name).resolve()) for name in names):
        raise ValueError(
            f"--output_dir {out} contains --model_name {config.model_name}, which the new weights "
            "would replace; give another --output_dir"
        )


def _make_room(config: RunConfig, names: tuple[str, ...]):
    """Nothing that an earlier run left in --output_dir is overwritten. Raises ValueError naming it."""
    check_base_stays(config, names)
    out = Path(config.output_dir)
    if kept := keep_earlier(out, names):
        moved = ", ".join(sorted(path.name for path in kept.iterdir()))
        print_main(f"moved the files of an earlier run from {out} to {kept}: {moved}")


def _has_ended(
    config: RunConfig,
    dataset: TokenizedDataset | Subset | Source,
    content: dict[str, str],
    root: Path,
    run: dict,
    ranks: int,
) -> bool:
    """Whether --resume auto meets a run that came to its end, and this is not that run made longer.

    run: of its newest whole checkpoint.
    """
    if config.resume != "auto" or not (root / FINISHED).exists():
        return False
    asked = steps_asked(config, dataset, run)
    longer = asked is not None and asked > last_step(root, run)
    return not longer or bool(
        differences(run, config, content, ranks).keys() - settings_that(RUN_LENGTH)
    )


def _said_of_length(found: dict[str, str]) -> dict[str, str]:
    """What differs but for the length of a finished run, of which a decaying rate is told here."""
    length = settings_that(RUN_LENGTH)
    if said := [text for name, text in found.items() if name in length]:
        print_main(
            f"the finished run goes on: {'; '.join(said)}, so its learning rate rises again. "
            "--resume none starts over"
        )
    return {name: text for name, text in found.items() if name not in length}


def last_step(root: Path, run: dict) -> int:
    """The step that a finished run ended with; that of its checkpoint if the note of it is damaged."""
    try:
        return int(from_json((root / FINISHED).read_text())["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return run["step"]


def chosen(config: RunConfig, root: Path, keep: bool = False) -> Path | None:
    """The checkpoint that --resume asks for, verified; damaged ones are set aside, unless `keep`."""
    if config.resume == "none":
        return None
    if config.resume == "auto":
        return newest_whole(root, print_main, keep)
    folder = Path(config.resume)
    if folder.is_symlink() and step_of(folder) < 0:
        folder = folder.resolve()  # such as "latest"
    if (
        step_of(folder) < 0 and not (folder / MANIFEST).exists()
    ):  # a run's folder, or its checkpoints
        inside = folder if folder.name == "checkpoints" else checkpoints_of(folder)
        newest = newest_whole(inside, print_main, keep)
        if newest is None:
            raise ValueError(
                f"--resume {folder}: no intact checkpoint there; give a folder that training wrote, "
                "auto or none"
            )
        return newest
    if fault := fault_of(folder):
        raise ValueError(
            f"--resume {folder}: {fault}; give another checkpoint, or auto for the newest intact "
            "one in --output_dir"
        )
    return folder


def _check_same_run(config: RunConfig, found: dict[str, str], folder: Path, ended: bool = False):
    """Refuse a checkpoint that differs so; after an explicit path only what it can't do without.

    ended: it is of a finished run, which may be made longer.
    """
    if ended:
        found = _said_of_length(found)
    must = settings_that(DEFINES_WEIGHTS) | {
        "model_name",
        "dataset",
        "global_batch_size",
        "bins_per_step",
        "batch_size",
        "seed",
    }
    if config.resume != "auto":
        for name in found.keys() - must:
            print_main(f"warning: since {folder}, {found[name]}")
        found = {name: text for name, text in found.items() if name in must}
    if not found:
        return
    what = f"--resume {config.resume}: {folder} belongs to another run: {'; '.join(found.values())}"
    if found.keys() & must:
        raise ValueError(
            f"{what}. Give the old values to resume, --resume none to start over, or another "
            "--output_dir"
        )
    raise ValueError(
        f"{what}. Give the old values to resume, --resume {folder} to resume with the new ones, "
        "--resume none to start over, or another --output_dir"
    )


def _check_length(
    config: RunConfig, run: dict, dataset: TokenizedDataset | Subset | Source, folder: Path
):
    """Refuse a run that would have ended before the checkpoint."""
    asked = steps_asked(config, dataset, run)
    too_short = (
        asked < run["step"] if asked is not None else config.num_epochs <= run["sampler"]["epoch"]
    )
    if too_short:
        flag = "num_epochs" if config.max_steps == AUTO else "max_steps"
        raise ValueError(
            f"--{flag} {shown(getattr(config, flag))} ends before {folder}; give a larger "
            "number, or an earlier checkpoint with --resume FOLDER"
        )


def _kept_metrics(path: Path, run: dict) -> list[dict]:
    """The lines of metrics.jsonl up to the checkpoint, and what went wrong after it.

    A line that was cut or damaged is left out.
    """
    if not path.is_file():
        return []
    kept = []
    for record in filter(None, map(read_record, path.read_text(errors="replace").splitlines())):
        evaluated = (run["evaluator"] or {}).get("last") or {"step": 0}
        last = evaluated["step"] if record["kind"] == "eval" else run["step"]
        if record["step"] <= last or record["kind"] in HISTORY:
            kept.append(record)
    return kept


def mark_finished(root: Path, step: int):
    """Say beside a run's checkpoints that it came to its end, so that --resume auto starts over."""
    if not root.is_dir():
        return
    write_text(root / FINISHED, json.dumps({"step": step}))
    sync(root)
