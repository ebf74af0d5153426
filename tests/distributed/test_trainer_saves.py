"""A trainer's checkpoint that one rank can't write: every rank says so, and an earlier one resumes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed.test_other_trainers import STEPS, _stop_after, curve, trainer
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

HALF = STEPS // 2
SAVES = dict(save_strategy="steps", save_steps=HALF, learning_rate=1e-3)
ONE = SAVES | dict(save_total_limit=1)
LAST, FIRST = f"checkpoint-{STEPS}", f"checkpoint-{HALF}"
# What is a folder where a file is to be written, and the rank that writes it.
IN_THE_WAY = {
    "README.md": 0,
    f"{LAST}/training_args.json": 0,
    f"{LAST}/scheduler.json": 0,
    f"{LAST}/optimizer/rank-00001.safetensors": 1,
    f"{LAST}/rng_state_1.pth": 1,
    f"{LAST}/trainer_state.json": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), vocab_size=300)


def on_main(function, *args):
    """Rank 0 alone does something to files, while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        function(*args)
    dist.barrier()


def make_folder(path: Path):
    path.mkdir(parents=True)


def said_by(function, *args, **given) -> str:
    """What it raises for a file or a value; empty if nothing."""
    try:
        function(*args, **given)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def failed_saves(folder: str, output: str) -> dict[str, str]:
    """What each trainer says whose last checkpoint can't be written, by what is in the way."""
    from huggingface_hub import constants

    from fsdp_qlora.integrations import trl

    constants.HF_HUB_OFFLINE = True
    said = {}
    for i, name in enumerate(IN_THE_WAY):
        place = Path(output, str(i))
        on_main(make_folder, place / name)
        made = trainer(trl, "SFT", folder, folder, str(place), SAVES)
        said[name] = said_by(made.train)
    file = Path(output, "file")
    on_main(file.write_text, "not a folder")
    for name, place in (("output_dir", f"{file}/run"), ("hub", f"{output}/hub")):
        given = SAVES | dict(push_to_hub=name == "hub", hub_token="none")
        said[name] = said_by(trainer, trl, "SFT", folder, folder, place, given)
    return said


@pytest.mark.filterwarnings("ignore")
def test_what_one_rank_cant_write_every_rank_says_and_the_earlier_checkpoint_stays(
    folder, tmp_path
):
    first, second = run_ranks(failed_saves, 2, folder, str(tmp_path))
    assert first == second
    assert first.pop("output_dir").startswith(
        f"output_dir='{tmp_path}/file/run': {tmp_path}/file is"
    )
    assert first.pop("hub").startswith("rank 0 could not write: OfflineModeIsEnabled")
    for i, (name, rank) in enumerate(IN_THE_WAY.items()):
        saved = LAST if "/" in name else FIRST
        begin = f"{tmp_path}/{i}/{saved}: rank {rank} could not write: "
        assert first[name].startswith(begin) and "\n" not in first[name], first[name]
        assert (tmp_path / str(i) / FIRST / "trainer_state.json").is_file() == (saved == LAST)


def resumed_after_a_full_disk(folder: str, output: str) -> dict:
    """Curves of a run without a stop, and of one that goes on after its last save failed on rank 1."""
    from fsdp_qlora.integrations import states, trl

    whole = trainer(trl, "SFT", folder, folder, f"{output}/whole", ONE)
    whole.train()
    write = states.write_rows

    def full(path: Path, rows):
        if dist.get_rank() == 1 and LAST in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, rows)

    states.write_rows = full
    made = trainer(trl, "SFT", folder, folder, f"{output}/stopped", ONE)
    said = said_by(made.train)
    states.write_rows = write
    dist.barrier()
    left = sorted(p.name for p in Path(output, "stopped").glob("checkpoint-*"))
    made = trainer(trl, "SFT", folder, folder, f"{output}/stopped", ONE)
    made.train(resume_from_checkpoint=True)
    return dict(whole=curve(whole), resumed=curve(made), said=said, left=left)


@pytest.mark.filterwarnings("ignore")
def test_after_a_full_disk_a_run_resumes_from_the_checkpoint_before(folder, tmp_path):
    for found in run_ranks(resumed_after_a_full_disk, 2, folder, str(tmp_path)):
        assert "rank 1 could not write: " in found["said"] and "No space" in found["said"]
        assert found["left"] == [FIRST]
        assert found["resumed"] == found["whole"] and len(found["whole"]) == STEPS


def rates_of_resumed(folder: str, output: str) -> dict[str, list]:
    """By a schedule's name the rates of a run, and of one that stops in its middle and goes on."""
    from torch.optim import lr_scheduler as schedules

    from fsdp_qlora.integrations import trl

    def nested(optimizer):
        steps = [schedules.MultiStepLR(optimizer, [1, 2], 0.1), schedules.StepLR(optimizer, 1, 0.5)]
        return schedules.SequentialLR(optimizer, steps, [HALF + 1])

    kinds = dict(
        milestones=lambda optimizer: schedules.MultiStepLR(optimizer, [1, HALF + 1], 0.1),
        nested=nested,
        cosine=lambda optimizer: schedules.CosineAnnealingLR(optimizer, STEPS),
    )
    found = {}
    for kind, schedule in kinds.items():
        found[kind] = []
        for name, resumed in (("whole", False), ("stopped", False), ("stopped", True)):
            made = trainer(trl, "SFT", folder, folder, f"{output}/{kind}/{name}", SAVES)
            made.create_optimizer()
            made.lr_scheduler = schedule(made.optimizer)
            if name == "stopped" and not resumed:
                made.add_callback(_stop_after(HALF))
            made.train(resume_from_checkpoint=resumed)
            logged = made.state.log_history
            found[kind].append([h["learning_rate"] for h in logged if "learning_rate" in h])
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_schedule_of_ones_own_has_the_rates_of_one_that_was_not_stopped(folder, tmp_path):
    (found,) = run_ranks(rates_of_resumed, 1, folder, str(tmp_path))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, HALF + 1], 0.1)
    expected = []
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        expected.append(optimizer.param_groups[0]["lr"])
    for whole, stopped, resumed in found.values():
        assert len(set(whole)) > 2 and stopped == whole[:HALF]
        assert resumed == pytest.approx(whole)
    assert found["milestones"][0] == pytest.approx([1e-3, *expected[:-1]])
