"""The ladder and the search: what fits, what is fastest, and what is never changed."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

from fsdp_qlora.catalog.machine import MachineOptions, cpu_machine, machine_from_options
from fsdp_qlora.catalog.shapes import model_shape, shape_from_config
from fsdp_qlora.cli import main
from fsdp_qlora.config import RunConfig, plan_batches
from fsdp_qlora.estimate import estimate
from fsdp_qlora.estimate.policies import _policy_text
from fsdp_qlora.estimate.question import why_not_shared
from fsdp_qlora.loading import meta_model
from fsdp_qlora.model.attention import choose_attention
from fsdp_qlora.model.sequence_parallel import check_sequence_parallel
from fsdp_qlora.planner import (
    LADDER,
    climb,
    flags_of,
    free_settings,
    propose,
    report,
    rungs,
)
from fsdp_qlora.planner.search import offload_combinations, seconds_per_token

from .families import EVERY_FAMILY, family_config
from .parts import rest, slow

SEVEN, SEVENTY = model_shape("llama-2-7b"), model_shape("llama-2-70b")
EVERYTHING = free_settings(RunConfig(), set(), everything=True)


def machine(**options):
    return machine_from_options(MachineOptions(**options))


def plan(shape, config=None, free=EVERYTHING, **options):
    return propose(shape, machine(**options), config or RunConfig(context_length=2048), free)


def test_each_rung_adds_its_changes_to_those_before():
    rungs = climb(SEVENTY, machine(gpu="3090", gpus=2), RunConfig(context_length=2048))
    assert [c.rung for c in rungs] == list(LADDER)
    together = {}
    for climbed in rungs:
        together |= climbed.rung.changes
        assert climbed.changes == together
        if climbed.found:
            assert climbed.found.config == replace(RunConfig(context_length=2048), **together)


def test_every_rung_of_a_kind_needs_less_than_the_one_it_repairs():
    needs = [
        c.found.memory.total if c.found else None
        for c in climb(SEVENTY, machine(gpu="3090", gpus=2), RunConfig(context_length=2048))
    ]
    ddp, ddp_again, grad_op, grad_op_again, full, full_again, offload = needs[:7]
    assert ddp_again < ddp and grad_op_again < grad_op and full_again < full < grad_op
    assert offload < full_again


def test_the_choice_fits_and_nothing_that_was_tried_is_much_faster():
    found = plan(SEVENTY, gpu="a100", gpus=4)
    assert found.choice.fits
    best = min(seconds_per_token(e) for e in found.fitting)
    assert seconds_per_token(found.choice) <= 1.02 * 1.025 * best  # an offload must bring 2.5%


@pytest.mark.parametrize(
    "gpu,gpus,limit",
    [
        ("h100", 1, None),
        ("3090", 2, None),
        rest("h100", 2, 24),
        rest("h100", 4, None),
        rest("a6000", 2, None),
    ],
)
def test_no_rung_that_fits_is_faster_than_the_choice(gpu, gpus, limit):
    """At the ladder's own micro-batch of one row, on which the search can only improve."""
    found = plan(SEVEN, gpu=gpu, gpus=gpus, gpu_memory_gib=limit)
    rungs = [c.found for c in found.rungs if c.fits]
    assert rungs and all(
        seconds_per_token(found.choice) <= 1.03 * seconds_per_token(r) for r in rungs
    )


@pytest.mark.parametrize("rows", [7, 32, 48])
@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_rows_per_step_are_never_changed(rows, gpus):
    found = plan(
        SEVEN, RunConfig(context_length=2048, global_batch_size=rows), gpu="h100", gpus=gpus
    )
    for candidate in found.fitting:
        assert plan_batches(candidate.config, gpus).per_step == rows


@pytest.mark.parametrize(
    "gpus,limit,settings",
    [(1, 3.4, {}), (1, 4, dict(compile=False)), (2, 5, {}), rest(2, 3.2, {}), rest(2, 2.7, {})],
)
def test_no_other_combination_is_faster_than_the_choice(gpus, limit, settings):
    """Every strategy, offload, micro-batch and split of four blocks over the policies, one by one.

    An offload must bring 2.5%.
    """

    def price(e):
        return seconds_per_token(e) * (
            1 + 0.025 * (e.config.use_cpu_offload + e.config.use_activation_cpu_offload)
        )

    shape, here = SEVEN.cut(4), machine(gpu="3090", gpus=gpus, gpu_memory_gib=limit)
    config = replace(
        RunConfig(context_length=2048, global_batch_size=4, lora_dropout=0.0), **settings
    )
    found = propose(shape, here, config, EVERYTHING)
    mixes = [m for m in product(range(5), repeat=4) if sum(m) == 4]
    best = float("inf")
    for strategy, offload, activations in offload_combinations(here, config, EVERYTHING):
        for rows, mix in product((1, 2, 4), mixes):
            if activations and mix[0] == 4:
                continue  # refused: nothing would be moved
            tried = replace(
                config,
                sharding_strategy=strategy,
                use_cpu_offload=offload,
                batch_size=rows,
                use_activation_cpu_offload=activations,
                activation_policy=_policy_text(mix),
            )
            one = estimate(shape, here, tried)
            if one.memory.total <= 0.97 * limit:
                best = min(best, price(one))
    assert found.choice.memory.total <= limit
    assert price(found.choice) <= 1.011 * best
    fastest = min(map(seconds_per_token, found.fitting))
    assert seconds_per_token(found.choice) <= 1.011 * 1.025**2 * fastest


def test_what_the_user_gave_is_kept():
    given = RunConfig(context_length=2048, sharding_strategy="full_shard", batch_size=3)
    free = free_settings(
        given, {"sharding_strategy", "batch_size", "activation_policy"}, everything=True
    )
    found = plan(SEVEN, given, free, gpu="h100", gpus=2)
    assert {
        (e.config.sharding_strategy, e.config.batch_size, e.config.activation_policy)
        for e in found.fitting
    } == {("full_shard", 3, "recompute_all")}
    assert set(found.changes) == {
        "use_cpu_offload",
        "use_activation_cpu_offload",
        "sequence_parallel",
    }


def test_an_offload_that_brings_little_is_left():
    """70B on two cards of 24 GiB: activation offload is predicted to bring 3%, as keep_attention fits."""
    shape, here = model_shape("llama-2-70b"), machine(gpu="h200", gpus=2, gpu_memory_gib=24)
    config = RunConfig(context_length=2048, global_batch_size=8, lora_dropout=0.0)
    found = propose(shape, here, config, EVERYTHING)
    fastest = min(found.fitting, key=seconds_per_token)
    assert fastest.config.use_activation_cpu_offload
    assert (
        not found.choice.config.use_activation_cpu_offload and found.choice.config.use_cpu_offload
    )
    assert seconds_per_token(found.choice) < 1.02 * 1.025 * seconds_per_token(fastest)
    assert "the first is simpler" in report(found)


def test_a_small_card_needs_offload_and_a_large_one_does_not():
    assert plan(SEVENTY, gpu="3090", gpus=2).choice.config.use_cpu_offload
    large = plan(SEVEN, gpu="h100", gpus=2).choice.config
    assert (large.sharding_strategy, large.use_cpu_offload) == ("ddp", False)


def test_host_memory_is_a_limit_too():
    enough, short = (plan(SEVENTY, gpu="4090", gpus=2, host_memory_gib=gib) for gib in (128, 32))
    assert enough.choice.config.use_cpu_offload
    assert short.choice is None or not short.choice.config.use_cpu_offload


def test_where_nothing_fits_it_says_what_would():
    config = RunConfig(context_length=32768, lora_dropout=0.1)
    found = plan(model_shape("qwen2.5-72b"), config, gpu="4080", gpus=1)
    assert found.choice is None and not found.closest.fits
    assert 0 < found.longest < 32768
    shorter = replace(config, context_length=found.longest)
    assert plan(model_shape("qwen2.5-72b"), shorter, gpu="4080", gpus=1).choice
    many = plan(
        SEVENTY,
        replace(config, context_length=2048, use_cpu_offload=False),
        EVERYTHING - {"use_cpu_offload"},
        gpu="3090",
    )
    assert many.choice is None and many.more_gpus > 2


def test_a_larger_micro_batch_is_taken_only_where_it_pays():
    """Rows per step follow from it unless they are fixed, and they are a choice about training."""
    found = plan(SEVEN, RunConfig(context_length=4096), gpu="h100")
    fewer = [e for e in found.fitting if e.config.batch_size < found.choice.config.batch_size]
    assert all(seconds_per_token(e) > 1.01 * seconds_per_token(found.choice) for e in fewer)


def test_the_command_says_each_rung_the_search_and_the_choice(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    picture = tmp_path / "new folder" / "plan.png"
    argv = [
        "plan",
        "--gpu",
        "rtx 3090",
        "--gpus",
        "2",
        "--model_name",
        "llama-2-70b",
        "--context_length",
        "2048",
        "--global_batch_size",
        "32",
        "--picture",
        str(picture),
    ]
    assert main(argv) == 0
    text = capsys.readouterr().out
    for rung in LADDER:
        assert rung.name in text
    for part in (
        "too much; most is",
        "the fastest of",
        "chosen: --sharding_strategy full_shard",
        "--use_cpu_offload true",
        "32 rows (fixed)",
        "uncalibrated",
        "fits",
        "GiB of host memory",
    ):
        assert part in text
    flags = [f"{n}. {flags_of(changes)}" for n, (_, changes) in enumerate(rungs(), 1)]
    assert text.split("each rung's flags:\n")[1].split("\n\n")[0].splitlines() == flags
    copied = ("chosen", *flags)  # on one line, to be typed
    assert all(len(line) < 80 for line in text.splitlines() if not line.startswith(copied))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main([*argv, "--picture", str(tmp_path / "plan.foo")]) == 2
    assert "plan.foo: foo is not a picture format; use .png" in capsys.readouterr().err
    assert main([*argv, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["ladder"]) == len(LADDER) and answer["choice"]["fits"]
    assert answer["chosen"]["use_cpu_offload"] is True
    assert [r["fits"] for r in answer["ladder"]].index(True) == 6


def test_the_chosen_flags_estimate_to_the_same_figures(capsys):
    """What the plan prints can be typed."""
    base = [
        "--gpu",
        "a6000",
        "--gpus",
        "2",
        "--model_name",
        "llama-2-70b",
        "--context_length",
        "2048",
    ]
    assert main(["plan", *base, "--json"]) == 0
    choice = json.loads(capsys.readouterr().out)
    chosen = [
        part
        for name, value in choice["chosen"].items()
        for part in (f"--{name}", str(value).lower())
    ]
    assert main(["estimate", *base, *chosen, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["needed_gib"] == choice["choice"]["needed_gib"]


def test_nothing_fits_is_an_answer_not_a_crash(capsys):
    assert main(["plan", "--gpu", "4080", "--params", "2T", "--context_length", "8192"]) == 0
    text = capsys.readouterr().out
    assert "nothing fits" in text and "closest: " in text


def test_estimates_of_the_plan_are_the_estimates():
    found = plan(SEVEN, gpu="4090", gpus=2).choice
    assert found == estimate(SEVEN, found.machine, found.config)


# ---- rows shared by several GPUs ----------------------------------------------------------------


LONG = replace(model_shape("llama-3.1-8b"), max_positions=None)


def test_rows_that_fit_no_gpu_alone_are_shared_by_as_many_as_make_it_fastest():
    config, here = RunConfig(context_length=524_288), machine(gpu="h100", gpus=8)
    found = propose(LONG, here, config, EVERYTHING)
    sizes = {e.config.sequence_parallel for e in found.fitting}
    assert 1 not in sizes and sizes <= {2, 4, 8}
    assert found.choice.fits and found.choice.config.sequence_parallel in sizes
    fastest = min(map(seconds_per_token, found.fitting))
    assert seconds_per_token(found.choice) <= fastest * 1.02 * 1.025**2
    assert f"--sequence_parallel {found.choice.config.sequence_parallel}" in report(found)
    kept = propose(LONG, here, config, free_settings(config, {"sequence_parallel"}, True))
    assert kept.choice is None and kept.config.sequence_parallel == 1


def test_gpus_that_would_wait_for_rows_share_them():
    config = RunConfig(context_length=32_768, global_batch_size=2)
    found = propose(LONG, machine(gpu="h100", gpus=8), config, EVERYTHING)
    assert found.choice.config.sequence_parallel == 4
    alone = min(seconds_per_token(e) for e in found.fitting if e.config.sequence_parallel == 1)
    assert seconds_per_token(found.choice) < alone / 2


def test_rows_that_fit_are_not_shared():
    found = propose(LONG, machine(gpu="h100", gpus=8), RunConfig(context_length=8192), EVERYTHING)
    assert {e.config.sequence_parallel for e in found.fitting} == {1}
    assert "sequence_parallel" not in report(found)


@pytest.mark.parametrize(
    "name, settings, message",
    [
        ("qwen3-30b-a3b", dict(mlp_tiles=2), "--mlp_tiles 2: the experts of .*leave it out"),
        (
            "meta-llama/Llama-4-Scout-17B-16E",
            dict(lora_target_parameters="experts"),
            "--lora_target_parameters experts: .* has no experts that PEFT can adapt",
        ),
        (
            "deepseek-ai/DeepSeek-V3",
            dict(router_aux_loss_coef=0.01),
            "--router_aux_loss_coef 0.01: transformers has no balance loss for .*leave it out",
        ),
    ],
)
def test_an_estimate_refuses_of_experts_what_a_run_does(name, settings, message):
    with pytest.raises(ValueError, match=message):
        estimate(model_shape(name), machine(gpu="h100"), RunConfig(**settings))


def test_the_number_of_tiles_that_is_left_open_is_1_for_a_mixture():
    config = RunConfig(mlp_tiles=-1, context_length=32_768)
    for name, tiled in (("qwen3-30b-a3b", False), ("qwen3-8b", True)):
        found = estimate(model_shape(name), machine(gpu="h100"), config)
        assert (found.plan.memory.mlp_tiles > 1) == tiled


_SHARED_OR_NOT = ["Llama 3", "StableLM", "Bamba", "Falcon", "Llama 4"]


@pytest.mark.parametrize(
    "family", [*_SHARED_OR_NOT, *map(slow, EVERY_FAMILY.keys() - {*_SHARED_OR_NOT})]
)
def test_an_estimate_shares_the_rows_of_those_families_whose_rows_a_run_shares(family):
    settings, device = family_config(family), torch.device("cpu")
    try:
        shape = shape_from_config(settings.to_dict(), family)
    except ValueError as error:  # a type that nothing is estimated of
        assert "can't be estimated" in str(error)
        return
    config = RunConfig(sequence_parallel=2, context_length=64)
    attention, _ = choose_attention("auto", False, settings, device, torch.float32)
    try:
        check_sequence_parallel(meta_model(settings, torch.float32, attention), 2, 2)
        refused = False
    except ValueError:
        refused = True
    assert bool(why_not_shared(shape, cpu_machine(2), config)) == refused


@pytest.mark.parametrize(
    "shape, gpus, size, message",
    [
        (LONG, 6, 4, "6 GPUs are not a multiple of it; use one of \\[2, 3, 6\\]"),
        (model_shape("Qwen/Qwen3.5-9B"), 2, 2, "carry a state along the tokens"),
        (
            model_shape("meta-llama/Llama-4-Scout-17B-16E"),
            2,
            2,
            "can't be computed from a part of a row",
        ),
    ],
)
def test_an_estimate_refuses_to_share_rows_where_a_run_would(shape, gpus, size, message):
    config = RunConfig(context_length=12_288, sequence_parallel=size, train_type="qlora")
    with pytest.raises(ValueError, match=message):
        estimate(shape, machine(gpu="h100", gpus=gpus), config)
    assert not any(
        e.config.sequence_parallel > 1
        for e in propose(
            shape.cut(4),
            machine(gpu="h100", gpus=3),
            RunConfig(context_length=12_288, global_batch_size=1),
            EVERYTHING,
        ).fitting
    )


@pytest.mark.parametrize(
    "machines, group",
    [
        # 70B in 4 bits: NVLink inside, a slow network between
        (dict(gpu="h100", gpus=8, nodes=2, internode_gb_s=3), 8),
        # no machine of two cards holds it, but two of them do
        (dict(gpu="4090", gpus=2, nodes=8, internode_gb_s=3), 4),
        # cards that talk to each other no faster than over the network
        (dict(gpu="h100", gpus=4, nodes=2, interconnect="2", internode_gb_s=50), 2),
    ],
    ids=["a whole machine", "several machines", "part of a machine"],
)
def test_the_group_of_a_hybrid_is_the_one_that_both_links_make_fastest(machines, group):
    here = machine(**machines)
    config = RunConfig(
        sharding_strategy="hybrid_full_shard",
        context_length=2048,
        global_batch_size=16,
        activation_policy="recompute_all",
    )
    choice = propose(SEVENTY, here, config, frozenset(["shard_group_size"])).choice
    assert choice.config.shard_group_size == group
    sizes = [n for n in range(2, here.world_size) if here.world_size % n == 0]
    tried = [estimate(SEVENTY, here, replace(config, shard_group_size=n)) for n in sizes]
    fastest = min(seconds_per_token(e) for e in tried if e.fits)
    assert seconds_per_token(choice) <= 1.011 * fastest


def test_a_plan_of_several_machines_types_the_group_and_keeps_one_that_was_given(capsys):
    asked = ["plan", "--params", "70B", "--gpu", "h100", "--gpus", "8", "--nodes", "2"]
    asked += ["--internode_gb_s", "3", "--context_length", "2048", "--global_batch_size", "16"]
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["shard_group_size"] == 8
    assert main([*asked, "--json", "--shard_group_size", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "shard_group_size" not in found["chosen"]
