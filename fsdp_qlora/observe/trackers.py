"""TensorBoard, Weights & Biases and MLflow as sinks of a run; each needs its package when it is named.

A run that resumes from a checkpoint continues the same run of its tracker, which knows it by the
`run_id` that checkpoints keep. Steps that it takes again are shown once: TensorBoard forgets the first
try, and what W&B and MLflow have can't be taken back, so they are not told again. Trackers get the
settings without secrets, and neither the command line nor the terminal's text, where some may be.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from ..config import RunConfig
from ..config.settings import changed_settings
from ..dist import from_main
from ..redact import redact, redact_all
from .metrics import Record
from .runlog import how_it_ended, in_one_line
from .sinks import Sink

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # as MLflow has them


class TensorBoard(Sink):
    """Event files in `tensorboard` of --output_dir."""

    def __init__(self, config: RunConfig, run_id: str, step: int):
        self.folder, self.run_id = Path(config.output_dir) / "tensorboard", run_id
        self.open(step)
        self.writer.add_text("settings", _markdown_table(settings_of(config)), step)

    def open(self, step: int):
        """Write to a new file; what older ones have after `step` is no longer shown."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=step + 1)

    def write(self, record: Record):
        for name, value in record.values().items():
            self.writer.add_scalar(name, value, record.step)
        self.writer.flush()

    def rewind(self, step: int):
        self.writer.close()
        self.open(step)

    def close(self, status: str):
        self.writer.close()


class _Sent:
    """What a tracker was told of each figure, up to which step; kept in a file if it can't be asked."""

    def __init__(self, last: dict[str, int], before: int = -1, path: Path | None = None):
        self.last, self.before, self.path = last, before, path

    @classmethod
    def read(cls, path: Path, before: int = -1) -> _Sent:
        """As a start before this one left it. before: all figures were told up to that step."""
        try:
            last = {name: int(step) for name, step in json.loads(path.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            last = {}
        return cls(last, before, path)

    def new(self, record: Record) -> dict[str, float]:
        """The figures of a record that the tracker does not have for its step or a later one."""
        found = {
            name: value
            for name, value in record.values().items()
            if record.step > max(self.before, self.last.get(name, -1))
        }
        self.last |= dict.fromkeys(found, record.step)
        if self.path and found:
            self.path.write_text(json.dumps(self.last))
        return found


def _project(config: RunConfig, variable: str) -> str:
    """--project_name; if that is left out, what the tracker's own variable says."""
    is_given = "project_name" in changed_settings(config) or "project_name" in config.typed
    named = None if is_given else os.environ.get(variable)
    return redact(named or config.project_name)


class Wandb(Sink):
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in `wandb` of --output_dir for later."""

    def __init__(self, config: RunConfig, run_id: str, step: int):
        import wandb

        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        said = settings_of(config)
        self.run = wandb.init(
            project=_project(config, "WANDB_PROJECT"),
            **{name: said[name] for name in ("name", "group", "entity")},
            id=run_id,
            resume="allow",
            dir=config.output_dir,
            config=said,
            settings=wandb.Settings(
                console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True
            ),
        )
        self.run.define_metric("*", step_metric="step")  # its own count could not go back
        known = self.run.summary.get("step") if self.run.resumed else None  # of the server
        self.sent = _Sent.read(
            Path(config.output_dir) / "wandb" / f"{run_id}.json",
            known if isinstance(known, int) else -1,
        )

    def write(self, record: Record):
        if values := self.sent.new(record):
            self.run.log(values | {"step": record.step})

    def close(self, status: str):
        self.run.finish(exit_code=int(status == "failed"))


class MLflow(Sink):
    """A run of MLflow, where MLFLOW_TRACKING_URI says."""

    def __init__(self, config: RunConfig, run_id: str, step: int):
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.client, self.metric, said = MlflowClient(), Metric, settings_of(config)
        project = _project(config, "MLFLOW_EXPERIMENT_NAME")
        found = self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project)
        runs = self.client.search_runs([experiment], f"tags.`fsdp_qlora.run_id` = '{run_id}'")
        if runs:
            self.id = runs[0].info.run_id
            self.client.update_run(self.id, "RUNNING")
            self.sent = _Sent(
                {
                    name: max(m.step for m in self.client.get_metric_history(self.id, name))
                    for name in runs[0].data.metrics
                }
            )
            return
        made = self.client.create_run(
            experiment, run_name=said["name"], tags={"fsdp_qlora.run_id": run_id}
        )
        self.id, self.sent = made.info.run_id, _Sent({})
        params = [Param(name, str(value)[:500]) for name, value in said.items()]
        for start in range(0, len(params), 100):  # of one call
            self.client.log_batch(self.id, params=params[start : start + 100])

    def write(self, record: Record):
        now = int(time.time() * 1000)
        metrics = [
            self.metric(name, value, now, record.step)
            for name, value in self.sent.new(record).items()
        ]
        if metrics:
            self.client.log_batch(self.id, metrics)

    def close(self, status: str):
        self.client.set_terminated(self.id, STATUS[status])


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}


def settings_of(config: RunConfig) -> dict:
    """All settings, without secrets."""
    return redact_all(asdict(config))


def _markdown_table(settings: dict) -> str:
    """Settings as a Markdown table."""
    return "\n".join(["|setting|value|", "|---|---|", *(f"|{k}|{v}|" for k, v in settings.items())])


def check_trackers(config: RunConfig):
    """Raises ValueError, with the command that installs it, for a tracker whose package is not here."""
    for name in config.trackers:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--log_to {name} needs the package {name}; run: pip install {name}")


@contextmanager
def open_trackers(config: RunConfig, run_id: str, step: int) -> Iterator[list[Sink]]:
    """The trackers of --log_to on rank 0, closed at the end of the block with how that ended.

    step: optimizer steps done. Raises ValueError on every rank if one does not start.
    """
    opened: list[Sink] = []
    try:
        from_main(
            lambda: opened.extend(started(name, config, run_id, step) for name in config.trackers)
        )
        yield opened
    except BaseException as error:
        close(opened, how_it_ended(error))
        raise
    close(opened, "finished")


def started(name: str, config: RunConfig, run_id: str, step: int) -> Sink:
    """A tracker's run, new or gone on with."""
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        return TRACKERS[name](config, run_id, step)
    except Exception as error:
        raise ValueError(
            f"--log_to {name}: {in_one_line(error)}; fix this, or leave {name} out"
        ) from error


def close(opened: list[Sink], status: str):
    """Close trackers; one that fails in it is named."""
    for sink in opened:
        try:
            sink.close(status)
        except Exception as error:
            print(
                f"warning: {type(sink).__name__} was not closed: {in_one_line(error)}", flush=True
            )
