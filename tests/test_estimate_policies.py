"""The chosen mix of policies is the fastest of all that fit, and a budget is refused in one line."""

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
PLANS = [
    PRODUCT.change(micro_batch_size=2),
    PRODUCT.change(compile=False, lora_dropout=0.1),
    PRODUCT.change(attention="eager", context_length=1024),
    PRODUCT.change(world_size=2, strategy="full_shard", context_length=512),
    PRODUCT.change(world_size=4, strategy="shard_grad_op", micro_batch_size=4),
]


@cache
def all_mixes(shape, plan) -> list[tuple[float, float]]:
    """(seconds, GiB) of every split of the blocks over the four policies, in ORDER."""
    found = []
    for counts in product(range(shape.layers + 1), repeat=4):
        if sum(counts) != shape.layers:
            continue
        text = ",".join(f"{name}:{n}" for name, n in zip(ORDER, counts, strict=True))
        tried = plan.change(activation_policy=text)
        found.append((step_seconds(shape, H100, tried).total, memory(shape, tried).peak_allocated))
    return found


@settings(deadline=None, max_examples=60)
@given(plan=st.sampled_from(PLANS), layers=st.integers(1, 7), share=st.floats(0, 1.2))
def test_no_mix_that_fits_is_faster(plan, layers, share):
    shape = LLAMA_8B.cut(layers)
    mixes = all_mixes(shape, plan)
    least, most = (pick(gib for _, gib in mixes) for pick in (min, max))
    budget = least + share * (most - least)
    chosen = plan.change(activation_policy=choose_policies(shape, plan, budget))
    assert memory(shape, chosen).peak_allocated <= budget
    fastest = min(seconds for seconds, gib in mixes if gib <= budget)
    assert step_seconds(shape, H100, chosen).total == pytest.approx(fastest, rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from([LLAMA_8B, LLAMA_70B.cut(40)]),
    plan=st.sampled_from(PLANS),
    spare=st.tuples(st.floats(0, 200), st.floats(0, 200)),
)
def test_a_larger_budget_is_never_slower(shape, plan, spare):
    least = memory(shape, plan, activation_policy="recompute_all").peak_allocated
    chosen = [choose_policies(shape, plan, least + gib) for gib in sorted(spare)]
    tight, wide = (step_seconds(shape, H100, plan, activation_policy=p).total for p in chosen)
    assert wide <= tight
    for text in chosen:  # the parts are in ORDER
        numbers = [ORDER.index(p) for p in block_policies(text, shape.layers)]
        assert numbers == sorted(numbers)


def test_ends_of_the_range_are_one_name():
    plan = PLANS[0]
    assert choose_policies(LLAMA_8B, plan, 1000) == "keep_all"
    least = memory(LLAMA_8B, plan, activation_policy="recompute_all").peak_allocated
    assert choose_policies(LLAMA_8B, plan, least) == "recompute_all"


def test_the_plans_own_policy_is_not_looked_at():
    texts = {choose_policies(LLAMA_8B, PLANS[0].change(activation_policy=p), 30) for p in ORDER}
    assert len(texts) == 1


def test_a_budget_too_small_for_recompute_all_is_refused_with_the_need():
    with pytest.raises(ValueError) as caught:
        choose_policies(LLAMA_8B, PLANS[0], 10)
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
    long = PRODUCT.change(micro_batch_size=2, activation_offload=True, vocabulary_offload=True)
    peaks = {n: memory(LLAMA_8B, long, mlp_tiles=n).peak_allocated for n in (1, 2, 4, 8, 16)}
    assert peaks[1] > 1.05 * peaks[2] > 1.05 * peaks[4]
    assert peaks[4] < 1.03 * peaks[8] and peaks[8] == peaks[16]
    assert choose_tiles(LLAMA_8B, long) == 4
    for tiles, peak in [*peaks.items()][:3]:
        assert choose_tiles(LLAMA_8B, long, peak) == tiles
    assert choose_tiles(LLAMA_8B, PRODUCT.change(context_length=512)) == 1
    assert choose_tiles(LLAMA_8B, long.change(activation_policy="keep_all")) == 1
