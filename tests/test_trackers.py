"""TensorBoard, wandb and mlflow get what a run measured, go on in one run, and see no secret."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fsdp_qlora.cli import main, parse
from fsdp_qlora.config import RunConfig
from fsdp_qlora.observe.metrics import EvalMetrics
from fsdp_qlora.observe.trackers import MLflow, Wandb, check_trackers

from .tokenizers import save_chat_model

TOKEN = "hf_canaryCanaryCanary123"


@pytest.mark.parametrize(
    "flags, project",
    [
        ([], "of the environment"),
        (["--project_name", "mine"], "mine"),
        (["--project_name", "fsdp_qlora"], "fsdp_qlora"),
    ],
)
def test_a_trackers_own_variable_names_the_project_unless_a_flag_does(
    monkeypatch, tmp_path, flags, project
):
    import mlflow.tracking
    import wandb

    class Asked(Exception):
        """What a tracker was asked for, instead of an answer."""

    def asked(project):
        raise Asked(project)

    monkeypatch.setattr(wandb, "init", lambda project, **more: asked(project))
    client = mlflow.tracking.MlflowClient
    monkeypatch.setattr(client, "get_experiment_by_name", lambda self, project: asked(project))
    for variable in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(variable, "of the environment")
    (config,) = parse([*flags, "--output_dir", str(tmp_path)])
    for tracker in (Wandb, MLflow):
        with pytest.raises(Asked, match=f"^{project}$"):
            tracker(config, "id", 0)
    monkeypatch.delenv("WANDB_PROJECT")
    with pytest.raises(Asked, match=f"^{config.project_name}$"):
        Wandb(config, "id", 0)


# ---- what they kept ------------------------------------------------------------------------------


def of_tensorboard(out: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) by name, read by TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def records_of(data: bytes) -> list[bytes]:
    """The records in a .wandb file: LevelDB's log format, after a header of 7 bytes."""
    found, at, part = [], 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(part)
            part = b""
    return found


def of_wandb(out: Path) -> tuple[set[str], dict[str, list[tuple[int, float]]]]:
    """Ids of the runs, and (step, value) by name, from what `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2 as records

    ids, found = set(), {}
    for path in sorted(out.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records_of(path.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if not record.HasField("history"):
                continue
            values = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in values.items():
                found.setdefault(name, []).append((values["step"], value))
    return ids, found


def of_mlflow() -> tuple[list, dict[str, list[tuple[int, float]]]]:
    """The runs, and (step, value) by name of the first."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("seen").experiment_id])
    names = runs[0].data.metrics
    return runs, {
        name: [(m.step, m.value) for m in client.get_metric_history(runs[0].info.run_id, name)]
        for name in names
    }


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path_factory):
    """A tiny model and rows."""
    folder = tmp_path_factory.mktemp("base")
    save_chat_model(folder / "model")
    rows = [dict(prompt=f"{i}?", completion="yes " * (1 + i % 3)) for i in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Trackers that reach nobody, and a token in the environment."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_API_KEY", "canary" * 7)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("RANK", raising=False)


def train(base: Path, out: Path, *flags: str) -> int:
    return main(
        [
            "train",
            "--model_name",
            str(base / "model"),
            "--dataset",
            str(base / "rows.jsonl"),
            "--device",
            "cpu",
            "--world_size",
            "1",
            "--precision",
            "fp32",
            "--lora_rank",
            "2",
            "--compile",
            "false",
            "--global_batch_size",
            "2",
            "--output_dir",
            str(out),
            "--eval_share",
            "0.2",
            "--eval_every",
            "4",
            "--project_name",
            "seen",
            "--log_every",
            "2",
            "--log_to",
            "stdout,tensorboard,wandb,mlflow",
            *flags,
        ]
    )


def recorded(out: Path, kind: str, name: str) -> list[tuple[int, float]]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r[name]) for r in lines if r["kind"] == kind]


def test_all_three_get_the_means_that_the_lines_show_and_each_evaluation(base, tmp_path, capsys):
    out = tmp_path / "out"
    assert train(base, out, "--max_steps", "5", "--name", f"run-{TOKEN}") == 0
    losses = dict(recorded(out, "step", "loss"))
    found = of_tensorboard(out), of_wandb(out)[1], of_mlflow()[1]
    for scalars in found:
        steps = dict(scalars["train/loss"])
        assert list(steps) == [1, 2, 4, 5]
        for number in (1, 2, 5):
            assert steps[number] == pytest.approx(losses[number], rel=1e-6)
        assert min(losses[3], losses[4]) <= steps[4] <= max(losses[3], losses[4])
        assert dict(scalars["eval/loss"]) == pytest.approx(dict(recorded(out, "eval", "eval_loss")))
        assert {"train/lr", "train/grad_norm", "train/tokens_per_second"} <= scalars.keys()
    runs, _ = of_mlflow()
    assert runs[0].info.status == "FINISHED" and runs[0].data.params["lora_rank"] == "2"
    text = capsys.readouterr().out
    assert re.search(r"^step 4/5  loss .* left$", text, re.M)
    written = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert not [p for p, data in written.items() if b"canary" in data.lower()]


def test_a_resumed_run_goes_on_in_the_same_run_of_each_tracker(base, tmp_path, monkeypatch):
    out = tmp_path / "out"
    from fsdp_qlora.training.loop import Training

    take = Training.step

    def stop_after_six(self, step):
        take(self, step)
        if step.index == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Training, "step", stop_after_six)
    assert train(base, out, "--max_steps", "8", "--checkpoint_every", "4") == 130
    assert of_mlflow()[0][0].info.status == "KILLED"
    monkeypatch.setattr(Training, "step", take)
    assert train(base, out, "--max_steps", "8", "--checkpoint_every", "4") == 0
    losses = dict(recorded(out, "step", "loss"))
    assert list(losses) == list(range(1, 9))
    ids, of_both = of_wandb(out)
    runs, of_one = of_mlflow()
    starts = recorded(out, "start", "run_id")
    assert len(runs) == 1 and ids == {run_id for _, run_id in starts} and len(ids) == 1
    assert [step for step, _ in starts] == [0, 4] and runs[0].info.status == "FINISHED"
    shown = of_tensorboard(out)["train/loss"]
    assert [step for step, _ in shown] == [1, 2, 4, 5, 6, 8]  # 6 once: the first try is purged
    for scalars in (dict(shown), dict(of_both["train/loss"]), dict(of_one["train/loss"])):
        assert scalars[8] == pytest.approx((losses[7] + losses[8]) / 2, rel=0.2)
    for scalars in (of_both, of_one):  # 6 once too: the first try stays
        for name, points in scalars.items():
            steps = [step for step, _ in points]
            if name.startswith(("train/", "eval/")):
                assert len(set(steps)) == len(steps), name
        assert [step for step, _ in scalars["train/loss"]] == [1, 2, 4, 6, 8]
        assert [step for step, _ in scalars["eval/loss"]] == [4, 8]


def test_steps_that_a_run_goes_back_over_reach_a_tracker_once(tmp_path, monkeypatch):
    """A rollback, a second start with the file, with a server that knows, and with a damaged file."""
    told = []

    class Run:
        resumed, summary = False, {}
        log = staticmethod(told.append)
        define_metric = finish = staticmethod(lambda *args, **more: None)

    monkeypatch.setattr("wandb.init", lambda **more: Run)
    (tmp_path / "wandb").mkdir()

    def send(*steps: int):
        sink = Wandb(RunConfig(output_dir=str(tmp_path)), "id", 0)
        for step in steps:
            sink.write(EvalMetrics(step, float(step), 1.0, 1, False, 1.0))
            if step == 6:
                sink.rewind(4)

    send(2, 4, 6, 5, 6, 7)
    assert [values["step"] for values in told] == [2, 4, 6, 7]
    send(5, 6, 7, 8)
    assert [values["step"] for values in told] == [2, 4, 6, 7, 8]
    (tmp_path / "wandb" / "id.json").write_text("{")
    Run.resumed, Run.summary = True, {"step": 8}
    send(7, 8, 9)
    assert [values["step"] for values in told] == [2, 4, 6, 7, 8, 9]


# ---- mistakes ------------------------------------------------------------------------------------


def test_a_missing_package_is_one_line_with_the_command_before_anything_is_read(
    monkeypatch, capsys
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (
        main(
            [
                "train",
                "--log_to",
                "wandb",
                "--model_name",
                "./absent",
                "--device",
                "cpu",
                "--world_size",
                "1",
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == "error: --log_to wandb needs the package wandb; run: pip install wandb"
    check_trackers(RunConfig(log_to="stdout"))


def test_a_tracker_that_does_not_start_ends_the_run_before_the_model_is_loaded(
    base, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"nonsense://me:{TOKEN}@host")
    monkeypatch.setattr("fsdp_qlora.training.trainer.build_model", None)
    assert train(base, tmp_path / "out", "--log_to", "tensorboard,mlflow") == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line and line.startswith("error: --log_to mlflow: ") and TOKEN not in line
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
