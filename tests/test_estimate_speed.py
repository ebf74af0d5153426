"""Time and FLOPs of a step against closed forms and what was measured on H100s."""

from dataclasses import replace

import pytest

import fsdp_qlora.plan_draft as plan_module
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.shapes import model_shape
from fsdp_qlora.choices import POLICIES
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import (
    GIB,
    constants,
    flops_per_token,
    memory,
    model_flops_per_token,
    model_tflops,
    step_seconds,
)
from fsdp_qlora.estimate.activations import kept_by_block
from fsdp_qlora.estimate.compute import launch_seconds
from fsdp_qlora.estimate.constants import MATMUL_SHARE, NETWORK_HOP, NVLINK_HOP
from fsdp_qlora.estimate.transfers import hops_seconds
from fsdp_qlora.plan_draft import draft_plan

from .estimates import H100, LLAMA_8B, LLAMA_70B, PRODUCT, TRIAL, TRIAL_HALF


@pytest.mark.parametrize(
    "changes,measured",
    [
        (dict(activation_policy="keep_linears"), 1.167),
        (dict(activation_policy="keep_all:26,keep_linears:6"), 1.151),
        (dict(activation_policy="keep_linears", compute_dtype="fp8"), 0.911),
        (dict(compute_dtype="fp8"), 1.150),
    ],
)
def test_step_time_is_near_what_one_h100_measured(changes, measured):
    """With the unpacking kernels before the present ones, by a few percent slower."""
    assert step_seconds(
        LLAMA_8B, H100, PRODUCT, micro_batch_size=2, **changes
    ).total == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    "shape,changes,measured",
    [
        (LLAMA_8B, {}, 1.64),
        (LLAMA_8B, dict(activation_policy="keep_all"), 1.17),
        (LLAMA_8B, TRIAL_HALF, 1.43),
        (LLAMA_8B, dict(activation_policy="keep_all", world_size=2), 1.22),
        (LLAMA_70B, dict(micro_batch_size=8, context_length=2048, world_size=4), 12.67),
        (LLAMA_70B.cut(16), dict(micro_batch_size=4, context_length=2048, world_size=2), 1.25),
        (
            LLAMA_70B.cut(16),
            dict(micro_batch_size=4, context_length=2048, world_size=2, cpu_offload=True),
            1.34,
        ),
    ],
)
def test_step_time_is_near_what_the_trial_measured(shape, changes, measured):
    """The trial ran a recomputed block's last product once more than this code does."""
    plan = TRIAL.change(**changes)
    recomputed = plan.memory.policies(shape).count("recompute_all")
    last = (
        2
        * shape.hidden
        * shape.intermediate
        * plan.batch.tokens
        / (H100.reached_tflops * 1e12 * MATMUL_SHARE)
    )
    assert step_seconds(shape, H100, plan).total + recomputed * last == pytest.approx(
        measured, rel=0.10
    )


def test_flops_by_hand():
    """4 per frozen weight, 6 per adapter weight, half of the attention square three times."""
    n_linear = 6_979_321_856 + 128256 * 4096
    adapters = LLAMA_8B.lora_params(64)
    attention = 6 * 8192 * 4096 * 32
    assert model_flops_per_token(LLAMA_8B, TRIAL) == 4 * n_linear + 6 * adapters + attention
    assert model_flops_per_token(LLAMA_8B, TRIAL.change(quant="none", adapter="none")) == (
        6 * n_linear + attention
    )
    assert model_tflops(LLAMA_8B, TRIAL, 1e3) == model_flops_per_token(LLAMA_8B, TRIAL) / 1e9


def recomputed_flops(policy: str, **changes) -> float:
    """FLOPs per token beyond those of keep_all."""
    kept, found = (
        flops_per_token(LLAMA_8B, PRODUCT.change(activation_policy=p, **changes)).total
        for p in ("keep_all", policy)
    )
    return found - kept


def test_recomputed_flops_by_hand():
    """All products but each block's last one and B of its adapter; then attention; then nothing."""
    down, rank = 4096 * 14336, 64
    linears = 6_979_321_856 - 32 * down + LLAMA_8B.lora_params(rank) - 32 * rank * 4096
    attention = 2 * 8192 * 4096 * 32
    assert recomputed_flops("recompute_all") == 2 * linears + attention
    assert recomputed_flops("keep_attention") == 2 * linears
    assert recomputed_flops("keep_linears") == 0
    assert recomputed_flops("recompute_all:16,keep_all:16") == linears + attention / 2


def test_attention_that_no_policy_keeps_is_recomputed():
    varlen, eager = (recomputed_flops("keep_attention", attention=a) for a in ("varlen", "eager"))
    assert varlen == recomputed_flops("keep_attention")
    assert eager == recomputed_flops("recompute_all")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "shape", [LLAMA_8B, model_shape("gemma-2-9b"), model_shape("phi-3-mini-4k")]
)
def test_each_policy_that_keeps_more_is_faster(shape, compiled):
    seconds = [
        step_seconds(
            shape, H100, PRODUCT, micro_batch_size=4, compile=compiled, activation_policy=p
        ).total
        for p in POLICIES
    ]
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) == 4


def attention_seconds(gpu, **settings):
    config = RunConfig(context_length=8192, sharding_strategy="ddp", **settings)
    return step_seconds(LLAMA_8B, find_gpu(gpu), draft_plan(config, 1)).parts["attention"]


@pytest.mark.parametrize("gpu, slower", [("H100 SXM", True), ("RTX 4090", False)])
def test_packed_rows_take_the_slower_kernel_where_sdpa_has_a_faster_one(gpu, slower):
    """cuDNN's, on Hopper: 7.7 against 13.0 ms at 2x8192 (docs/LOG.md)."""
    row, packed = (
        attention_seconds(gpu, packing=packing, attn_implementation="sdpa")
        for packing in (False, True)
    )
    assert packed / row == (pytest.approx(13.0 / 7.7, rel=0.05) if slower else 1)


@pytest.mark.parametrize("packing, ratio", [(False, 6.50 / 7.24), (True, 6.85 / 12.6)])
def test_flash_attention_4_is_faster_and_reckoned_with_where_it_is_installed(
    packing, ratio, monkeypatch
):
    """Milliseconds at 2x8192 on an H200, beside cuDNN's and torch's variable-length attention."""
    slower, asked = (
        attention_seconds("H200", packing=packing, attn_implementation=name)
        for name in ("sdpa", "flash_attention_4")
    )
    assert asked / slower == pytest.approx(ratio, rel=0.05)
    for installed, seconds in ((True, asked), (False, slower)):
        monkeypatch.setattr(plan_module, "has_flash_attention_4", lambda is_so=installed: is_so)
        assert attention_seconds("H200", packing=packing) == seconds


def test_flash_attention_4_replays_models_with_windows_and_keeps_what_sdpa_keeps():
    mistral = model_shape("mistral-7b")
    windows = replace(mistral, traits=replace(mistral.traits, windows=True))
    for name, replayed in (("sdpa", False), ("fa4", True), ("fa4_packed", True)):
        replaying = TRIAL.change(cuda_graphs=True, attention=name)
        assert replaying.replays(LLAMA_8B)
        assert replaying.replays(windows) is replayed
        assert kept_by_block(LLAMA_8B, replaying, "keep_attention") == kept_by_block(
            LLAMA_8B, TRIAL, "keep_attention"
        )


def test_a_mix_takes_the_mean_of_its_policies():
    def seconds(policy):
        return step_seconds(LLAMA_8B, H100, PRODUCT, activation_policy=policy).total

    mean = (seconds("keep_linears") + 3 * seconds("recompute_all")) / 4
    assert seconds("keep_linears:8,recompute_all:24") == pytest.approx(mean)


def test_slow_links_show_and_fast_ones_hide_behind_compute():
    plan = TRIAL.change(world_size=2, micro_batch_size=1, context_length=2048)
    fast = step_seconds(LLAMA_8B, H100, plan).parts["communication"]
    slow = step_seconds(LLAMA_8B, H100, plan, link_gb_s=1).parts["communication"]
    assert fast < 0.06 and slow > 1
    ddp = step_seconds(LLAMA_8B, H100, plan, strategy="ddp", link_gb_s=1).parts["communication"]
    assert ddp == pytest.approx(LLAMA_8B.lora_params(64) * 2 / 1e9)
    alone = step_seconds(LLAMA_8B, H100, plan, world_size=1).parts
    assert alone["communication"] == alone["offload"] == 0


def test_small_steps_are_bound_by_launches_and_datasheet_cards_say_so():
    small = step_seconds(model_shape("smollm2-135m"), H100, micro_batch_size=1, context_length=64)
    assert small.parts["launches"] > 0.5 * small.total
    table = step_seconds(LLAMA_8B, find_gpu("3090")).table()
    assert "uncalibrated" in table and "uncalibrated" not in small.table()


def test_weights_gathered_once_are_gathered_by_the_first_micro_batch_alone():
    plan = PRODUCT.change(world_size=4, strategy="full_shard", context_length=2048)

    def shown(**changes):
        return step_seconds(LLAMA_8B, H100, plan, **changes).parts["communication"]

    one, four = shown(gather_once=True), shown(gather_once=True, accumulation=4)
    assert shown(accumulation=4) == pytest.approx(4 * shown())
    assert one < 0.6 * shown() and four < 0.3 * shown(accumulation=4)


def parts_of(**changes) -> dict[str, float]:
    return step_seconds(LLAMA_8B, H100, PRODUCT, micro_batch_size=2, **changes).parts


def test_dora_reads_every_unpacked_weight_once_more_for_its_norms():
    """2 bytes; a magnitude needs the output of down_proj, which LoRA does not make again."""
    lora, dora = (parts_of(adapter=a) for a in ("lora", "dora"))
    weights, down = 6_979_321_856, 32 * 4096 * 14336
    read = weights * 2 / (H100.reached_bandwidth_gb_s * 1e9)
    assert dora["dequantization"] - lora["dequantization"] == pytest.approx(read)
    products = 2 * 8192 * 2 * down / (H100.reached_tflops * 1e12 * constants.MATMUL_SHARE)
    again = dora["recompute"] - lora["recompute"]
    assert read + products < again < 1.5 * (read + products)
    assert dora["activations"] > lora["activations"] and dora["linears"] == lora["linears"]


def test_norms_that_are_kept_with_their_products_are_not_made_again():
    lora, dora = (parts_of(adapter=a, activation_policy="keep_linears") for a in ("lora", "dora"))
    more = dora["activations"] - lora["activations"]
    assert 0 < dora["recompute"] - lora["recompute"] < more


def test_dora_multiplies_every_weight_twice_under_dropout():
    without, dropping = (parts_of(adapter="dora", lora_dropout=p) for p in (0.0, 0.1))
    head = 4 * 128256 * 4096 / (4 * 6_979_321_856)
    assert dropping["linears"] == pytest.approx((2 + head) / (1 + head) * without["linears"])
    assert dropping["dequantization"] > 1.4 * without["dequantization"]
    assert dropping["recompute"] > 1.6 * without["recompute"]


def test_each_tile_more_dequantizes_an_mlp_once_more_in_each_pass():
    """Forward and backward all of it, the recomputation gate and up: 8 of 9 passes over its weights."""
    one, two, four = (step_seconds(LLAMA_8B, H100, PRODUCT, mlp_tiles=n) for n in (1, 2, 4))
    weights = 32 * 3 * 4096 * 14336
    least = weights * 8 / 3 * 2.5 / (H100.reached_bandwidth_gb_s * 1e9)  # at the rate of a copy
    assert least < two.total - one.total < 4 * least
    assert four.total - one.total == pytest.approx(3 * (two.total - one.total))


def test_blocks_wait_for_copies_of_inputs_and_outputs_that_take_longer():
    """Over a link that carries next to nothing: 31 inputs and outputs each way, of 32 blocks."""
    slow = replace(H100, pcie_gen=3, pcie_lanes=1, measured_host_gb_s=0.001)
    plan = PRODUCT.change(activation_policy="keep_attention", activation_offload=True)
    one = PRODUCT.batch.tokens * 4096 * 2 / 1e6
    waits = [
        step_seconds(LLAMA_8B, slow, plan, attention_offload=moves).parts["offload"]
        for moves in (False, True)
    ]
    assert waits[1] - waits[0] == pytest.approx(2 * 31 * one)


def test_an_offloaded_vocabulary_passes_the_link_twice_also_under_ddp():
    """The embedding is looked through in pieces, and the head is fetched for the loss."""
    plan = PRODUCT.change(world_size=2, vocabulary_offload=True)
    table = 128256 * 4096 * 2
    assert step_seconds(LLAMA_8B, H100, plan).parts["offload"] == pytest.approx(
        2 * table / (H100.host_gb_s * 1e9)
    )
    assert step_seconds(LLAMA_8B, H100, PRODUCT, world_size=2).parts["offload"] == 0


def test_a_measured_rate_of_unpacking_replaces_the_usual_share():
    usual = H100.reached_bandwidth_gb_s * constants.UNPACK_SHARE
    slow = replace(H100, measured_unpack_gb_s=usual / 3)
    plain, thrice = (
        step_seconds(LLAMA_8B, g, PRODUCT).parts["dequantization"] for g in (H100, slow)
    )
    assert thrice == pytest.approx(3 * plain)


def test_the_host_holds_up_small_steps_only_as_far_as_the_gpu_is_not_busy():
    """Launches count beyond products and gathers together, not on top of either."""
    plan = PRODUCT.change(world_size=4, strategy="full_shard", context_length=2048)
    parts = step_seconds(LLAMA_8B, H100, plan).parts
    waits = parts["launches"] - constants.STEP_SECONDS
    assert waits > 0
    assert sum(parts.values()) - parts["optimizer"] - constants.STEP_SECONDS == pytest.approx(
        launch_seconds(LLAMA_8B, plan), rel=0.01
    )


def test_a_compiled_block_is_launched_again_for_a_third_of_a_forward_and_backward():
    """Its recomputation is a part of its backward's graph; eager, hooks of checkpointing come too."""
    short = PRODUCT.change(context_length=512)

    def again(**changes):
        kept, whole = (
            launch_seconds(LLAMA_8B, short.change(activation_policy=p, **changes))
            for p in ("keep_all", "recompute_all")
        )
        return whole / kept

    assert again(compile=True) == pytest.approx(4 / 3) and again(compile=False) > 1.8


def test_replayed_micro_batches_wait_for_no_launch_and_their_gradients_stay():
    """Where a model can't be captured, nothing changes."""
    short = PRODUCT.change(context_length=512, cuda_graphs=True)
    launched, replayed = (
        step_seconds(LLAMA_8B, H100, short, cuda_graphs=g).parts for g in (False, True)
    )
    assert launched["launches"] > 0.15 and replayed["launches"] == constants.STEP_SECONDS
    more = (
        memory(LLAMA_8B, short).moments["loss"]
        - memory(LLAMA_8B, short, cuda_graphs=False).moments["loss"]
    )
    assert more == pytest.approx(4 * LLAMA_8B.lora_params(64) / GIB)
    for name in ("gemma-2-9b", "qwen3.5-9b"):  # windows, a state
        shape = model_shape(name)
        assert step_seconds(shape, H100, short) == step_seconds(
            shape, H100, short, cuda_graphs=False
        )
    mixture = model_shape("mixtral-8x7b-v0.1")
    assert short.replays(mixture)
    narrow = replace(
        mixture, intermediate=mixture.intermediate + 4
    )  # which the kernel does not take
    assert not short.replays(narrow)
    settings = RunConfig(sharding_strategy="ddp", batch_size=4, context_length=2048)

    def replays(world_size=1, **changes):
        return draft_plan(replace(settings, **changes), world_size).replays(LLAMA_8B)

    assert replays() and replays(4) and not replays(context_length=4096)
    assert replays(2, sharding_strategy="full_shard") and not replays(cuda_graphs=False)


def test_small_tensors_are_updated_together_and_large_ones_alone():
    """8-bit AdamW of adapters takes some updates, not 448; whole weights fill one each."""

    def seconds(**changes):
        plan = PRODUCT.change(optimizer="adamw_8bit", **changes)
        return step_seconds(LLAMA_8B, H100, plan).parts["optimizer"]

    adapters = 64 * 32 * (4 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert seconds() == pytest.approx((1 + adapters / 2**24) * constants.OPTIMIZER_LAUNCH)
    tensors = 32 * 9 + 3
    assert seconds(adapter="none", quant="none") == pytest.approx(
        tensors * constants.OPTIMIZER_LAUNCH
    )


@pytest.mark.parametrize("ranks, node_gpus", [(8, 8), (4, 8), (16, 8), (128, 8), (6, 1), (12, 4)])
def test_a_ring_is_slower_by_each_hop_that_one_machine_has_not(ranks, node_gpus):
    links = ["network" if (i + 1) % node_gpus == 0 else "nvlink" for i in range(ranks - 1)]
    more = links[min(ranks, node_gpus) - 1 :]
    expected = more.count("network") * NETWORK_HOP + more.count("nvlink") * NVLINK_HOP
    assert hops_seconds(ranks, node_gpus) == pytest.approx(expected)


def test_the_hops_of_a_ring_over_machines_count_in_a_step(monkeypatch):
    def communication(strategy, world_size):
        plan = PRODUCT.change(strategy=strategy, gpus_per_node=8, world_size=world_size)
        return step_seconds(LLAMA_8B, H100, plan, internode_gb_s=3).parts["communication"]

    strategies = ("full_shard", "hybrid_full_shard", "ddp")
    before = {(s, n): communication(s, n) for s in strategies for n in (8, 64)}
    monkeypatch.setattr(constants, "NETWORK_HOP", 1e-3)
    for (strategy, world_size), seconds in before.items():
        assert (communication(strategy, world_size) > seconds) == (world_size == 64), strategy
