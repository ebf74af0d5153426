"""No damage to a checkpoint goes unseen: the one before it is found, and said so.

1,000 damages of files of real checkpoints, and 100 writes that the system cuts off.
"""

from __future__ import annotations

import io
import random
import resource
import shutil
import sys
import threading
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from fsdp_qlora.checkpoint.folder import all_checkpoints, fault_of, newest_whole, read_run
from fsdp_qlora.checkpoint.resume import _kept_metrics
from fsdp_qlora.observe.runlog import RunLog
from fsdp_qlora.observe.throughput import Pace
from tests.distributed.test_resume import run_once, settings
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

DAMAGES, CUT_WRITES = 1000, 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def root(folder, tmp_path_factory):
    """Three checkpoints of a run on two ranks."""
    out = tmp_path_factory.mktemp("out")
    run_ranks(run_once, 2, settings(folder, out, checkpoint_every=2, keep_checkpoints=3))
    return out / "checkpoints"


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def zero(data: bytes, rng: random.Random) -> bytes:
    """A block of zeros, as a disk that lost power leaves it."""
    place = rng.randrange(len(data))
    changed = data[:place] + bytes(min(64, len(data) - place)) + data[place + 64 :]
    return changed if changed != data else flip(data, rng)


def grow(data: bytes, rng: random.Random) -> bytes:
    return data + bytes(rng.randrange(1, 100))


DAMAGE = {"cut": cut, "flip": flip, "zero": zero, "grow": grow, "delete": None}


@pytest.mark.slow
def test_every_damage_is_seen_and_the_checkpoint_before_is_taken(root):
    rng, seen = random.Random(0), Counter()
    for number in range(DAMAGES):
        newest, second, third = all_checkpoints(root)
        broken = [newest, second] if number % 4 == 0 else [newest]
        kept = {}
        for folder in broken:
            path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
            kind = rng.choice(list(DAMAGE))
            kept[path] = data = path.read_bytes()
            path.unlink()
            if kind != "delete":
                path.write_bytes(DAMAGE[kind](data, rng))
            seen[kind, path.name] += 1
        said = []
        found = newest_whole(root, said.append)
        assert found == (third if second in broken else second), (number, kept.keys(), said)
        assert all(str(folder) in line for folder, line in zip(broken, said, strict=True))
        for folder in broken:
            folder.with_name(folder.name + ".aside").rename(folder)
        for path, data in kept.items():
            path.write_bytes(data)
    assert len(seen) >= 5 * 6, seen  # every kind met every file
    assert not any(fault_of(folder) for folder in all_checkpoints(root))


@pytest.mark.slow
def test_a_checkpoint_of_files_of_two_checkpoints_is_seen(root, tmp_path):
    newest, second, _ = all_checkpoints(root)
    for path in sorted(p for p in newest.rglob("*.*") if p.is_file()):
        mixed = tmp_path / "step-000009"
        shutil.copytree(newest, mixed)
        other = second / path.relative_to(newest)
        shutil.copy(other, mixed / path.relative_to(newest))
        same = other.read_bytes() == path.read_bytes()
        assert bool(fault_of(mixed)) != same, path
        shutil.rmtree(mixed)


@pytest.mark.slow
def test_no_damage_to_the_figures_keeps_a_run_from_going_on(root, tmp_path):
    rng, whole = random.Random(0), (root.parent / "metrics.jsonl").read_bytes()
    run = read_run(all_checkpoints(root)[0])
    for _ in range(DAMAGES):
        damage = rng.choice((cut, flip, zero, grow))
        (tmp_path / "metrics.jsonl").write_bytes(damage(whole, rng))
        kept = _kept_metrics(tmp_path / "metrics.jsonl", run)
        Pace(run["step"], None, kept)
        with RunLog(tmp_path, earlier=kept) as log:
            pass
        assert damage is cut or len(log.steps) >= run["step"] - 2, (damage, kept)


def cut_writes(folder: str, out: str) -> list[str]:
    """Write a checkpoint under a limit of file size that grows; what was there after each try."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.checkpoint import CheckpointWriter, RunState
    from fsdp_qlora.checkpoint.separate_disks import find_disks
    from fsdp_qlora.data import StepSampler
    from fsdp_qlora.optim import build_optimizer, build_scheduler

    sys.stdout = open("/dev/null", "w")  # noqa: SIM115  a file of the test's would meet the limit too
    config = settings(folder, out)
    model = build_model(config, torch.device("cpu"))
    optimizer = build_optimizer(model)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    optimizer.step()
    state = RunState(
        model,
        optimizer,
        build_scheduler(optimizer, "constant", 9),
        StepSampler(9, 1),
        None,
        torch.device("cpu"),
    )
    facts = dict(run_id="", config={}, content={}, world_size=1, rows_per_step=1)
    writer = CheckpointWriter(Path(out, "checkpoints"), state, config, facts, find_disks(Path(out)))
    writer.save(state.boundary(1))
    writer.join()
    assert writer.failure is None, writer.failure
    largest = max(p.stat().st_size for p in Path(out).rglob("*") if p.is_file())
    there, unlimited = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(CUT_WRITES):
        limit = largest * number // CUT_WRITES
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        writer.save(state.boundary(2 + number))
        writer.join()
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        assert writer.failure and not writer.has_failed(), limit
        there.append([p.name for p in Path(out, "checkpoints").iterdir()])
    writer.save(state.boundary(500))
    writer.join()
    Path(out, "checkpoints", ".step-000001.gone").touch()  # in the way of its deletion
    writer.save(state.boundary(501))
    writer.join()
    left = [f.name for f in all_checkpoints(Path(out, "checkpoints"))]
    writer.thread = threading.Thread(target=time.sleep, args=(1.1,))  # a write to a slow disk
    writer.thread.start()
    with redirect_stdout(io.StringIO()) as said:
        writer.save(state.boundary(501))
    return there, writer.failure, left, said.getvalue()


def test_a_write_that_is_cut_off_leaves_the_older_checkpoint_and_nothing_else(folder, tmp_path):
    ((there, failure, after, said),) = run_ranks(cut_writes, 1, folder, str(tmp_path))
    assert there == [["step-000001"]] * CUT_WRITES
    assert said.startswith("the checkpoint after step 501 waited 1.") and said.count("\n") == 1
    assert failure is None and after == ["step-000501", "step-000500", "step-000001"]
    assert not any(fault_of(f) for f in all_checkpoints(tmp_path / "checkpoints"))
