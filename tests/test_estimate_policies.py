"""The chosen mix of policies is the fastest of all that fit, and a budget is refused in one line."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_qlora.config import RunConfig, block_policies
from fsdp_qlora.estimate import choose_policies, memory, step_seconds
from fsdp_qlora.estimate.policies import choose_tiles

from .estimates import H100, LLAMA_8B, LLAMA_70B, PRODUCT

ORDER = ("keep_all", "keep_linears", "keep_attention", "recompute_all")
SETUPS = [
    replace(PRODUCT, batch_size=2),
    replace(PRODUCT, compile=False, lora_dropout=0.1),
    replace(PRODUCT, attention="eager", context_length=1024),
    replace(PRODUCT, world_size=2, strategy="full_shard", context_length=512),
    replace(PRODUCT, world_size=4, strategy="shard_grad_op", batch_size=4),
]


@cache
def all_mixes(shape, setup) -> list[tuple[float, float]]:
    """(seconds, GiB) of every split of the blocks over the four policies, in ORDER."""
    found = []
    for counts in product(range(shape.layers + 1), repeat=4):
        if sum(counts) != shape.layers:
            continue
        text = ",".join(f"{name}:{n}" for name, n in zip(ORDER, counts, strict=True))
        tried = replace(setup, activation_policy=text)
        found.append((step_seconds(shape, H100, tried).total, memory(shape, tried).peak_allocated))
    return found


@settings(deadline=None, max_examples=60)
@given(setup=st.sampled_from(SETUPS), layers=st.integers(1, 7), share=st.floats(0, 1.2))
def test_no_mix_that_fits_is_faster(setup, layers, share):
    shape = LLAMA_8B.cut(layers)
    mixes = all_mixes(shape, setup)
    least, most = (pick(gib for _, gib in mixes) for pick in (min, max))
    budget = least + share * (most - least)
    chosen = replace(setup, activation_policy=choose_policies(shape, setup, budget))
    assert memory(shape, chosen).peak_allocated <= budget
    fastest = min(seconds for seconds, gib in mixes if gib <= budget)
    assert step_seconds(shape, H100, chosen).total == pytest.approx(fastest, rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from([LLAMA_8B, LLAMA_70B.cut(40)]),
    setup=st.sampled_from(SETUPS),
    spare=st.tuples(st.floats(0, 200), st.floats(0, 200)),
)
def test_a_larger_budget_is_never_slower(shape, setup, spare):
    least = memory(shape, setup, activation_policy="recompute_all").peak_allocated
    chosen = [choose_policies(shape, setup, least + gib) for gib in sorted(spare)]
    tight, wide = (step_seconds(shape, H100, setup, activation_policy=p).total for p in chosen)
    assert wide <= tight
    for text in chosen:  # the parts are in ORDER
        numbers = [ORDER.index(p) for p in block_policies(text, shape.layers)]
        assert numbers == sorted(numbers)


def test_ends_of_the_range_are_one_name():
    setup = SETUPS[0]
    assert choose_policies(LLAMA_8B, setup, 1000) == "keep_all"
    least = memory(LLAMA_8B, setup, activation_policy="recompute_all").peak_allocated
    assert choose_policies(LLAMA_8B, setup, least) == "recompute_all"


def test_the_setups_own_policy_is_not_looked_at():
    texts = {choose_policies(LLAMA_8B, replace(SETUPS[0], activation_policy=p), 30) for p in ORDER}
    assert len(texts) == 1


def test_a_budget_too_small_for_recompute_all_is_refused_with_the_need():
    with pytest.raises(ValueError) as caught:
        choose_policies(LLAMA_8B, SETUPS[0], 10)
    message = str(caught.value)
    assert message.startswith("--activation_budget_gib 10: a step needs 14.24 GiB")
    assert "--batch_size" in message and "\n" not in message


@pytest.mark.parametrize(
    "settings,named",
    [
        (dict(activation_budget_gib=0), "above 0"),
        (dict(activation_budget_gib="much"), "takes a number or nothing, got 'much'"),
        (
            dict(activation_budget_gib=20, activation_policy="keep_all"),
            "--activation_policy keep_all",
        ),
        (
            dict(activation_budget_gib=20, use_gradient_checkpointing=False),
            "--use_gradient_checkpointing false",
        ),
        (
            dict(activation_budget_gib=20, reentrant_checkpointing=True),
            "--reentrant_checkpointing true",
        ),
    ],
)
def test_a_budget_that_is_wrong_or_not_alone_is_refused(settings, named):
    with pytest.raises(ValueError, match="^--activation_budget_gib ") as caught:
        RunConfig(**settings)
    assert named in str(caught.value)


def test_a_budget_leaves_the_policy_open():
    assert RunConfig(activation_budget_gib=20).activation_policy == "auto"
    assert RunConfig().activation_policy == "recompute_all"


def test_tiles_are_as_few_as_a_budget_needs_or_as_save_much():
    long = replace(PRODUCT, batch_size=2, activation_offload=True, vocabulary_offload=True)
    peaks = {n: memory(LLAMA_8B, long, mlp_tiles=n).peak_allocated for n in (1, 2, 4, 8, 16)}
    assert peaks[1] > 1.05 * peaks[2] > 1.05 * peaks[4]
    assert peaks[4] < 1.03 * peaks[8] and peaks[8] == peaks[16]
    assert choose_tiles(LLAMA_8B, long) == 4
    for tiles, peak in [*peaks.items()][:3]:
        assert choose_tiles(LLAMA_8B, long, peak) == tiles
    assert choose_tiles(LLAMA_8B, replace(PRODUCT, context_length=512)) == 1
    assert choose_tiles(LLAMA_8B, replace(long, activation_policy="keep_all")) == 1
