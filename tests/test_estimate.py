"""Estimates against closed forms, traces of real blocks, and figures measured on H100s."""
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.adapters import apply_adapters, lora_config, trainable_parameters
from fsdp_qlora.arch import known_config, model_shape, shape_from_config
from fsdp_qlora.blocks import base_model, decoder_blocks
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import (
    GIB,
    Setup,
    block_weights,
    check_context,
    flops_per_token,
    gathered,
    memory,
    model_flops_per_token,
    model_tflops,
    optimizer_bytes,
    resident_bytes,
    run_cost,
    saved_by_block,
    setup_from_config,
    step_seconds,
)
from fsdp_qlora.hardware import find_gpu
from fsdp_qlora.loading import materialize
from fsdp_qlora.quantize import quantize_linears

LLAMA_8B, LLAMA_70B = model_shape("meta-llama/Llama-3.1-8B"), model_shape("llama-2-70b")
H100 = find_gpu("h100")
TINY = dict(vocab_size=97, hidden_size=128, intermediate_size=448, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=2, head_dim=32)
# The trial's runs: bf16 adapters, no dropout, compiled blocks.
TRIAL = Setup(lora_dropout=0.0, adapter_dtype="bf16", compile=True, batch_size=2,
              context_length=8192)


def tiny(known: str, setup: Setup):
    """A small model of a known one's family, transformed as `setup` says, and its shape."""
    config = known_config(known) | TINY
    if config["model_type"] == "phi3": config["head_dim"] = 16  # transformers ignores head_dim
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config, pad_token_id=0, use_cache=False), dtype=torch.bfloat16,
        attn_implementation=setup.attention)
    if setup.quant != "none": quantize_linears(model, setup.quant)
    if setup.adapter == "lora":
        targets = list(setup.targets) if isinstance(setup.targets, tuple) else setup.targets
        model = apply_adapters(model, lora_config(
            rank=setup.lora_rank, dropout=setup.lora_dropout, target_modules=targets))
    materialize(model, torch.device("cpu"), torch.device("cpu"))  # PEFT left adapters on meta
    if setup.compile:
        for block in decoder_blocks(model):
            block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    return model.train(), shape_from_config(config)


def traced_block_bytes(model, setup: Setup) -> int:
    """Bytes of the distinct storages, parameters apart, that the second block's forward saves."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    inside, seen = [False], {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen.setdefault(storage.data_ptr(), (inside[0], storage.nbytes(), tensor))
        return tensor

    block = decoder_blocks(model)[1]
    block.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
    block.register_forward_hook(lambda *_: inside.__setitem__(0, False))
    rows = torch.randint(0, 97, (setup.batch_size, setup.context_length))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        base_model(model).model(input_ids=rows)
    return sum(size for in_block, size, _ in seen.values() if in_block)


SMALL = Setup(batch_size=2, context_length=64, lora_rank=8, lora_dropout=0.0)


@pytest.mark.parametrize("known,changes", [
    ("llama-2-7b", {}), ("llama-2-7b", dict(lora_dropout=0.1)),
    ("llama-2-7b", dict(targets=("q_proj", "v_proj"))), ("llama-2-7b", dict(quant="none")),
    ("llama-2-7b", dict(targets=("down_proj",), lora_dropout=0.5)),
    ("llama-2-7b", dict(attention="eager")), ("qwen2.5-7b", {}), ("qwen3-8b", {}),
    ("gemma-7b", {}), ("phi-3-mini-4k", {}), ("llama-2-7b", dict(quant="none", adapter="none")),
    ("llama-2-7b", dict(compile=True)), ("qwen3-8b", dict(compile=True, lora_dropout=0.1)),
])
def test_saved_activations_are_those_that_autograd_saves(known, changes):
    setup = replace(SMALL, **changes)
    model, shape = tiny(known, setup)
    traced = traced_block_bytes(model, setup)
    assert saved_by_block(shape, setup) == pytest.approx(traced, rel=0.01)


@pytest.mark.parametrize("known,changes", [
    ("llama-2-7b", {}), ("qwen2.5-0.5b", dict(quant="fp4")), ("qwen3-8b", dict(quant="none")),
    ("phi-3-mini-4k", {}), ("llama-2-7b", dict(targets=("q_proj", "lm_head")))])
def test_stored_weights_are_those_of_the_built_model(known, changes):
    setup = replace(SMALL, **changes)
    model, shape = tiny(known, setup)
    built = sum(p.nbytes for p in model.parameters())
    assert sum(resident_bytes(shape, setup).values()) == built
    trained = sum(p.nbytes for p in trainable_parameters(model).values())
    assert resident_bytes(shape, setup)["adapters"] == trained
    assert optimizer_bytes(shape, setup) == 2 * trained


def test_shards_add_up_and_are_padded_to_whole_rows():
    whole, half = (resident_bytes(LLAMA_8B, Setup(world_size=n)) for n in (1, 2))
    assert half == {part: size / 2 for part, size in whole.items()}
    odd = resident_bytes(LLAMA_8B.cut(1), Setup(world_size=3, quant="none"))
    assert odd["head"] == 128256 / 3 * 4096 * 2
    assert odd["linears"] > LLAMA_8B.block_params()["linears"] * 2 / 3


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


def test_window_is_two_units_and_the_root_where_blocks_are_freed():
    setup = Setup(world_size=2, batch_size=4, context_length=2048)
    block, root = gathered(block_weights(LLAMA_70B, setup), setup), 32000 * 8192 * 2
    full = memory(LLAMA_70B, setup).parts["unsharded"] * GIB
    assert full == pytest.approx(2 * block + root, rel=0.001)
    kept = memory(LLAMA_70B, setup, strategy="shard_grad_op").parts["unsharded"] * GIB
    assert kept == pytest.approx(80 * block + 2 * root, rel=0.02)
    assert memory(LLAMA_70B, setup, backward_prefetch=False).parts["unsharded"] * GIB == (
        pytest.approx(block + root, rel=0.001))
    apart = memory(LLAMA_70B, setup, wrap_policy="attention_mlp").parts["unsharded"] * GIB
    assert apart == pytest.approx(block + root, rel=0.001)


def test_each_rung_of_the_escalation_takes_less_memory():
    steps = [dict(strategy="ddp", activation_policy="keep_all"), dict(strategy="ddp"),
             dict(strategy="full_shard"), dict(strategy="full_shard", cpu_offload=True)]
    totals = [memory(LLAMA_8B, world_size=4, batch_size=4, context_length=2048, **s).total
              for s in steps]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


def test_shard_grad_op_holds_shards_and_whole_blocks_at_once():
    """With frozen weights it can need more than ddp, which has no gradients of them to shard."""
    setup = Setup(world_size=2, batch_size=4, context_length=2048)
    ddp, grad_op = (memory(LLAMA_8B, setup, strategy=s) for s in ("ddp", "shard_grad_op"))
    assert grad_op.peak_allocated > ddp.peak_allocated
    full = (replace(setup, quant="none", adapter="none", strategy=s)
            for s in ("ddp", "shard_grad_op"))
    ddp, grad_op = (memory(LLAMA_8B, s) for s in full)
    assert grad_op.peak_allocated < ddp.peak_allocated


def test_cpu_offload_moves_shards_gradients_and_states_to_the_host():
    setup = Setup(world_size=2, batch_size=2, context_length=2048)
    on, off = memory(LLAMA_70B, setup, cpu_offload=True), memory(LLAMA_70B, setup)
    assert on.parts["linears"] == on.parts["optimizer"] == 0
    assert on.host_parts["weights"] == pytest.approx(
        2 * sum(off.parts[p] for p in ("linears", "absmax", "embedding", "head", "norms",
                                       "adapters")))
    assert on.host > 2 * off.parts["linears"] + off.host


def test_hybrid_shards_within_a_group_only():
    hybrid = memory(LLAMA_8B, world_size=8, gpus_per_node=4, strategy="hybrid_full_shard").parts
    assert hybrid["linears"] == memory(LLAMA_8B, world_size=4).parts["linears"]
    groups = Setup(world_size=8, strategy="hybrid_full_shard", shard_group_size=2)
    assert groups.shard_ranks == 2 and replace(groups, shard_group_size=-1).shard_ranks == 4


def test_recomputing_some_blocks_lies_between_all_and_none():
    peaks = [memory(LLAMA_8B, TRIAL, recomputed_blocks=k).peak_allocated for k in (32, 24, 8, 0)]
    assert peaks == sorted(peaks)
    assert peaks[0] == memory(LLAMA_8B, TRIAL).peak_allocated
    assert peaks[-1] == memory(LLAMA_8B, TRIAL, activation_policy="keep_all").peak_allocated


def test_gradients_wait_for_the_step_only_with_accumulation():
    keep = Setup(activation_policy="keep_all", batch_size=8, context_length=2048)
    assert memory(LLAMA_8B, keep).parts["gradients"] == 0  # the peak is in the loss
    waiting = memory(LLAMA_8B, keep, accumulation=2).parts
    assert waiting["gradients"] == pytest.approx(waiting["adapters"])
    sharded = replace(keep, world_size=2, accumulation=2)
    whole = memory(LLAMA_8B, sharded, no_sync=True).parts["gradients"]
    assert whole == pytest.approx(2 * memory(LLAMA_8B, sharded).parts["gradients"])


def test_full_training_needs_gradients_and_states_of_every_weight():
    parts = memory(LLAMA_8B, quant="none", adapter="none").parts
    assert parts["optimizer"] == pytest.approx(2 * LLAMA_8B.total_params() * 2 / GIB)
    assert parts["adapters"] == parts["absmax"] == 0


@pytest.mark.parametrize("shape,changes,measured,within", [
    (LLAMA_8B, {}, 13.3, 0.03),
    (LLAMA_8B, dict(activation_policy="keep_all"), 76.5, 0.03),
    (LLAMA_8B, dict(recomputed_blocks=16), 44.4, 0.03),
    (LLAMA_8B, dict(activation_policy="keep_all", world_size=2), 74.8, 0.03),
    (LLAMA_70B, dict(batch_size=8, context_length=2048, world_size=4), 41.8, 0.15),
    (LLAMA_70B.cut(16), dict(batch_size=4, context_length=2048, world_size=2), 11.3, 0.05),
    (LLAMA_70B.cut(16), dict(batch_size=4, context_length=2048, world_size=2, cpu_offload=True),
     7.0, 0.10)])
def test_peak_memory_is_near_what_the_trial_measured(shape, changes, measured, within):
    assert memory(shape, TRIAL, **changes).peak_allocated == pytest.approx(measured, rel=within)


@pytest.mark.parametrize("shape,changes,measured", [
    (LLAMA_8B, {}, 1.64), (LLAMA_8B, dict(activation_policy="keep_all"), 1.17),
    (LLAMA_8B, dict(recomputed_blocks=16), 1.43),
    (LLAMA_8B, dict(activation_policy="keep_all", world_size=2), 1.22),
    (LLAMA_70B, dict(batch_size=8, context_length=2048, world_size=4), 12.67),
    (LLAMA_70B.cut(16), dict(batch_size=4, context_length=2048, world_size=2), 1.25),
    (LLAMA_70B.cut(16), dict(batch_size=4, context_length=2048, world_size=2, cpu_offload=True),
     1.34)])
def test_step_time_is_near_what_the_trial_measured(shape, changes, measured):
    assert step_seconds(shape, H100, TRIAL, **changes).total == pytest.approx(measured, rel=0.10)


def test_flops_by_hand():
    """4 per frozen weight, 6 per adapter weight, half of the attention square three times."""
    n_linear = 6_979_321_856 + 128256 * 4096
    adapters = LLAMA_8B.lora_params(64)
    attention = 6 * 8192 * 4096 * 32
    assert model_flops_per_token(LLAMA_8B, TRIAL) == 4 * n_linear + 6 * adapters + attention
    assert model_flops_per_token(LLAMA_8B, replace(TRIAL, quant="none", adapter="none")) == (
        6 * n_linear + attention)
    assert model_tflops(LLAMA_8B, TRIAL, 1e3) == model_flops_per_token(LLAMA_8B, TRIAL) / 1e9


def test_recompute_adds_one_forward_of_the_recomputed_blocks():
    none, half, full = (flops_per_token(LLAMA_8B, replace(TRIAL, recomputed_blocks=k)).total
                        for k in (0, 16, 32))
    forward = 2 * (6_979_321_856 + LLAMA_8B.lora_params(64)) + 2 * 8192 * 4096 * 32
    assert full - none == forward and half - none == forward / 2


def test_slow_links_show_and_fast_ones_hide_behind_compute():
    setup = replace(TRIAL, world_size=2, batch_size=1, context_length=2048)
    fast = step_seconds(LLAMA_8B, H100, setup).parts["communication"]
    slow = step_seconds(LLAMA_8B, H100, setup, link_gb_s=1).parts["communication"]
    assert fast < 0.02 and slow > 1
    ddp = step_seconds(LLAMA_8B, H100, setup, strategy="ddp", link_gb_s=1).parts["communication"]
    assert ddp == pytest.approx(LLAMA_8B.lora_params(64) * 2 / 1e9)
    alone = step_seconds(LLAMA_8B, H100, setup, world_size=1).parts
    assert alone["communication"] == alone["offload"] == 0


def test_small_steps_are_bound_by_launches_and_datasheet_cards_say_so():
    small = step_seconds(model_shape("smollm2-135m"), H100, batch_size=1, context_length=64)
    assert small.parts["launches"] > 0.5 * small.total
    table = step_seconds(LLAMA_8B, find_gpu("3090")).table()
    assert "uncalibrated" in table and "uncalibrated" not in small.table()


def test_cost_of_a_run():
    step = step_seconds(LLAMA_8B, H100, TRIAL, world_size=2)
    cost = run_cost(step, H100, gpus=2, examples=1000, length=8192, epochs=3)
    assert cost.hours == pytest.approx(3 * 1000 / 2 / 2 * step.total / 3600)
    assert cost.dollars == pytest.approx(cost.hours * 2 * H100.price_per_hour)
    assert run_cost(step, find_gpu("a5000"), gpus=2, examples=1, length=1).dollars is None
    with pytest.raises(ValueError, match="examples must be above 0, got -1"):
        run_cost(step, H100, gpus=2, examples=-1, length=1)


def test_settings_of_a_run_become_a_setup():
    config = RunConfig(train_type="qlora", sharding_strategy="shard_grad_op", lora_rank=16,
                       lora_target_modules="q_proj,v_proj", global_batch_size=32, batch_size=4,
                       use_gradient_checkpointing=False, adapter_dtype="bf16")
    setup = setup_from_config(config, 2, padded_rows=True)
    assert setup == Setup(
        world_size=2, strategy="shard_grad_op", lora_rank=16, targets=("q_proj", "v_proj"),
        batch_size=4, accumulation=4, activation_policy="keep_all", adapter_dtype="bf16",
        padded_rows=True)
    assert setup_from_config(RunConfig(), 1) == Setup()


def test_table_shows_every_part_and_the_moment():
    found = memory(LLAMA_8B, TRIAL, world_size=2)
    table = found.table()
    for word in ("linears", "absmax", "activations", "slack", "total", "peak at: last block"):
        assert word in table
    assert found.largest == "activations"
    assert found.total > found.peak_reserved > found.peak_allocated
    assert found.fits(80) and not found.fits(found.total - 0.1)
    assert max(found.moments.values()) == pytest.approx(found.peak_allocated)


@pytest.mark.parametrize("changes,message", [
    (dict(batch_size=0), "batch_size must be 1 or more, got 0"),
    (dict(optimizer="lion"), "optimizer lion: choose adamw"),
    (dict(targets=("qq",)), "qq: no such module")])
def test_wrong_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message): memory(LLAMA_8B, **changes)


def test_context_beyond_the_models_positions_is_refused():
    with pytest.raises(ValueError, match="--context_length 8192: .* 4096 positions"):
        check_context(LLAMA_70B, TRIAL)


def test_estimates_need_no_torch():
    code = ("import sys, json; from fsdp_qlora import estimate, arch, hardware;"
            "print(json.dumps('torch' in sys.modules))")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) is False
