"""What a run writes: logs, weights and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from .. import without_effect as rules
from ..settings import AUTO, MAY_CHANGE, opt


@dataclass(kw_only=True)
class OutputOptions:
    """Output"""

    output_dir: str = opt(
        "output",
        "folder for metrics, the loss plot, checkpoints and trained weights",
        on_resume=MAY_CHANGE,
        is_path=True,
        per_rank=True,
    )
    save_model: bool = opt(
        True,
        "save the trained weights at the end: a PEFT adapter, or the model after full fine-tuning",
        on_resume=MAY_CHANGE,
    )
    log_to: str = opt(
        "tqdm",
        "one kind of terminal output (tqdm = a progress bar, or lines if there is no "
        "terminal; stdout = lines; jsonl = all records as JSON) and any trackers; "
        "metrics.jsonl is always written",
        several=True,
        choices=("tqdm", "stdout", "jsonl", "tensorboard", "wandb", "mlflow"),
        example="tqdm,wandb",
        on_resume=MAY_CHANGE,
        per_rank=True,
    )
    log_every: int = opt(
        10,
        "steps averaged into one terminal line and one tracker point; metrics.jsonl has every step",
        unit="steps",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs("outputs in --log_to that show averages", rules.shows_averages),
    )
    price_per_hour: float | None = opt(
        None,
        "dollars per GPU hour, to show the cost so far; None = from the catalog",
        unit="dollars",
        example=2.5,
        least=0,
        on_resume=MAY_CHANGE,
        per_rank=True,
    )
    verbose: bool = opt(
        False,
        "print the sharded model and every derived setting; after an error, the traceback",
        on_resume=MAY_CHANGE,
        per_rank=True,
    )
    project_name: str = opt(
        "fsdp_qlora",
        "project in wandb, experiment in mlflow",
        on_resume=MAY_CHANGE,
        per_rank=True,
        no_effect=rules.NAMED_TRACKERS,
    )
    name: str | None = opt(
        None,
        "run name in wandb or mlflow",
        on_resume=MAY_CHANGE,
        per_rank=True,
        no_effect=rules.NAMED_TRACKERS,
    )
    group: str | None = opt(
        None, "run group in wandb", on_resume=MAY_CHANGE, per_rank=True, no_effect=rules.WANDB
    )
    entity: str | None = opt(
        None, "team in wandb", on_resume=MAY_CHANGE, per_rank=True, no_effect=rules.WANDB
    )


@dataclass(kw_only=True)
class CheckpointOptions:
    """Checkpoints and faults"""

    checkpoint_every: int = opt(
        AUTO,
        "optimizer steps between checkpoints; -1 = only --checkpoint_minutes counts",
        unit="steps",
        example=100,
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
    )
    checkpoint_minutes: float = opt(
        15.0,
        "minutes between checkpoints; 0 = never",
        unit="minutes",
        on_resume=MAY_CHANGE,
        least=0,
    )
    keep_checkpoints: int = opt(
        2,
        "newest checkpoints to keep, in addition to the best",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs(
            "--checkpoint_every or --checkpoint_minutes",
            lambda c: c.checkpoint_every != AUTO or c.checkpoint_minutes,
        ),
    )
    resume: str = opt(
        "auto",
        "auto = resume from the newest intact checkpoint in --output_dir, none = start "
        "over, or a folder: a checkpoint or a run",
        example="other_output",
        on_resume=MAY_CHANGE,
        is_path=True,
    )
    stop_grace_seconds: float = opt(
        25.0,
        "time to save after a stop signal before the run exits anyway; set it a few seconds "
        "below your scheduler's kill timeout",
        unit="seconds",
        example=280,
        on_resume=MAY_CHANGE,
    )
    stall_seconds: float = opt(
        600.0,
        "stop a run that makes no progress for this long, and name the rank that holds it "
        "up; 0 = never",
        unit="seconds",
        on_resume=MAY_CHANGE,
        least=0,
    )
    verify_frozen_minutes: float = opt(
        10.0,
        "minutes between checks of the frozen weights for bit flips; 0 = never",
        unit="minutes",
        on_resume=MAY_CHANGE,
        least=0,
        no_effect=rules.needs(
            "frozen weights, and --train_type full has none",
            lambda c: c.adapter != "none" or c.only_modules,
        ),
    )
    max_bad_steps: int = opt(
        3,
        "consecutive steps with a NaN or infinite loss or gradient before --on_bad_steps "
        "applies; every rank skips such steps",
        unit="steps",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.needs(
            "--on_bad_steps stop or rollback", lambda c: c.on_bad_steps != "skip"
        ),
    )
    on_bad_steps: str = opt(
        "stop",
        "after --max_bad_steps: stop, keep skipping, or roll back to the last checkpoint "
        "and leave their rows out",
        choices=("stop", "skip", "rollback"),
        on_resume=MAY_CHANGE,
    )
