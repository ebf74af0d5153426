"""Ranks that no launcher started, whose RANK and MASTER_ADDR a script, srun or mpirun has set: they meet in
rank 0's store, nothing ends the others when one ends, and what one finds wrong all of them say."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest

from fsdp_qlora.dist import common_store, free_port
from tests.distributed.test_bad_inputs_on_every_rank import arguments, call, save_model, save_rows
from tests.patience import patience
from tests.ranks import run_ranks

VARIABLES = dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500")


def call_of_own(argvs: dict[str, list[str]]) -> tuple[int, str, str, float]:
    """`call` of the command line that is this rank's own, or of the one for all others."""
    return call([argvs.get(os.environ["RANK"], argvs["others"])])[0]


@pytest.mark.parametrize("speaker, text", [(0, "is a file"), (2, "--lr: 'fast'")])
def test_what_one_rank_finds_wrong_all_of_them_say_at_once(tmp_path, speaker, text):
    """Rank 0 alone looks at folders, and another may have other flags."""
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out" if speaker == 0 else tmp_path / "out"
    argv = arguments(save_model(tmp_path / "model"), save_rows(tmp_path / "rows.jsonl"), out)
    argvs = {"others": argv, "2": [*argv, "--lr", "fast"] if speaker == 2 else argv}
    for rank, (code, _, err, seconds) in enumerate(run_ranks(call_of_own, 3, argvs, grouped=False)):
        told = "" if rank == speaker else f"rank {speaker}: "
        assert code == 2 and err.count("error") == 1 and seconds < patience(30), (err, seconds)
        assert err.startswith(f"error (rank {rank}): {told}--") and text in err


def come_when_rank_0_is_gone(argv: list[str]) -> list:
    """Rank 0 ends while the other still prepares, as one does that nobody listened to."""
    store = common_store()
    if os.environ["RANK"] == "0":
        store.get("connected")
        return []
    store.set("connected", "")
    while True:
        try:
            store.check(["connected"])
        except RuntimeError:
            return call([argv])


def test_a_rank_that_comes_when_rank_0_is_gone_ends_at_once(tmp_path):
    model = save_model(tmp_path / "model")
    argv = arguments(model, save_rows(tmp_path / "rows.jsonl"), tmp_path / "out")
    _, [(code, _, err, seconds)] = run_ranks(come_when_rank_0_is_gone, 2, argv, grouped=False)
    assert code == 1 and err.count("\n") == 1 and seconds < patience(30), (code, err)
    assert err.startswith("error (rank 1): lost the connection to another rank")


@pytest.mark.parametrize(
    "given, named",
    [
        (dict(MASTER_ADDR=""), "MASTER_ADDR= MASTER_PORT=29500"),
        (dict(MASTER_PORT="70000"), "MASTER_PORT=70000"),
        (dict(RANK="2"), "RANK=2 WORLD_SIZE=2"),
        (dict(WORLD_SIZE="two"), "WORLD_SIZE=two"),
        (dict(LOCAL_RANK="1", LOCAL_WORLD_SIZE="1"), "LOCAL_RANK=1 LOCAL_WORLD_SIZE=1"),
        (dict(RANK="", SLURM_STEP_NUM_TASKS="8"), "SLURM_STEP_NUM_TASKS=8: srun started 8 copies"),
        (dict(RANK="", OMPI_COMM_WORLD_SIZE="2"), "OMPI_COMM_WORLD_SIZE=2: mpirun started 2"),
    ],
)
def test_an_environment_that_makes_no_ranks_is_refused_by_its_variables(
    tmp_path, monkeypatch, given, named
):
    for name, value in (VARIABLES | given).items():
        monkeypatch.setenv(name, value)
    [(code, _, err, _)] = call([arguments("none", "none", tmp_path / "out")])
    assert code == 2 and err.count("\n") == 1 and named in err and "torchrun" in err, err


def test_a_shell_of_an_allocation_and_one_rank_without_an_address_train(tmp_path, monkeypatch):
    """In `srun --pty bash` the variables are those of the tasks, and a terminal says that it is a shell."""
    argv = arguments(
        save_model(tmp_path / "model"), save_rows(tmp_path / "rows.jsonl"), tmp_path / "out"
    )
    argv += ["--max_steps", "1"]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert call([argv])[0][0] == 0
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert call([argv])[0][0] == 0


def test_an_address_where_nobody_answers_or_another_listens_is_named(monkeypatch, capsys):
    for name, value in (VARIABLES | dict(MASTER_PORT=str(free_port()))).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("fsdp_qlora.dist.store_connection._UNTIL_SAID", 0.1)
    port = os.environ["MASTER_PORT"]
    with pytest.raises(ValueError, match=f"MASTER_PORT={port}: nothing answers.*start rank 0"):
        common_store(timedelta(seconds=1))
    assert f"waiting for rank 0 at localhost:{port}" in capsys.readouterr().err
    with socket.socket() as other:
        other.bind(("", int(port)))
        other.listen()
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ValueError, match=f"MASTER_PORT={port}: rank 0 can't listen there"):
            common_store()
