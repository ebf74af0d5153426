"""The peak of a step against closed forms, FSDP2 itself, and figures measured on H100s."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fsdp_qlora.estimate import GIB, block_weights, gathered, memory
from fsdp_qlora.estimate.activations import _attention_working, widest_in_backward
from fsdp_qlora.plan import Plan

from .estimates import LLAMA_8B, LLAMA_70B, PRODUCT, TRIAL, TRIAL_HALF
from .families import save_family
from .ranks import run_ranks


def test_quantized_weights_by_hand():
    """4 bits and a 32-bit scale per 64 weights: 4.5 bits."""
    parts = memory(LLAMA_70B, world_size=4).parts
    linears = 80 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 28672 * 8192)
    assert parts["linears"] == pytest.approx(linears / 2 / 4 / GIB)
    assert parts["absmax"] == pytest.approx(linears / 16 / 4 / GIB)
    assert parts["optimizer"] == pytest.approx(2 * parts["adapters"])


def test_ddp_keeps_everything_whole():
    ddp = memory(LLAMA_8B, world_size=4, strategy="ddp").parts
    one = memory(LLAMA_8B, world_size=1).parts
    assert ddp["linears"] == one["linears"] and ddp["unsharded"] == 0


def test_window_is_two_units_where_blocks_are_freed():
    """The root holds norms alone: a frozen embedding and head are no part of it."""
    plan = Plan().change(world_size=2, micro_batch_size=4, context_length=2048)
    block = gathered(block_weights(LLAMA_70B, plan), plan)
    full = memory(LLAMA_70B, plan).parts["unsharded"] * GIB
    assert full == pytest.approx(2 * block, rel=0.001)
    kept = memory(LLAMA_70B, plan, strategy="shard_grad_op").parts["unsharded"] * GIB
    assert kept == pytest.approx(80 * block, rel=0.02)
    assert memory(LLAMA_70B, plan, backward_prefetch="none").parts["unsharded"] * GIB == (
        pytest.approx(block, rel=0.001)
    )
    apart = memory(LLAMA_70B, plan, wrap_policy="attention_mlp").parts["unsharded"] * GIB
    assert apart == pytest.approx(block, rel=0.001)


def test_each_rung_of_the_escalation_takes_less_memory():
    steps = [
        dict(strategy="ddp", activation_policy="keep_all"),
        dict(strategy="ddp"),
        dict(strategy="full_shard"),
        dict(strategy="full_shard", cpu_offload=True),
    ]
    totals = [
        memory(LLAMA_8B, world_size=4, micro_batch_size=4, context_length=2048, **s).total
        for s in steps
    ]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


def test_shard_grad_op_holds_shards_and_whole_blocks_at_once():
    """With frozen weights it can need more than ddp, which has no gradients of them to shard."""
    plan = Plan().change(world_size=2, micro_batch_size=4, context_length=2048)
    ddp, grad_op = (memory(LLAMA_8B, plan, strategy=s) for s in ("ddp", "shard_grad_op"))
    assert grad_op.peak_allocated > ddp.peak_allocated
    full = (plan.change(quant="none", adapter="none", strategy=s) for s in ("ddp", "shard_grad_op"))
    ddp, grad_op = (memory(LLAMA_8B, s) for s in full)
    assert grad_op.peak_allocated < ddp.peak_allocated


def test_cpu_offload_moves_frozen_shards_to_the_host():
    plan = Plan().change(world_size=2, micro_batch_size=2, context_length=2048)
    on, off = memory(LLAMA_70B, plan, cpu_offload=True), memory(LLAMA_70B, plan)
    assert on.parts["linears"] == on.parts["absmax"] == 0
    assert (
        on.parts["optimizer"] == off.parts["optimizer"]
    )  # trained weights stay where there is room
    assert on.host > 2 * off.parts["linears"] + off.host


def test_one_gpu_that_streams_has_two_blocks_in_backward_but_for_the_first():
    """The one that computes and the frozen weights of the one before; FSDP's next unit is gathered."""
    plan = Plan().change(cpu_offload=True, trained_offload=True, lora_dropout=0.0, compile=True)
    found = memory(LLAMA_70B, plan).moments
    frozen = 855_638_016 * (0.5 + 4 / 64) / GIB
    assert found["last block but one"] - found["first block"] > 0.9 * frozen


def test_a_vocabulary_on_the_host_leaves_the_head_on_the_gpu_for_the_loss_alone():
    plan = Plan().change(world_size=2, strategy="ddp", micro_batch_size=2, context_length=2048)
    table = 128256 * 4096 * 2 / GIB
    on, off = memory(LLAMA_8B, plan), memory(LLAMA_8B, plan, vocabulary_offload=True)
    assert on.parts["head"] == pytest.approx(table) and off.parts["head"] == 0
    assert off.moments["loss"] == pytest.approx(on.moments["loss"] - table)
    assert off.host == pytest.approx(on.host + 2 * 2 * table)


def test_tiles_leave_one_part_of_what_is_as_wide_as_the_mlp():
    """8B, 2 x 8192 tokens: gate, up, their product and its gradient, 0.44 GiB each."""
    plan = PRODUCT.change(micro_batch_size=2, activation_offload=True, vocabulary_offload=True)
    peaks = [memory(LLAMA_8B, plan, mlp_tiles=n).moments["first block"] for n in (1, 2, 3)]
    wide, hidden = 16384 * 14336 * 2 / GIB, 16384 * 4096 * 2 / GIB
    assert peaks[0] - peaks[1] == pytest.approx(4 * wide / 2 - hidden)
    assert peaks[1] - peaks[2] == pytest.approx(4 * wide / 6)
    kept = plan.change(activation_policy="keep_linears")
    assert memory(LLAMA_8B, kept, mlp_tiles=4) == memory(LLAMA_8B, kept)


def test_after_many_tiles_attention_is_what_takes_most():
    """Block input, norm, q, output, their gradients and dy, the residual's: 9 with k and v; dQ in fp32
    is 2 more, and dK and dV of all heads 2 where heads share keys. What is of rank R comes on top."""
    plan = PRODUCT.change(context_length=32768, mlp_tiles=64)
    hidden, ranks = 32768 * 4096 * 2, 32768 * 7 * 64 * 2
    saved, work = widest_in_backward(LLAMA_8B, plan, "recompute_all")
    assert saved + work == pytest.approx(13 * hidden + ranks, rel=0.005)
    own_keys = replace(LLAMA_8B, kv_heads=32)  # k, v, dk and dv are wider by 0.75 each
    assert sum(widest_in_backward(own_keys, plan, "recompute_all")) == pytest.approx(
        (13 + 3 - 2) * hidden + ranks, rel=0.005
    )


def test_attention_in_tiles_leaves_one_part_of_what_its_backward_sums():
    """Of the 4 that it sums; and of outputs and gradients of q, which come as the others go."""
    plan = PRODUCT.change(context_length=32768, mlp_tiles=64)
    hidden = 32768 * 4096 * 2

    def attention(plan: Plan, tiles: int) -> float:
        return _attention_working(LLAMA_8B, plan.change(attention_tiles=tiles), "recompute_all")

    whole = attention(plan, 1)
    for tiles in (2, 4, 8):
        assert whole - attention(plan, tiles) == pytest.approx(5 * hidden * (1 - 1 / tiles))
    # Of four ranks each has two key-value heads, so no more tiles; of eight, one.
    four, eight = (
        plan.change(world_size=n, ranks_per_row=n, context_length=n * 32768, compile=True)
        for n in (4, 8)
    )
    assert attention(four, 8) == attention(four, 2) < attention(four, 1)
    assert attention(eight, 8) == attention(eight, 1) == attention(plan.change(compile=True), 1)
    # Attention's output is held in tiles and joined where the MLP is at work, which is the peak now.
    peaks = [memory(LLAMA_8B, plan, attention_tiles=n).peak_allocated * GIB for n in (1, 8)]
    assert 2.3 * hidden < peaks[0] - peaks[1] < 3 * hidden


def test_ranks_that_share_rows_hold_repeated_keys_and_values_in_attention():
    """16 ranks, and 8 key-value heads of 128: each twice; and for 64, two circles of 32 gather them."""
    plan = PRODUCT.change(mlp_tiles=64, compile=True)
    each = 8192 * 2 * 128  # bytes of a head

    def attention(ranks: int) -> float:
        shared = plan.change(world_size=ranks, ranks_per_row=ranks, context_length=ranks * 8192)
        return _attention_working(LLAMA_8B, shared, "recompute_all")

    alone = _attention_working(LLAMA_8B, plan.change(context_length=8192), "recompute_all")
    assert attention(8) == alone
    assert attention(16) - alone == pytest.approx(4 * (16 - 8) * each)
    assert attention(64) - alone == pytest.approx(4 * (2 * 32 - 8) * each)


def test_an_update_of_8_bit_states_is_a_moment_of_its_own():
    """What it joins of 2^24 values: 4 bytes of weight and of gradient, 8 of states, 16 of places."""
    plan = Plan().change(world_size=2, context_length=512, optimizer="adamw_8bit")
    found, plain = memory(LLAMA_8B, plan), memory(LLAMA_8B, plan, optimizer="adamw")
    reduced = found.moments["gradients reduced"]
    assert found.moments["optimizer's update"] - reduced == pytest.approx(32 * 2**24 / GIB)
    assert plain.moments["optimizer's update"] == plain.moments["gradients reduced"]
    block = max(at for name, at in found.moments.items() if name != "optimizer's update")
    assert found.peak_reserved - block == pytest.approx(plain.parts["slack"] + 0.5, abs=0.01)


def test_weights_gathered_once_stay_whole_as_under_shard_grad_op():
    plan = Plan().change(world_size=4, micro_batch_size=2, context_length=2048, accumulation=4)
    once, kept = (
        memory(LLAMA_8B, plan, **c)
        for c in (dict(gather_once=True), dict(strategy="shard_grad_op"))
    )
    assert once.peak_allocated >= kept.peak_allocated > memory(LLAMA_8B, plan).peak_allocated
    blocks = 32 * gathered(block_weights(LLAMA_8B, plan), plan) / GIB
    assert once.moments["first block"] > kept.moments["first block"] + 0.9 * blocks


def test_slack_follows_what_comes_and_goes_and_what_stays_between():
    def slack(**changes):
        return memory(LLAMA_8B, PRODUCT, **changes).parts["slack"]

    assert slack(micro_batch_size=4) > 1.5 * slack()
    assert slack(activation_offload=True) < slack() < slack(activation_policy="keep_all")
    kept = dict(activation_policy="keep_attention", activation_offload=True)
    assert slack(**kept, attention_offload=True) == slack()  # log-sum-exps lie between
    assert slack() < slack(**kept)
    gathered = memory(LLAMA_70B, world_size=2, micro_batch_size=2, context_length=2048).parts
    assert (
        gathered["slack"]
        > memory(
            LLAMA_70B, world_size=2, strategy="ddp", micro_batch_size=2, context_length=2048
        ).parts["slack"]
        + 0.5 * gathered["unsharded"]
    )


def test_hybrid_shards_within_a_group_only():
    hybrid = memory(LLAMA_8B, world_size=8, gpus_per_node=4, strategy="hybrid_full_shard").parts
    assert hybrid["linears"] == memory(LLAMA_8B, world_size=4).parts["linears"]
    groups = Plan().change(world_size=8, strategy="hybrid_full_shard", shard_group_size=2)
    assert groups.sharding.shard_ranks == 2
    assert groups.change(shard_group_size=-1).sharding.shard_ranks == 4


def test_gradients_wait_for_the_step_only_with_accumulation():
    keep = Plan().change(activation_policy="keep_all", micro_batch_size=8, context_length=2048)
    assert memory(LLAMA_8B, keep).parts["gradients"] == 0  # the peak is in the loss
    waiting = memory(LLAMA_8B, keep, accumulation=2).parts
    assert waiting["gradients"] == pytest.approx(waiting["adapters"])
    sharded = keep.change(world_size=2, accumulation=2)
    whole = memory(LLAMA_8B, sharded, no_sync=True).parts["gradients"]
    assert whole == pytest.approx(2 * memory(LLAMA_8B, sharded).parts["gradients"])


def test_full_training_needs_gradients_and_states_of_every_weight():
    parts = memory(LLAMA_8B, quant="none", adapter="none").parts
    assert parts["optimizer"] == pytest.approx(2 * LLAMA_8B.total_params() * 2 / GIB)
    assert parts["adapters"] == parts["absmax"] == 0


@pytest.mark.parametrize(
    "shape,changes,measured,within",
    [
        (LLAMA_8B, {}, 13.3, 0.03),
        (LLAMA_8B, dict(activation_policy="keep_all"), 76.5, 0.03),
        (LLAMA_8B, TRIAL_HALF, 44.4, 0.03),
        (LLAMA_8B, dict(activation_policy="keep_all", world_size=2), 74.8, 0.03),
        (LLAMA_70B, dict(micro_batch_size=8, context_length=2048, world_size=4), 41.8, 0.15),
        (
            LLAMA_70B.cut(16),
            dict(micro_batch_size=4, context_length=2048, world_size=2, cpu_offload=True),
            7.0,
            0.10,
        ),
    ],
)
def test_peak_memory_is_near_what_the_trial_measured(shape, changes, measured, within):
    assert memory(shape, TRIAL, **changes).peak_allocated == pytest.approx(measured, rel=within)


@pytest.mark.parametrize(
    "changes,measured",
    [
        (dict(micro_batch_size=2), 14.28),
        (dict(micro_batch_size=2, compile=False), 15.42),
        (dict(micro_batch_size=2, activation_policy="keep_attention"), 17.89),
        (dict(micro_batch_size=2, activation_policy="keep_linears"), 55.14),
        (dict(activation_policy="keep_all"), 42.76),
        (dict(activation_policy="keep_linears"), 31.59),
        (dict(activation_policy="keep_linears", quant="none"), 40.93),
    ],
)
def test_peak_memory_is_near_what_one_h100_measured(changes, measured):
    assert memory(LLAMA_8B, PRODUCT, **changes).peak_allocated == pytest.approx(measured, rel=0.02)


def test_peak_memory_is_near_what_two_h100s_measured():
    """Rows of sharded strategies were measured while FSDP still gathered embedding and head."""
    compiled, eager = 9.44, 9.55
    plan = PRODUCT.change(world_size=2, micro_batch_size=2, context_length=2048, strategy="ddp")
    found = [memory(LLAMA_8B, plan, compile=c).peak_allocated for c in (True, False)]
    assert found == pytest.approx([compiled, eager], rel=0.02)


def test_full_training_peaks_where_the_heads_gradient_is_made_or_reduced():
    """8B on two H200s: 35.37 GiB; 42.10 where a graph's gradients stay. A table is 0.98 GiB in bf16.

    While the root is reduced: the head's gradient sent in fp32, this rank's half of it in fp32 and in bf16,
    and the whole one in bf16; the embedding and its gradient; and half of the blocks' gradients.
    """
    plan = Plan().change(
        world_size=2, adapter="none", quant="none", micro_batch_size=1, context_length=2048,
        activation_policy="keep_linears", compile=True, attention="fa4",
    )  # fmt: skip
    found = memory(LLAMA_8B, plan)
    table, blocks = 128256 * 4096 * 2 / GIB, 32 * sum(LLAMA_8B.block_params().values()) * 2 / GIB
    assert found.moment == "root's gradients reduced"
    assert found.parts["gradients"] == pytest.approx(blocks / 2 + 5.5 * table, rel=1e-4)
    assert found.parts["unsharded"] == pytest.approx(table)
    assert found.peak_allocated == pytest.approx(35.37, rel=0.005)
    stay = memory(LLAMA_8B, plan, cuda_graphs=True)
    assert stay.moment == "loss backward" and stay.peak_allocated == pytest.approx(42.10, rel=0.005)
    assert stay.parts["loss"] == pytest.approx(5 * table, rel=0.01)


def test_of_large_tables_only_the_head_is_whole_and_only_for_the_loss():
    """Each is 128256 x 4096 in bf16, 0.98 GiB; FSDP would hold both, and buffers as large."""
    found = memory(LLAMA_8B, PRODUCT, world_size=2, context_length=2048, strategy="full_shard")
    table = 128256 * 4096 * 2 / GIB
    assert found.moment == "loss"
    whole = sum(found.parts[part] for part in ("unsharded", "embedding", "head"))
    assert table < whole < 3.2 * table


def flat_buffers_alive() -> list[int]:
    """How many units' flat buffers exist at each copy out of one, in a step of four units."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    buffers, counts, copy_out = [], [], group.foreach_all_gather_copy_out

    def counted(result, *args):
        buffers.append(weakref.ref(result.all_gather_output.untyped_storage()))
        copy_out(result, *args)
        counts.append(sum(ref() is not None for ref in buffers))

    group.foreach_all_gather_copy_out = counted
    model(torch.ones(2, 8)).sum().backward()
    return counts


def test_fsdp_holds_two_flat_buffers_while_it_gathers_in_the_forward():
    for counts in run_ranks(flat_buffers_alive, 2):
        assert counts[:4] == [1, 2, 2, 2]


def test_modules_trained_whole_are_counted_by_hand():
    """A head in fp32 with its gradient and two AdamW states, on each rank a half; beside that the
    copy in bf16 that the loss multiplies with."""
    plain, head = (memory(LLAMA_8B, world_size=2, whole_modules=m) for m in ((), ("lm_head",)))
    values = 128256 * 4096 / 2
    assert head.parts["head"] == pytest.approx(4 * values / GIB)
    assert head.parts["optimizer"] - plain.parts["optimizer"] == pytest.approx(8 * values / GIB)
    assert head.moments["loss"] > plain.moments["loss"] + 14 * values / GIB
    norms = memory(LLAMA_8B, whole_modules=("norm",)).parts
    assert norms["norms"] == pytest.approx((65 * 4096) * 4 / GIB)
    assert norms["optimizer"] - plain.parts["optimizer"] == pytest.approx(
        2 * norms["norms"] + memory(LLAMA_8B).parts["optimizer"] / 2, rel=1e-6
    )


def test_blocks_that_are_not_adapted_have_no_adapters_or_states():
    parts, half = (memory(LLAMA_8B, blocks_adapted=n).parts for n in (None, 16))
    for name in ("adapters", "optimizer"):
        assert half[name] == pytest.approx(parts[name] / 2)


def test_what_adapters_began_as_is_kept_on_the_host():
    plain, began = (memory(LLAMA_8B, lora_rank=64, changes_base=c) for c in (False, True))
    assert began.host - plain.host == pytest.approx(plain.parts["adapters"])
    assert began.parts == plain.parts


def test_inputs_that_wait_on_the_host_are_off_the_gpu_but_for_those_in_flight():
    """Of 31 that move (the last stays), two are back at most; the host has a slot for each."""
    plan = PRODUCT.change(micro_batch_size=2)
    one = 2 * 8192 * 4096 * 2 / GIB
    kept, moved = (memory(LLAMA_8B, plan, activation_offload=o) for o in (False, True))
    assert kept.moments["last block"] - moved.moments["last block"] == pytest.approx(31 * one)
    back = "last block but one"
    assert kept.moments[back] - moved.moments[back] == pytest.approx(29 * one)
    assert moved.host - kept.host == pytest.approx(31 * one)
    assert moved.peak_allocated < kept.peak_allocated
    whole = plan.change(activation_policy="keep_all:8,recompute_all:24")
    saved = [memory(LLAMA_8B, whole, activation_offload=o).moments["loss"] for o in (False, True)]
    assert saved[0] - saved[1] == pytest.approx(23 * one)


def test_outputs_that_wait_on_the_host_leave_a_block_later_than_inputs():
    """Of 31 that move, one is still leaving beside the last block, and two are back in a block's backward."""
    plan = PRODUCT.change(
        micro_batch_size=2, activation_policy="keep_attention", activation_offload=True
    )
    one = 2 * 8192 * 4096 * 2 / GIB
    stay, moved = (memory(LLAMA_8B, plan, attention_offload=o) for o in (False, True))
    fewer = {
        "last block gathered": 30,
        "loss": 31,
        "last block": 31,
        "last block but one": 29,
        "second block": 0,
        "first block": 0,
    }
    found = {name: stay.moments[name] - moved.moments[name] for name in fewer}
    assert found == pytest.approx({name: n * one for name, n in fewer.items()})
    assert moved.host - stay.host == pytest.approx(31 * one)
    mixed = plan.change(activation_policy="keep_linears:8,keep_attention:20,recompute_all:4")
    stay, moved = (memory(LLAMA_8B, mixed, attention_offload=o) for o in (False, True))
    assert moved.host - stay.host == pytest.approx(20 * one)
    assert stay.moments["loss"] - moved.moments["loss"] == pytest.approx(20 * one)


def test_chosen_modules_alone_have_gradients_and_states():
    whole = dict(adapter="none", quant="none", strategy="ddp")
    every = memory(LLAMA_8B, **whole)
    block = sum(LLAMA_8B.block_params().values())
    for names, weights in [
        (("layers.30", "model.layers.31", "lm_head"), 2 * block + 128256 * 4096),
        (("mlp.down_proj",), 32 * 4096 * 14336),
        (("layers.3.self_attn",), 2 * 4096 * (4096 + 1024)),
        (("self_attn", "mlp"), LLAMA_8B.params()["linears"]),
    ]:
        some = memory(LLAMA_8B, **whole, only_modules=names)
        assert some.parts["optimizer"] == pytest.approx(2 * 2 * weights / GIB, rel=1e-3)
        assert some.peak_allocated < every.peak_allocated
    assert memory(LLAMA_8B, **whole, only_modules=("no_such",)).parts == every.parts


def products_of_backward(model: str, adapted: str | None) -> list[str]:
    """The experts' products in the graph of a recomputed block's backward, in their order."""
    from functools import partial

    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from fsdp_qlora.build import build_model
    from fsdp_qlora.config.flags import parse

    graphs, compile_with = [], torch.compile

    def run(graph, inputs):
        return make_boxed_func(graph.forward)

    def keep(graph, inputs):
        graphs.append(graph)
        return run(graph, inputs)

    backend = partial(
        aot_module_simplified,
        fw_compiler=run,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile = lambda f, options=None, **more: compile_with(f, backend=backend, **more)
    argv = ["--model_name", model, "--random_weights", "--dataset", "-", "--device", "cpu"]
    argv += ["--compile", "true", "--activation_policy", "recompute_all", "--lora_rank", "2"]
    argv += ["--lora_target_parameters", adapted] if adapted else []
    (config,) = parse(argv)
    built = build_model(config, torch.device("cpu")).train()
    ids = torch.zeros(1, 32, dtype=torch.int64)
    built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    known = (
        "grouped_linear",
        "adapted_experts",
        "grouped_linear_backward",
        "adapted_experts_backward",
    )
    found = [
        [str(n.target).split(".")[1] for n in g.graph.nodes if "." in str(n.target)] for g in graphs
    ]
    (block,) = filter(None, ([name for name in names if name in known] for names in found))
    return block


def test_a_recomputed_block_runs_the_first_product_again_between_the_backwards_of_both(tmp_path):
    """Which the estimate has as a moment of its own; not where an adapter of down_proj asks for its input."""
    model = save_family(tmp_path, "Qwen3-MoE")
    frozen, adapted = (
        run_ranks(products_of_backward, 1, model, names)[0] for names in (None, "experts")
    )
    assert frozen == ["grouped_linear_backward", "grouped_linear", "grouped_linear_backward"]
    assert adapted == ["adapted_experts", "adapted_experts_backward", "adapted_experts_backward"]
