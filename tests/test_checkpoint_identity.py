"""Which settings a run may change when it goes on."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields, replace

import pytest

from fsdp_qlora.checkpoint import identity
from fsdp_qlora.checkpoint.identity import differences, with_batch_of
from fsdp_qlora.config import RunConfig, plan_batches
from fsdp_qlora.config.run import settings_that
from fsdp_qlora.config.settings import DEFINES_WEIGHTS, MAY_CHANGE, MUST_MATCH, RUN_LENGTH

CONTENT = dict(model="m", data="d")
ONCE = dict(gradient_accumulation_steps=1)


def run_json(world_size: int = 2, **settings) -> dict:
    config = RunConfig(**settings)
    return dict(
        config=asdict(config),
        content=CONTENT,
        world_size=world_size,
        rows_per_step=plan_batches(config, world_size).per_step,
    )


def test_every_setting_says_what_a_resume_does_where_it_has_changed():
    roles = (MAY_CHANGE, MUST_MATCH, DEFINES_WEIGHTS, RUN_LENGTH)
    named = Counter(name for role in roles for name in settings_that(role))
    assert named == Counter(f.name for f in fields(RunConfig))


@pytest.mark.parametrize(
    "name, value",
    [
        ("lr", 1e-3),
        ("wd", 0.1),
        ("seed", 1),
        ("lora_alpha", 16),
        ("lora_dropout", 0.1),
        ("optimizer", "sgd"),
        ("lr_scheduler", "linear"),
        ("context_length", 64),
        ("train_on", "all"),
        ("packing", True),
        ("grad_norm", 0.3),
        ("precision", "fp32"),
        ("stream", True),
    ],
)
def test_a_setting_that_changes_the_result_differs(name, value):
    assert list(differences(run_json(), RunConfig(**{name: value}), CONTENT, 2)) == [name]


@pytest.mark.parametrize("name, value", [("num_epochs", 2), ("max_steps", 5)])
@pytest.mark.parametrize(
    "schedule, found",
    [
        (dict(lr_scheduler="constant"), False),
        (dict(lr_scheduler="constant", lr_warmup_steps=10), False),
        (dict(lr_scheduler="linear"), True),
        (dict(), True),
    ],
)
def test_the_length_differs_where_the_schedule_goes_by_it(name, value, schedule, found):
    assert (
        bool(differences(run_json(**schedule), RunConfig(**schedule | {name: value}), CONTENT, 2))
        is found
    )


@pytest.mark.parametrize(
    "settings",
    [
        dict(output_dir="elsewhere"),
        dict(log_to="jsonl"),
        dict(sharding_strategy="ddp"),
        dict(activation_policy="keep_all"),
        dict(use_cpu_offload=True),
        dict(checkpoint_every=5),
        dict(use_trained_cpu_offload=True),
        dict(use_vocabulary_cpu_offload=False),
        dict(model_name="moved"),
        dict(dataset="moved"),
        dict(timeout_minutes=1.0),
    ],
)
def test_layout_paths_and_display_do_not_differ(settings):
    assert not differences(run_json(), RunConfig(**settings), CONTENT, 2)


@pytest.mark.parametrize(
    "old, old_ranks, new, ranks, rows",
    [
        (ONCE, 2, ONCE, 4, 2),  # follows from the old ranks
        (dict(), 2, dict(), 4, 8),  # on any number of ranks
        (ONCE | dict(batch_size=2), 2, dict(batch_size=1, gradient_accumulation_steps=2), 2, 4),
        (ONCE | dict(batch_size=2), 2, ONCE | dict(batch_size=1), 4, 4),  # the same on these ranks
        (dict(global_batch_size=6), 2, dict(global_batch_size=6), 4, 6),
    ],
)
def test_the_rows_of_a_step_are_kept(old, old_ranks, new, ranks, rows):
    run, config = run_json(old_ranks, **old), RunConfig(**new)
    assert not differences(run, config, CONTENT, ranks)
    assert plan_batches(with_batch_of(run, config, ranks), ranks).per_step == rows


def test_other_rows_per_step_differ():
    found = differences(run_json(2, **ONCE), RunConfig(**ONCE, batch_size=3), CONTENT, 2)
    assert found == {"global_batch_size": "--global_batch_size: a step was 2 rows and is 6 rows"}


def bins_json(world_size: int, **settings) -> dict:
    run = run_json(world_size, packing=True, **ONCE | settings)
    return run | dict(rows_per_step=None, bins_per_step=run["rows_per_step"])


@pytest.mark.parametrize(
    "old, old_ranks, new, ranks, micro, accumulation",
    [
        (dict(batch_size=4), 1, dict(batch_size=4), 2, 2, 1),  # follows from the old ranks
        (dict(batch_size=2), 4, dict(batch_size=2), 1, 2, 4),
        (dict(batch_size=3), 2, dict(batch_size=2, gradient_accumulation_steps=3), 1, 2, 3),
        (dict(batch_size=4), 2, dict(batch_size=4, sequence_parallel=4), 4, 4, 2),
        (
            dict(batch_size=4, sequence_parallel=2),
            4,
            dict(batch_size=4, sequence_parallel=1),
            2,
            4,
            1,
        ),
        (dict(batch_size=2, sequence_parallel=4), 4, dict(batch_size=2), 1, 2, 1),
        (dict(batch_size=2), 2, dict(batch_size=2), 3, 2, 1),  # one rank has none
        (dict(batch_size=3), 3, dict(batch_size=3), 2, 3, 2),  # 5 and 4
        (
            dict(batch_size=7),
            1,
            dict(batch_size=6, bins_per_step=7),
            1,
            4,
            2,
        ),  # 4 and 3, not 6 and 1
    ],
)
def test_the_bins_of_a_step_are_kept(old, old_ranks, new, ranks, micro, accumulation):
    run, config = bins_json(old_ranks, **old), RunConfig(packing=True, **ONCE | new)
    assert not differences(run, config, CONTENT, ranks)
    plan = plan_batches(with_batch_of(run, config, ranks), ranks)
    assert (plan.per_step, plan.unit) == (run["bins_per_step"], "bin")
    assert (plan.micro_batch_size, plan.accumulation) == (micro, accumulation)


@pytest.mark.parametrize(
    "old, old_ranks, new, ranks, micro, accumulation",
    [
        (dict(gradient_accumulation_steps=2), 1, dict(), 1, 1, 2),  # decided by the lengths then
        (dict(gradient_accumulation_steps=8), 1, dict(), 2, 1, 4),  # 8 bins of an older version
        (dict(batch_size=4), 1, dict(batch_size=2), 1, 2, 2),
        (dict(gradient_accumulation_steps=2), 1, dict(batch_size=4), 1, 2, 1),
        (dict(gradient_accumulation_steps=2), 1, dict(), 4, 1, 1),  # two ranks have none
    ],
)
def test_bins_that_the_lengths_decided_are_those_of_the_checkpoint_at_a_resume(
    old, old_ranks, new, ranks, micro, accumulation
):
    run, config = bins_json(old_ranks, **old), RunConfig(packing=True, **new)
    assert not differences(run, config, CONTENT, ranks)
    resumed = with_batch_of(run, config, ranks)
    assert not resumed.bins_are_open
    plan = plan_batches(resumed, ranks)
    assert (plan.per_step, plan.unit) == (run["bins_per_step"], "bin")
    assert (plan.micro_batch_size, plan.accumulation) == (micro, accumulation)


def test_other_bins_and_rows_turned_into_bins_are_refused_with_the_remedy():
    config = RunConfig(packing=True, **ONCE)
    assert not differences(bins_json(2), config, CONTENT, 4)
    (text,) = differences(bins_json(4), replace(config, bins_per_step=3), CONTENT, 2).values()
    assert text == "--bins_per_step: a step was 4 bins and is 3 bins"
    (text,) = differences(bins_json(2), replace(config, batch_size=3), CONTENT, 2).values()
    assert text == "--batch_size: a step was 2 bins and is 6 bins"
    earlier = run_json(2, packing=True, **ONCE)  # a version in which packing counted rows
    (text,) = differences(earlier, config, CONTENT, 2).values()
    assert text.endswith("a step was 2 rows and is 2 bins; --global_batch_size 2 keeps to rows")
    assert not differences(earlier, RunConfig(packing=True, global_batch_size=2), CONTENT, 2)


def test_another_model_or_data_set_differs_by_content():
    found = differences(run_json(), RunConfig(), dict(model="x", data="y"), 2)
    assert sorted(found) == ["dataset", "model_name"]


def test_a_checkpoint_of_an_older_version_had_later_settings_at_their_defaults(monkeypatch):
    run = run_json()
    for name in ("lora_dropout", "packing", "grad_norm"):
        del run["config"][name]
    run["config"]["gone_since"] = 7
    assert not differences(run, RunConfig(), CONTENT, 2)
    found = differences(run, RunConfig(packing=True), CONTENT, 2)
    assert found == {"packing": "--packing was false and is true"}
    monkeypatch.setitem(identity.BEFORE_IT_WAS_A_SETTING, "grad_norm", 9.0)
    assert list(differences(run, RunConfig(), CONTENT, 2)) == ["grad_norm"]
    assert not differences(run, RunConfig(grad_norm=9.0), CONTENT, 2)


@pytest.mark.parametrize(
    "kind, settings, name, words",
    [
        ("sample", dict(), "model_name", "--model_name has different weights"),
        (
            "tokenizer",
            dict(stream=True, max_steps=3),
            "dataset",
            "a different tokenizer or chat template",
        ),
    ],
)
def test_other_content_differs_unless_an_older_version_did_not_know_it(kind, settings, name, words):
    run, config = run_json(**settings), RunConfig(**settings)
    assert not differences(run, config, CONTENT | {kind: "new"}, 2)
    run["content"] = CONTENT | {kind: "old"}
    found = differences(run, config, CONTENT | {kind: "new"}, 2)
    assert list(found) == [name] and words in found[name]
    assert not differences(run, config, CONTENT | {kind: "old"}, 2)


def test_a_tokenizer_may_change_where_the_tokens_themselves_are_compared():
    run = run_json() | {"content": CONTENT | {"tokenizer": "old"}}
    assert not differences(run, RunConfig(), CONTENT | {"tokenizer": "new"}, 2)
