"""Whether a checkpoint belongs to the run that is being started, and if not, what differs.

Settings that change the result must be equal. How the work is laid out (ranks, sharding, what is
recomputed) and what is shown may change; so may paths, for the model and the data are compared by
content. Each setting says which it is (`on_resume` in config/options/); the size of a batch is
compared as rows per step.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace

from ..config import BatchPlan, RunConfig, plan_batches
from ..config.run import settings_that
from ..config.settings import AUTO, MAY_CHANGE, RUN_LENGTH, counted, default_of, shown
from ..data import Source, Subset, TokenizedDataset, step_sampler

# A checkpoint of an older version lacks the settings that came later. It was trained as with their
# defaults, but for those whose default changes something: they are listed with what it was before.
BEFORE_IT_WAS_A_SETTING: dict[str, object] = {}


def differences(
    run: dict, config: RunConfig, content: dict[str, str], world_size: int
) -> dict[str, str]:
    """For each setting that differs from the checkpoint's run.json: its name, old and new value."""
    old, new = settings_of(run), asdict(config)
    free, length = settings_that(MAY_CHANGE), settings_that(RUN_LENGTH)
    if config.schedule == "constant":
        free |= length
    found = {
        name: f"--{name} was {shown(old[name])} and is {shown(new[name])}"
        + (f", which --lr_scheduler {config.schedule} depends on" if name in length else "")
        for name in new
        if name not in free and old[name] != new[name]
    }
    saved = run["content"]
    if saved["model"] != content["model"]:
        found["model_name"] = f"--model_name is a different model from {old['model_name']}"
    elif is_other("sample", saved, content):
        found["model_name"] = f"--model_name has different weights from {old['model_name']}"
    if saved["data"] != content["data"]:
        found["dataset"] = f"--dataset has different rows from {old['dataset']}"
    elif config.stream and is_other("tokenizer", saved, content):
        found["dataset"] = (
            "--model_name has a different tokenizer or chat template, so rows have different tokens"
        )
    return found | _batch_difference(run, config, world_size)


def settings_of(run: dict) -> dict:
    """The settings of a checkpoint's run.json, with those that its version did not have."""
    defaults = {f.name: default_of(f) for f in fields(RunConfig)}
    return defaults | BEFORE_IT_WAS_A_SETTING | run["config"]


def is_other(kind: str, saved: dict[str, str], content: dict[str, str]) -> bool:
    """Whether two hashes of a kind of content differ; an older version's checkpoint may have none."""
    return saved.get(kind, content.get(kind)) != content.get(kind)


def per_step(batches: BatchPlan) -> dict[str, int]:
    """A step's size as a record keeps it: rows_per_step or bins_per_step."""
    return {f"{batches.unit}s_per_step": batches.per_step}


def batch_of(record: dict) -> tuple[int, str]:
    """A step's size and its unit, of what `per_step` wrote; earlier versions knew rows alone."""
    if record.get("bins_per_step"):
        return record["bins_per_step"], "bin"
    return record["rows_per_step"], "row"


def _batch_difference(run: dict, config: RunConfig, world_size: int) -> dict[str, str]:
    """Empty if the settings ask for the checkpoint's rows or bins per step, on its ranks or on these.

    Bins need not divide by the ranks: some then have a bin less, or none, in a micro-batch.
    """
    if run["config"].get("packing", False) != config.packing:
        return {}  # which is said already
    count, unit = batch_of(run)
    if unit == "bin" and (config.bins_are_open or _asks_as_before(run, config)):
        return {}
    then = replace(config, sequence_parallel=settings_of(run)["sequence_parallel"])
    now = plan_batches(config, world_size)
    plans = [plan_batches(then, run["world_size"]), now]
    if any((plan.per_step, plan.unit) == (count, unit) for plan in plans):
        return {}
    is_now = counted(now.per_step, now.unit)
    if unit == "bin" or now.unit == "row":
        given = "batch_size" if config.bins_per_step == AUTO else "bins_per_step"
        flag = "global_batch_size" if unit == "row" else given
        return {flag: f"--{flag}: a step was {counted(count, unit)} and is {is_now}"}
    return {
        "global_batch_size": f"--global_batch_size: a step was {counted(count, 'row')} and is "
        f"{is_now}; --global_batch_size {count} keeps to rows"
    }


def _asks_as_before(run: dict, config: RunConfig) -> bool:
    """Whether full bins are asked for in the words of the checkpoint's run, on any ranks since its first.

    After several changes of their number neither that of the checkpoint nor that of now gives its bins.
    """
    words = ("batch_size", "gradient_accumulation_steps")
    same = all(getattr(config, name) == run["config"].get(name) for name in words)
    return config.has_full_bins and config.bins_per_step == AUTO and same


def with_batch_of(run: dict, config: RunConfig, world_size: int) -> RunConfig:
    """The settings with the checkpoint's size of a step, also where the number of ranks is another."""
    count, unit = batch_of(run)
    now = plan_batches(config, world_size)
    if (now.per_step, now.unit) == (count, unit) and not config.bins_are_open:
        return config
    return replace(config, **{"global_batch_size" if unit == "row" else "bins_per_step": count})


def steps_asked(
    config: RunConfig, dataset: TokenizedDataset | Subset | Source, run: dict
) -> int | None:
    """Steps of the whole run `run`, with these settings; None where only a stream's end will tell."""
    if isinstance(dataset, Source):
        return None if config.max_steps == AUTO else config.max_steps
    count, unit = batch_of(run)
    return step_sampler(
        dataset, count, unit, seed=config.seed, epochs=config.num_epochs, max_steps=config.max_steps
    ).total_steps
