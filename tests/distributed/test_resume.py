"""A run that was stopped and goes on is the run that never stopped: same rows, rates, masks, losses."""

from __future__ import annotations

import io
import json
import shutil
import threading
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fsdp_qlora.checkpoint.folder import all_checkpoints, fault_of, seal
from tests.parts import in_parts, slow
from tests.ranks import run_ranks
from tests.tiny import save_tiny
from tests.tokenizers import VOCAB_SIZE, save_chat_model, save_tokenizer

STEPS, STOP_AT = 6, 4  # the stop is in the fifth step; the last checkpoint before it is of step 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


def settings(folder: str, out, **others):
    """Two epochs of eleven rows in steps of four, with dropout and a cosine."""
    from fsdp_qlora.config import RunConfig

    return RunConfig(
        **dict(
            model_name=folder,
            precision="fp32",
            lora_rank=4,
            lora_dropout=0.1,
            lr=1e-2,
            lr_scheduler="cosine",
            num_epochs=2,
            global_batch_size=4,
            apply_gradient_clipping=True,
            checkpoint_every=3,
            log_to="jsonl",
            output_dir=str(out),
            device="cpu",
        )
        | others
    )


def rows_of(count: int, first: int = 0) -> list:
    from fsdp_qlora.data import Row

    return [
        Row(
            str(i),
            messages=[
                dict(role="user", content="?" * (i % 5)),
                dict(role="assistant", content=chr(ord("A") + i) * (1 + i % 4)),
            ],
        )
        for i in range(first, first + count)
    ]


class Killed(Exception):
    """Stands for whatever ends a run between two steps."""


def run_once(
    config, stop_at: int | None = None, num_rows: int = 11, held_out: int = 0, signals=None
) -> list[list[int]]:
    """Train; the trained tokens that this rank saw in each step. Raises Killed in step `stop_at`."""
    from fsdp_qlora.data import tokenize_rows
    from fsdp_qlora.dist import rank_device
    from fsdp_qlora.preflight.run_data import run_tokenizer
    from fsdp_qlora.training import loop, trainer

    seen, train_step = [], loop.train_step

    def watched(model, optimizer, micro_batches, **kwargs):
        if len(seen) == stop_at:
            raise Killed
        seen.append(
            sorted(t for b in micro_batches for t in b["labels"].flatten().tolist() if t > 2)
        )
        return train_step(model, optimizer, micro_batches, **kwargs)

    loop.train_step = watched
    tokenizer = run_tokenizer(config)
    try:
        trainer.train(
            config,
            tokenize_rows(rows_of(num_rows), tokenizer, context_length=64),
            rank_device(config.device),
            tokenizer,
            tokenize_rows(rows_of(held_out, 20), tokenizer, context_length=64)
            if held_out
            else None,
            signals,
        )
    except Killed:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
    finally:
        loop.train_step = train_step
    return seen


def whole_and_resumed(folder: str, out: str, cases: list[dict]) -> list[dict]:
    """For each case: rows seen by a run of six steps, and by one stopped in the fifth and resumed."""
    from fsdp_qlora.training import trainer

    trainer.plot_loss = lambda *_: False  # a picture takes longer than a run of so few steps
    results = []
    for number, case in enumerate(cases):
        case, held_out = dict(case), case.get("eval_every", 0) and 3
        whole = run_once(settings(folder, Path(out, f"{number}-whole"), **case), held_out=held_out)
        config = settings(folder, Path(out, f"{number}-resumed"), **case)
        first = run_once(config, STOP_AT, held_out=held_out)
        results.append(dict(whole=whole, first=first, second=run_once(config, held_out=held_out)))
    return results


def metrics(out: Path, kind: str = "step") -> list[dict]:
    """What metrics.jsonl says, without times."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {
            k: v
            for k, v in r.items()
            if "second" not in k
            and k not in ("peak_allocated_gib", "model_tflops_per_gpu", "share_of_peak")
        }
        for r in records
        if r["kind"] == kind
    ]


CASES = [
    dict(sharding_strategy="full_shard", train_type="qlora"),
    dict(sharding_strategy="ddp", train_type="lora"),
    dict(sharding_strategy="shard_grad_op", train_type="full", lr=1e-3),
    dict(
        sharding_strategy="full_shard",
        train_type="lora",
        use_cpu_offload=True,
        eval_every=2,
        eval_dataset="given",
    ),
    dict(train_type="lora", optimizer="adadelta", adapter_dtype="bf16"),
    dict(train_type="bnb_dora", loraplus_lr_ratio=4.0),
    dict(train_type="full", optimizer="adamw_8bit", lr=1e-3),
    dict(train_type="lora", optimizer="adafactor", lr=1e-3, lora_rank=1),
    dict(train_type="qlora", init_lora_weights="pissa"),
    dict(train_type="hqq_llama_pro", lr=1e-3),
    dict(train_type="lora", precision="fp16_autocast"),
    dict(train_type="bnb_dora", init_lora_weights="loftq", loftq_iter=2, adapter_dtype="bf16"),
]


@pytest.mark.parametrize("world_size", [slow(1), 2])
@pytest.mark.parametrize("cases", in_parts(CASES, 0, 3, then=(6, 9)))
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(folder, tmp_path, world_size, cases):
    by_rank = run_ranks(whole_and_resumed, world_size, folder, str(tmp_path), cases)
    for number, case in enumerate(cases):
        whole, resumed = tmp_path / f"{number}-whole", tmp_path / f"{number}-resumed"
        for rank in by_rank:
            seen = rank[number]
            assert len(seen["whole"]) == STEPS and len(seen["first"]) == STOP_AT
            assert seen["second"] == seen["whole"][3:], case
        assert metrics(whole) == metrics(resumed) and len(metrics(whole)) == STEPS, case
        assert len({m["lr"] for m in metrics(whole)}) == STEPS
        assert metrics(whole, "eval") == metrics(resumed, "eval"), case
        for file in sorted(
            (whole / ("model" if case["train_type"] == "full" else "adapter")).glob("*.safetensors")
        ):
            expected = load_file(file)
            found = load_file(resumed / file.relative_to(whole))
            assert expected.keys() == found.keys()
            assert all(torch.equal(found[k], expected[k]) for k in expected), case


# ---- other numbers of ranks, other layouts -------------------------------------------------------

LEGS = [
    (2, dict(sharding_strategy="full_shard"), 3),  # ranks, layout, where it is stopped
    (1, dict(sharding_strategy="ddp", batch_size=3), 3),
    (4, dict(sharding_strategy="shard_grad_op", batch_size=2, activation_policy="keep_all"), None),
]


@pytest.mark.parametrize("train_type", ["qlora", slow("full")])
def test_a_run_goes_on_with_its_rows_on_another_number_of_ranks_and_another_strategy(
    folder, tmp_path, train_type
):
    common = dict(
        train_type=train_type, lora_dropout=0.0, lr=1e-3, checkpoint_every=2, global_batch_size=4
    )
    ((whole),) = run_ranks(run_once, 1, settings(folder, tmp_path / "whole", **common))
    steps, out = [], tmp_path / "moved"
    for world_size, layout, stop_at in LEGS:
        by_rank = run_ranks(
            run_once, world_size, settings(folder, out, **common, **layout), stop_at
        )
        steps = steps[: 2 if len(steps) == 3 else 4]  # what came after the checkpoint is done again
        steps += [sorted(sum(parts, [])) for parts in zip(*by_rank, strict=True)]
    assert steps == whole and len(whole) == STEPS
    for moved, stayed in zip(metrics(out), metrics(tmp_path / "whole"), strict=True):
        assert moved["lr"] == stayed["lr"]
        assert moved["loss"] == pytest.approx(stayed["loss"], rel=1e-5)


def rows_and_seed(config, stop_at: int | None = None) -> tuple[list, int]:
    """`run_once`, and the seed that dropout drew from at its end."""
    return run_once(config, stop_at), torch.initial_seed()


def test_on_another_number_of_ranks_a_step_has_as_many_rows_and_masks_that_the_run_has_not_had(
    folder, tmp_path
):
    """Also where the rows of a step follow from the number of ranks."""
    rows = dict(global_batch_size=-1, batch_size=2, gradient_accumulation_steps=1)
    config = settings(folder, tmp_path, **rows, checkpoint_every=1)
    first = run_ranks(rows_and_seed, 2, config, 1)
    second = run_ranks(rows_and_seed, 1, config, 2)
    third = run_ranks(rows_and_seed, 2, config)
    assert [len(leg[0][0]) for leg in (first, second, third)] == [1, 2, STEPS - 3]
    assert len({seed for leg in (first, second, third) for _, seed in leg}) == 5
    runs = [
        json.loads((f / "run.json").read_text()) for f in all_checkpoints(tmp_path / "checkpoints")
    ]
    assert {run["rows_per_step"] for run in runs} == {4} and len(
        {run["run_id"] for run in runs}
    ) == 1


# ---- what is refused -----------------------------------------------------------------------------


def refusals(folder: str, out: str, cases: list[dict]) -> list[str]:
    """After a run was stopped: what each case is told, or "" if it went on."""
    import torch.distributed as dist

    run_once(settings(folder, out), STOP_AT)
    dist.barrier()  # rank 0 has written
    before, said = listed(out), []
    for case in cases:
        num_rows = case.pop("num_rows", 11)
        config = settings(folder, out, **case)
        try:
            run_once(config, 0, num_rows)
            said.append("")
        except ValueError as error:
            said.append(str(error))
            assert listed(out) == before
    return said


def listed(out: str) -> dict[str, bytes]:
    """Every file below a folder, but for the mark by which ranks see whether they share a disk."""
    return {
        str(p): p.read_bytes()
        for p in Path(out).rglob("*")
        if p.is_file() and not p.name.startswith(".seen-")
    }


def test_a_changed_model_adapter_batch_or_data_is_refused_on_every_rank_with_what_differs(
    folder, tmp_path
):
    other = save_tiny(tmp_path / "other", vocab_size=VOCAB_SIZE, num_hidden_layers=2)
    save_tokenizer(other)
    same_shape = save_chat_model(tmp_path / "same", num_hidden_layers=1)
    change_weights(same_shape)
    nearly = save_chat_model(tmp_path / "nearly", num_hidden_layers=1)
    change_weights(nearly, 100, 1)
    out = tmp_path / "out"
    here = str(out / "checkpoints" / "step-000003")
    cases = {
        "--lora_rank was 4 and is 8": dict(lora_rank=8),
        "--lr was 0.01 and is 0.02": dict(lr=0.02),
        "--max_steps was -1 and is 9, which --lr_scheduler cosine depends on": dict(max_steps=9),
        f"--resume {here} to resume with the new ones": dict(num_epochs=3),
        "--quant was nf4 and is none": dict(train_type="lora"),
        "--model_name is a different model": dict(model_name=other),
        "--model_name has different weights from": dict(model_name=same_shape),
        f"--model_name has different weights from {folder}. Give": dict(model_name=nearly),
        "--dataset has different rows": dict(num_rows=10),
        "--global_batch_size: a step was 4 rows and is 6 rows": dict(global_batch_size=6),
        "--seed was 42 and is 43": dict(resume=here, seed=43),
        "no intact checkpoint there": dict(resume=str(tmp_path / "other")),
        "manifest.json is missing": dict(resume=str(out / "checkpoints" / "step-000009")),
    }
    for said in run_ranks(refusals, 2, folder, str(out), list(cases.values())):
        for expected, text in zip(cases, said, strict=True):
            assert expected in text and "\n" not in text and "--resume" in text, (expected, text)


def change_weights(folder: str, at: int = 0, count: int | None = None):
    """Give a model of a folder some other values in one tensor, from one place on."""
    path = Path(folder, "model.safetensors")
    weights = load_file(path)
    weights["model.layers.0.mlp.up_proj.weight"].view(-1)[at:][:count] *= -1
    save_file(weights, path, {"format": "pt"})


def older_checkpoint(folder: str, out: str) -> int:
    """Steps of a run that is resumed from what a version wrote that lacked settings and hashes."""
    import torch.distributed as dist

    run_once(settings(folder, out), STOP_AT)
    dist.barrier()
    if dist.get_rank() == 0:
        newest = all_checkpoints(Path(out, "checkpoints"))[0]
        run = json.loads((newest / "run.json").read_text())
        for name in ("lora_target_parameters", "bias", "cuda_graphs"):
            del run["config"][name]
        assert run.pop("plan")["sharding"]["world_size"] == 2
        run["content"] = {kind: run["content"][kind] for kind in ("model", "data")}
        scratch = newest.with_name(".step-000003.tmp")
        newest.rename(scratch)
        (scratch / "manifest.json").unlink()
        (scratch / "run.json").write_text(json.dumps(run))
        seal(scratch, newest)
    dist.barrier()
    return len(run_once(settings(folder, out)))


def test_a_checkpoint_of_a_version_without_some_settings_and_hashes_is_resumed(folder, tmp_path):
    assert run_ranks(older_checkpoint, 2, folder, str(tmp_path)) == [STEPS - 3] * 2


def evaluated_on_others(folder: str, out: str) -> str:
    """What is said where a run goes on with other held-out rows."""
    config = settings(folder, out, eval_every=1, eval_dataset="given")
    run_once(config, STOP_AT, held_out=3)
    with redirect_stdout(io.StringIO()) as said:
        run_once(config, held_out=4)
    return said.getvalue()


def test_losses_on_other_held_out_rows_do_not_count_as_the_best(folder, tmp_path):
    (said,) = run_ranks(evaluated_on_others, 1, folder, str(tmp_path))
    assert "the held-out rows have changed" in said
    after = [e for e in metrics(tmp_path, "eval") if e["step"] > 3]
    assert after[0]["is_best"]


def test_layout_and_paths_may_change_and_an_explicit_path_lets_the_rate_change(folder, tmp_path):
    out = tmp_path / "out"
    cases = [
        dict(activation_policy="keep_all", checkpoint_every=5, log_to="stdout"),
        dict(resume=str(out), lr=0.02),
    ]
    assert run_ranks(refusals, 1, folder, str(out), cases) == [["", ""]]


def runs_of_other_lengths(folder: str, out: str) -> tuple[list[int], str, list]:
    """Steps of a run that was stopped, is made longer, ends, and is made longer again; a refusal."""
    config = settings(folder, Path(out, "longer"), lr_scheduler="constant", lr_warmup_steps=2)
    seen = [len(run_once(config, STOP_AT))]
    try:
        said = str(run_once(replace(config, max_steps=2)))
    except ValueError as error:
        said = str(error)
    seen += [
        len(run_once(replace(config, max_steps=7))),
        len(run_once(replace(config, num_epochs=3))),
        len(run_once(replace(config, num_epochs=3), 0)),
    ]
    whole = run_once(replace(config, num_epochs=3, output_dir=str(Path(out, "whole"))))
    return seen, said, whole


@pytest.mark.slow
def test_under_a_constant_rate_a_run_that_was_stopped_or_has_ended_can_be_made_longer(
    folder, tmp_path
):
    """And is the one that was so long from the beginning; not if it is made shorter than it is."""
    (seen, said, whole), _ = run_ranks(runs_of_other_lengths, 2, folder, str(tmp_path))
    assert seen == [STOP_AT, 7 - 3, 9 - 6, 0] and len(whole) == 9
    assert "--max_steps 2 ends before" in said and "give a larger number" in said
    ended = (
        tmp_path / "longer" / "earlier-2"
    )  # by the same command again; earlier-1 is of seven steps
    assert metrics(ended) == metrics(tmp_path / "whole") and len(metrics(ended)) == 9
    saved = [
        (folder / "adapter/adapter_model.safetensors").read_bytes()
        for folder in (ended, tmp_path / "whole")
    ]
    assert saved[0] == saved[1]


LAST = Path("checkpoints", "step-000006")
DAMAGE_AT_THE_END = {
    "a cut run.json": lambda out: cut(out / LAST / "run.json"),
    "a changed adapter": lambda out: flip(out / LAST / "adapter/adapter_model.safetensors"),
    "no manifest": lambda out: (out / LAST / "manifest.json").unlink(),
    "a stray file": lambda out: (out / "checkpoints/step-000099").write_text("mine"),
    "a cut note of the end": lambda out: cut(out / "checkpoints/finished.json"),
    "a checkpoint that is a link": lambda out: link(out / LAST, out.parent / "disk"),
    "all checkpoints behind a link": lambda out: link(out / "checkpoints", out.parent / "disk"),
}


def cut(path: Path):
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link(path: Path, disk: Path):
    path.rename(disk)
    path.symlink_to(Path("..", *[".."] * (path.parent.name == "checkpoints"), disk.name))


def longer_runs(folder: str, out: str) -> list[tuple[int, str]]:
    """Steps that a finished run of six takes to come to nine after each damage, and what it said."""
    found = []
    for number, damage in enumerate(DAMAGE_AT_THE_END.values()):
        config = settings(folder, Path(out, str(number), "out"), lr_scheduler="constant")
        run_once(config)
        damage(Path(config.output_dir))
        with redirect_stdout(io.StringIO()) as said:
            found.append((len(run_once(replace(config, num_epochs=3))), said.getvalue()))
    return found


@pytest.mark.slow
def test_a_finished_run_that_is_made_longer_goes_on_from_the_newest_checkpoint_that_is_whole(
    folder, tmp_path
):
    (whole,) = run_ranks(
        run_once, 1, settings(folder, tmp_path / "whole", lr_scheduler="constant", num_epochs=3)
    )
    expected = tmp_path / "whole/adapter/adapter_model.safetensors"
    for number, (kind, (steps, said)) in enumerate(
        zip(DAMAGE_AT_THE_END, *run_ranks(longer_runs, 1, folder, str(tmp_path)), strict=True)
    ):
        out, is_damaged = tmp_path / str(number) / "out", kind in list(DAMAGE_AT_THE_END)[:3]
        assert steps == (len(whole) - 3 if is_damaged else len(whole) - 6), (kind, said)
        assert ("step-000006 is not used" in said) == is_damaged, said
        assert f"resumed from {out}/checkpoints/step-00000{3 if is_damaged else 6}" in said
        assert (out / "adapter" / expected.name).read_bytes() == expected.read_bytes(), kind
        assert names_in(out / "earlier-1") == {"adapter", "metrics.jsonl", "loss.png"}, kind
    assert (tmp_path / "3/out/checkpoints/step-000099").read_text() == "mine"
    assert (tmp_path / "5/disk/run.json").exists() and (tmp_path / "6/out/checkpoints").is_symlink()


def run_twice(folder: str, out: str) -> tuple[int, str]:
    """Steps that a finished run takes that is made longer under a cosine, and what it said."""
    config = settings(folder, Path(out, "longer"))
    run_once(config)
    with redirect_stdout(io.StringIO()) as said:
        steps = run_once(replace(config, num_epochs=3))
    run_once(replace(config, num_epochs=3, output_dir=str(Path(out, "whole"))))
    return len(steps), said.getvalue()


def test_a_finished_run_is_made_longer_under_a_decaying_rate_and_says_that_this_rises(
    folder, tmp_path
):
    ((steps, said),) = run_ranks(run_twice, 1, folder, str(tmp_path))
    before, longer, whole = (
        [step["lr"] for step in metrics(tmp_path / name)]
        for name in ("longer/earlier-1", "longer", "whole")
    )
    assert steps == 3 and longer[:6] == before and longer[6:] == whole[6:]
    assert longer[6] > before[5]
    assert "the finished run goes on: --num_epochs was 2 and is 3" in said
    assert "its learning rate rises again. --resume none starts over" in said


def resumed_by_path(folder: str, out: str, paths: list[str]) -> list[int]:
    """Steps that a run takes that goes on from each path, in folders of their own."""
    return [
        len(run_once(settings(folder, Path(out, f"by-{n}"), lr_scheduler="constant", resume=path)))
        for n, path in enumerate(paths)
    ]


def test_resume_takes_a_checkpoint_by_a_link_and_by_another_name(folder, tmp_path):
    out = tmp_path / "out"
    run_ranks(run_once, 1, settings(folder, out, lr_scheduler="constant", num_epochs=1))
    (tmp_path / "latest").symlink_to(out / "checkpoints" / "step-000003")
    shutil.copytree(tmp_path / "latest", tmp_path / "copied")
    (tmp_path / "run").symlink_to(out)
    paths = [str(tmp_path / name) for name in ("latest", "copied", "run")]
    assert run_ranks(resumed_by_path, 1, folder, str(tmp_path), paths) == [[3, 3, 3]]
    assert fault_of(out / "checkpoints" / "step-000003") is None


def synced_before_the_end(folder: str, out: str) -> list[str]:
    """The files that a run waited for to be on the disk, in order."""
    import os

    fsync, waited = os.fsync, []
    os.fsync = lambda descriptor: (
        waited.append(os.readlink(f"/proc/self/fd/{descriptor}")),
        fsync(descriptor),
    )
    try:
        run_once(settings(folder, out))
    finally:
        os.fsync = fsync
    return waited


def test_the_last_adapter_is_on_the_disk_before_the_run_is_said_to_have_ended(folder, tmp_path):
    (waited,) = run_ranks(synced_before_the_end, 1, folder, str(tmp_path))
    weights = f"{tmp_path}/.adapter.fsdp_qlora-new/adapter_model.safetensors"
    last = len(waited) - 1 - waited[::-1].index(weights)
    named = waited.index(str(tmp_path), last)
    assert last < named < waited.index(f"{tmp_path}/checkpoints/finished.json")


def test_nothing_of_an_earlier_run_is_lost_when_one_begins_anew_in_its_folder(folder, tmp_path):
    """Finished, finished with another rate, stopped, begun anew; then gone on after its end."""
    out = tmp_path / "out"
    seen, first, last = run_ranks(runs_in_one_folder, 1, folder, str(out))[0]
    assert seen == [STEPS, STEPS, STOP_AT, STEPS, STEPS]
    assert names_in(out) == {
        "adapter",
        "adapter-best",
        "checkpoints",
        "metrics.jsonl",
        "loss.png",
        *(f"earlier-{n}" for n in (1, 2, 3, 4)),
    }
    kept = {n: names_in(out / f"earlier-{n}") for n in (1, 2, 3, 4)}
    whole = {"adapter", "adapter-best", "checkpoints", "metrics.jsonl", "loss.png"}
    assert kept == {
        1: whole,
        2: whole,
        3: {"adapter-best", "checkpoints", "metrics.jsonl"},
        4: {"adapter", "metrics.jsonl", "loss.png"},
    }
    assert left_in(out / "earlier-1") == first and left_in(out / "earlier-4") == {
        k: v for k, v in last.items() if not k.startswith(("checkpoints", "adapter-best"))
    }
    assert [m["step"] for m in metrics(out)] == list(range(1, 2 * STEPS + 1))


def names_in(folder: Path) -> set[str]:
    """What is in a folder."""
    return {path.name for path in folder.iterdir()}


def left_in(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but those of earlier runs."""
    files = {str(Path(p).relative_to(folder)): data for p, data in listed(str(folder)).items()}
    return {p: data for p, data in files.items() if not p.startswith("earlier-")}


def runs_in_one_folder(folder: str, out: str) -> tuple[list[int], dict, dict]:
    """Steps of each run in one folder, and all that the first and the last but one left."""
    config = settings(folder, out, eval_every=2, eval_dataset="given")
    seen = [len(run_once(config, held_out=3))]
    first = left_in(Path(out))
    seen += [
        len(run_once(replace(config, lr=0.02), held_out=3)),
        len(run_once(config, STOP_AT, held_out=3)),
        len(run_once(replace(config, resume="none"), held_out=3)),
    ]
    last, longer = (
        left_in(Path(out)),
        replace(config, resume=str(Path(out).resolve()), num_epochs=4),
    )
    return seen + [len(run_once(longer, held_out=3))], first, last


def test_weights_that_a_run_trains_further_are_not_moved_from_under_it(folder, tmp_path):
    out = tmp_path / "out"
    base = save_chat_model(out / "model", num_hidden_layers=1)
    with pytest.raises(AssertionError, match="contains --model_name .*give another --output_dir"):
        run_ranks(run_once, 1, settings(base, out))
    assert names_in(out) == {"model"}


# ---- what is in a checkpoint ---------------------------------------------------------------------


def test_a_checkpoint_is_safetensors_and_json_no_larger_than_adapter_and_optimizer(
    folder, tmp_path
):
    run_ranks(run_once, 2, settings(folder, tmp_path, lora_rank=64))
    (newest, *_) = all_checkpoints(tmp_path / "checkpoints")
    assert fault_of(newest) is None
    files = [p for p in newest.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".safetensors", ".json"}
    adapter = sum(
        t.nbytes for t in load_file(tmp_path / "adapter/adapter_model.safetensors").values()
    )
    assert (
        3 * adapter < sum(p.stat().st_size for p in files) < 1.1 * 3 * adapter
    )  # AdamW keeps two more
    with safe_open(newest / "adapter/adapter_model.safetensors", "pt") as file:
        assert all("lora_" in name for name in file.keys())  # noqa: SIM118


def test_the_adapter_in_a_checkpoint_loads_in_peft_and_is_the_one_that_is_saved(folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run_ranks(run_once, 2, settings(folder, tmp_path))
    (newest, *_) = all_checkpoints(tmp_path / "checkpoints")
    assert newest.name == "step-000006"
    logits = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), path)(
            torch.arange(9)[None]
        ).logits
        for path in (newest / "adapter", tmp_path / "adapter")
    ]
    assert torch.equal(*logits)


# ---- writes that fail ----------------------------------------------------------------------------


def run_with_full_disk(config, failing: list[int]) -> tuple[int, str]:
    """Train while rank 0's disk is full in these writes; steps taken, and the error or the warnings."""
    import torch.distributed as dist

    from fsdp_qlora.checkpoint import writer
    from fsdp_qlora.dist import print_main
    from fsdp_qlora.training.trainer import RunLog

    write_part, calls, taken, said = writer._write_part, [], [], []

    def full(scratch, rank, shot):
        calls.append(1)
        if rank == 0 and len(calls) in failing:
            scratch.mkdir(parents=True, exist_ok=True)
            (scratch / "half").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write_part(scratch, rank, shot)

    log = RunLog.log

    def slowly(self, metrics):
        taken.append(metrics.step)
        log(self, metrics)
        dist.barrier()

    writer._write_part, RunLog.log, writer.print_main = full, slowly, said.append
    try:
        run_once(config)
        return len(taken), "; ".join(said)
    except OSError as error:
        return len(taken), str(error)
    finally:
        writer._write_part, RunLog.log, writer.print_main = write_part, log, print_main


def test_a_full_disk_stops_all_ranks_if_nothing_was_saved_and_else_only_warns(folder, tmp_path):
    config = settings(folder, tmp_path / "first", checkpoint_every=1, num_epochs=20)
    for steps, error in run_ranks(run_with_full_disk, 2, config, list(range(1, 100)), timeout=60):
        assert steps < 60 and "No space left" in error and "rank 0" in error, (steps, error)
    assert not list((tmp_path / "first" / "checkpoints").iterdir())
    config = settings(folder, tmp_path / "later", checkpoint_every=1)
    (taken, warned), other = run_ranks(run_with_full_disk, 2, config, [3, 4], timeout=60)
    assert (taken, "") == other and taken == STEPS
    assert "warning: no checkpoint of step 3" in warned and "the last good one is " in warned
    names = [f.name for f in all_checkpoints(tmp_path / "later" / "checkpoints")]
    assert names == ["step-000006", "step-000005"]


def best_saves_that_fail(folder: str, out: str, cases: list[list[int]]) -> list[str]:
    """For each case, what a run warns of whose disk is full at these saves of the best weights."""
    from safetensors import SafetensorError

    import fsdp_qlora.export.save as export
    from fsdp_qlora.training import loop

    write_tensors, print_main, said = export.write_tensors, loop.print_main, []
    for number, failing in enumerate(cases):
        calls, lines = [], []

        def full(*args, calls=calls, failing=failing):
            calls.append(1)
            if len(calls) in failing:
                raise SafetensorError("No space left on device (os error 28)")
            return write_tensors(*args)

        export.write_tensors, loop.print_main = full, lines.append
        try:
            run_once(
                settings(
                    folder,
                    Path(out, str(number)),
                    eval_every=2,
                    eval_dataset="given",
                    checkpoint_every=2,
                    keep_checkpoints=9,
                ),
                held_out=3,
            )
        finally:
            export.write_tensors, loop.print_main = write_tensors, print_main
        said.append("; ".join(line for line in lines if line.startswith("warning")))
    return said


@pytest.mark.slow
def test_a_full_disk_at_the_best_weights_leaves_those_before_and_the_run_goes_on(folder, tmp_path):
    said, _ = run_ranks(best_saves_that_fail, 2, folder, str(tmp_path), [[2], [3]])
    for number, (warned, failed, kept) in enumerate(zip(said, (4, 6), (6, 4), strict=True)):
        out = tmp_path / str(number)
        assert [e["is_best"] for e in metrics(out, "eval")] == [True] * 3
        assert f"-best after step {failed} " in warned and "No space left" in warned
        best, expected = (
            load_file(path / "adapter_model.safetensors")
            for path in (out / "adapter-best", out / f"checkpoints/step-{kept:06}/adapter")
        )
        assert all(torch.equal(best[name], expected[name]) for name in expected)


# ---- stops -------------------------------------------------------------------------------------


def stopped_runs(folder: str, out: str, cases: list[tuple]) -> list[tuple[str, list[int]]]:
    """For each (name, settings, step after which rank 1 is told to stop, writes that fail on rank 0):
    what the run says at its end, and the checkpoints then there with the time of their making."""
    import torch.distributed as dist

    from fsdp_qlora.checkpoint import writer
    from fsdp_qlora.lifecycle.signals import StopRequested, StopSignals
    from fsdp_qlora.training.loop import Training

    write_part, after_step = writer._write_part, Training.after_step
    found, is_told = [], dist.get_rank() == 1
    for name, changed, stop_at, failing in cases:
        signals, calls = StopSignals(), []

        def full(scratch, number, shot, calls=calls, failing=failing):
            calls.append(1)
            if number == 0 and len(calls) in failing:
                raise OSError(28, "No space left on device")
            return write_part(scratch, number, shot)

        def told(self, signals=signals, stop_at=stop_at):
            after_step(self)
            if is_told and self.boundary.step == stop_at:
                signals.asked_by = "SIGTERM"

        if stop_at == 0 and is_told:
            signals.asked_by = "SIGTERM"
        writer._write_part, Training.after_step = full, told
        try:
            run_once(settings(folder, Path(out, name), **changed), signals=signals)
        except StopRequested as stopped:
            there = all_checkpoints(Path(out, name, "checkpoints"))
            found.append((str(stopped), {f.name: f.stat().st_mtime_ns for f in there}))
        finally:
            writer._write_part, Training.after_step = write_part, after_step
    return found


def test_a_run_that_is_stopped_says_what_is_saved_and_writes_no_good_checkpoint_again(
    folder, tmp_path
):
    never, every = dict(checkpoint_every=100), dict(checkpoint_every=2)
    cases = [
        ("lost", never, 3, [1]),
        ("older", every, 3, [2]),
        ("again", every, 2, [1]),
        ("kept", every, 4, []),
        ("kept", every, 0, []),
        ("begun", never, 0, []),
    ]
    said, _ = run_ranks(stopped_runs, 2, folder, str(tmp_path), cases)
    lost, older, again, kept, at_once, begun = said
    assert "after step 3; this was not saved (OSError: rank 0: " in lost[0] and not lost[1]
    assert "No space left" in lost[0] and "the same command starts over" in lost[0]
    assert "after step 3; this was not saved (OSError: rank 0: " in older[0]
    assert f"resumes from {tmp_path}/older/checkpoints/step-000002" in older[0]
    assert "after step 2; saved in" in again[0] and list(again[1]) == ["step-000002"]
    assert "after step 4; saved in" in kept[0] and kept == at_once
    assert "after step 0; there was nothing to save" in begun[0] and not begun[1]
