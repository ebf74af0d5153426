"""Folders appear whole, and nothing that a run did not write is ever deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp_qlora import atomic_files
from fsdp_qlora.atomic_files import complete_folder, replace_folder
from fsdp_qlora.checkpoint.folder import (
    all_checkpoints,
    fault_of,
    keep_earlier,
    prune,
    remove_scratch,
    scratch_folder,
    seal,
    set_aside,
    step_folder,
)


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with its text."""
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def write(folder: Path, **texts: str) -> Path:
    """A folder of small files; `__` in a name stands for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def save(folder: Path, text: str):
    with complete_folder(folder) as new:
        write(new, adapter_model__safetensors=text, README__md=text)


def test_what_a_user_keeps_beside_and_inside_of_saved_weights_stays(tmp_path):
    folder = tmp_path / "adapter"
    save(folder, "first")
    write(folder / ".git", HEAD="mine")
    write(folder, notes__txt="mine", adapter_config__json="of the first")
    others = [write(tmp_path / f"adapter.{name}", a="mine") for name in ("old", "partial", "new")]
    save(folder, "second")
    assert tree(folder) == {
        "adapter_model.safetensors": "second",
        "README.md": "second",
        "notes.txt": "mine",
        ".git/HEAD": "mine",
    }
    assert all(tree(other) == {"a": "mine"} for other in others)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("nth", range(4))
def test_a_kill_while_a_folder_is_replaced_loses_nothing(tmp_path, monkeypatch, nth):
    class Killed(BaseException):
        pass

    folder, calls, rename = tmp_path / "adapter", [], Path.rename
    save(folder, "first")
    write(folder / ".git", HEAD="mine")

    def killed(self, target):
        calls.append(1)
        if len(calls) > nth:
            raise Killed
        return rename(self, target)

    new = write(tmp_path / ".adapter.fsdp_qlora-new", adapter_model__safetensors="second")
    monkeypatch.setattr(Path, "rename", killed)
    try:
        replace_folder(new, folder)
    except Killed:
        pass
    monkeypatch.undo()
    there = [f for f in tmp_path.iterdir() if (f / "adapter_model.safetensors").exists()]
    assert there and (nth < 3) == (len(there) > 1)
    save(folder, "third")
    assert tree(tmp_path) == {
        "adapter/adapter_model.safetensors": "third",
        "adapter/README.md": "third",
        "adapter/.git/HEAD": "mine",
    }


def test_a_link_to_another_disk_stays_and_is_written_behind(tmp_path):
    disk, folder = tmp_path / "disk" / "a", tmp_path / "adapter"
    folder.symlink_to(disk)  # nothing is there yet
    for text in ("first", "second"):
        save(folder, text)
        assert folder.is_symlink() and tree(disk)["README.md"] == text
    assert [p.name for p in disk.parent.iterdir()] == ["a"]


def test_every_file_is_on_the_disk_before_its_folder_has_its_name(tmp_path, monkeypatch):
    folder, events, rename = tmp_path / "adapter", [], Path.rename
    monkeypatch.setattr(atomic_files, "sync", lambda path: events.append(path.name))
    monkeypatch.setattr(
        Path, "rename", lambda self, to: (events.append("rename"), rename(self, to))[1]
    )
    with complete_folder(folder) as new:
        write(new, a="1")
        write(new / "inside", b="2")
    before, after = events[: events.index("rename")], events[events.index("rename") :]
    assert sorted(before) == [".adapter.fsdp_qlora-new", "a", "b", "inside"]
    assert after == ["rename", tmp_path.name]


# ---- among checkpoints ---------------------------------------------------------------------------


def checkpoint(root: Path, step: int) -> Path:
    """A small whole checkpoint."""
    seal(write(scratch_folder(root, step), run__json="{}"), step_folder(root, step))
    return step_folder(root, step)


def test_only_what_a_run_wrote_is_tidied_away(tmp_path):
    mine = {
        write(tmp_path / name, a="mine")
        for name in (
            ".git",
            ".ipynb_checkpoints",
            ".tmp",
            "best.aside",
            "step-000002-of-tuesday",
            ".step-copy.tmp",
        )
    }
    write(tmp_path, step__000007__aside="x", notes__txt="mine")
    (tmp_path / "step-000009").write_text("a file")
    for step in range(1, 5):
        checkpoint(tmp_path, step)
    set_aside(step_folder(tmp_path, 4))
    left = [
        write(tmp_path / name, a="half")
        for name in (
            ".step-000005.tmp",
            ".step-000003.gone",
            ".step-000004.aside.gone",
            f".step-000006.{'a' * 32}",
        )
    ]
    remove_scratch(tmp_path)
    prune(tmp_path, keep=1)
    assert not any(folder.exists() for folder in left)
    assert all(tree(folder) == {"a": "mine"} for folder in mine)
    assert {p.name for p in tmp_path.iterdir()} - {p.name for p in mine} == {
        "step-000003",
        "step-000009",
        "notes.txt",
        "step.000007.aside",
    }


def test_a_checkpoint_that_is_a_link_is_one_like_any_other_and_what_it_leads_to_stays(tmp_path):
    root, disk = tmp_path / "checkpoints", tmp_path / "disk"
    disk.mkdir()
    for step in (1, 2, 3):
        checkpoint(root, step)
    for step in (1, 3):
        step_folder(root, step).rename(disk / str(step))
        step_folder(root, step).symlink_to(Path("..", "disk", str(step)))
    (root / "step-000008").symlink_to(tmp_path / "gone")
    assert [f.name for f in all_checkpoints(root)] == ["step-000003", "step-000002", "step-000001"]
    assert not any(map(fault_of, all_checkpoints(root)))
    prune(root, keep=2)
    assert [f.name for f in all_checkpoints(root)] == ["step-000003", "step-000002"]
    checkpoint(root, 8)  # where a link leads nowhere
    set_aside(step_folder(root, 3))
    prune(root, keep=2)
    assert [f.name for f in all_checkpoints(root)] == ["step-000008", "step-000002"]
    assert tree(disk).keys() == {
        f"{step}/{name}.json" for step in "13" for name in ("run", "manifest")
    }
    assert {p.name for p in root.iterdir()} == {"step-000008", "step-000002"}


def test_an_earlier_run_is_kept_whole_behind_links_and_their_disk_serves_the_next(tmp_path):
    out, disk = tmp_path / "out", tmp_path / "disk"
    disk.mkdir()
    out.mkdir()
    (out / "checkpoints").symlink_to(Path("..", "disk"))
    write(out / "adapter", README__md="first")
    write(tmp_path / "best", a="best")
    (out / "adapter-best").symlink_to(Path("..", "best"))
    for number in (1, 2):
        first = checkpoint(out / "checkpoints", number)
        expected = tree(first)
        kept = keep_earlier(out)
        assert kept == out / f"earlier-{number}"
        assert tree(kept / "checkpoints" / first.name) == expected
        assert os.path.lexists(out / "checkpoints") and not all_checkpoints(out / "checkpoints")
    assert tree(out / "earlier-1" / "adapter-best") == {"a": "best"}
    assert keep_earlier(out) is None  # the link is empty again
