"""Offload on a GPU: copies beside compute change no gradient and do free memory. `pytest -m gpu`."""
from __future__ import annotations

import os

import pytest
import torch

from tests.distributed.test_offload import (
    OFFLOADS,
    PARTS,
    accumulated_gradients,
    assert_all_equal,
)
from tests.ranks import run_ranks
from tests.tiny import padded_batch, save_tiny

pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

LAYERS, HIDDEN, TOKENS, REPEATS = 8, 1024, 2048, 20
SHAPE = dict(hidden_size=HIDDEN, intermediate_size=2048, num_hidden_layers=LAYERS,
             num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("wide"), **SHAPE)


def long_rows(count: int) -> list[tuple[list, list]]:
    """Rows of full and of half length, all tokens trained."""
    generator = torch.Generator().manual_seed(0)
    lengths = [TOKENS if i % 3 else TOKENS // 2 for i in range(count)]
    rows = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]
    return [(row, row) for row in rows]


def repeated_gradients(folder: str, cases: list[dict], world_size: int):
    """`accumulated_gradients` with kernels that give the same bits every time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    return accumulated_gradients(folder, "cuda", cases, REPEATS, long_rows(3 * world_size))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_twenty_accumulated_steps_are_bit_equal_with_every_offload(folder, world_size, compiled):
    if torch.cuda.device_count() < world_size: pytest.skip("needs 2 GPUs")
    cases = [o | dict(precision="bf16", compile=compiled)
             for o in (OFFLOADS[::3] if compiled else OFFLOADS + PARTS)]  # compiling takes its time
    results = run_ranks(repeated_gradients, world_size, folder, cases, world_size, device="cuda")
    assert_all_equal(results[0], cases)


def test_gradients_reduced_once_a_step_are_bit_equal_with_every_offload(folder):
    cases = [o | dict(precision="bf16", compile=False, no_sync=True) for o in OFFLOADS]
    world_size = min(2, torch.cuda.device_count())
    results = run_ranks(repeated_gradients, world_size, folder, cases, world_size, device="cuda")
    assert_all_equal(results[0], cases)


def allocated_after_forward(folder: str, cases: list[dict]) -> list[int]:
    """Bytes on the GPU that a second step holds between its forward and its backward."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    device, found = torch.device("cuda", 0), []
    batch = {k: v.to(device) for k, v in padded_batch(long_rows(2)[1:]).items()}
    for case in cases:
        model = build_model(RunConfig(model_name=folder, lora_rank=4, sharding_strategy="ddp", **case),
                            device)
        model(**batch).loss.backward()
        before = torch.cuda.memory_allocated()
        loss = model(**batch).loss
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated() - before)
        del loss, model
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_block_inputs_leave_the_gpu(folder, compiled):
    cases = [o | dict(compile=compiled) for o in (OFFLOADS[0], OFFLOADS[2])]
    (kept, moved), = run_ranks(allocated_after_forward, 1, folder, cases, device="cuda")
    one_input = TOKENS * HIDDEN * 2
    assert kept - moved == pytest.approx((LAYERS - 1) * one_input, rel=0.05)


def places(folder: str, settings: dict) -> dict[str, set]:
    """Where each kind of weight is after a step: (device, pinned) of its shards; regions on the host."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step
    model = build_model(RunConfig(model_name=folder, lora_rank=4, compile=False, **settings),
                        torch.device("cuda", torch.cuda.current_device()))
    optimizer = build_optimizer(model)
    train_step(model, optimizer, [padded_batch(long_rows(1))])
    found: dict[str, set] = dict(frozen=set(), trained=set(), vocabulary=set(), regions=set())
    for name, p in model.named_parameters():
        kind = "trained" if p.requires_grad else "frozen"
        if "embed_tokens" in name or "lm_head" in name: kind = "vocabulary"
        local = p.to_local() if hasattr(p, "to_local") else p
        if not local.numel(): continue
        found[kind].add((local.device.type, local.device.type == "cpu" and local.is_pinned()))
        if local.device.type == "cpu": found["regions"].add(local.untyped_storage().data_ptr())
    return found


@pytest.mark.parametrize("trained, rows", [(False, True), (True, True), (False, False)])
def test_what_is_offloaded_is_pinned_in_one_region_and_the_rest_is_on_the_gpu(folder, trained, rows):
    settings = dict(use_cpu_offload=True, use_trained_cpu_offload=trained,
                    use_vocabulary_cpu_offload=rows)
    for found in run_ranks(places, min(2, torch.cuda.device_count()), folder, settings, device="cuda"):
        host, gpu = {("cpu", True)}, {("cuda", False)}
        assert (found["frozen"], found["trained"]) == (host, host if trained else gpu)
        assert found["vocabulary"] == (host if rows else gpu) and len(found["regions"]) == 1


def test_on_one_gpu_the_vocabulary_alone_may_be_on_the_host(folder):
    settings = dict(sharding_strategy="ddp", use_vocabulary_cpu_offload=True)
    (found,) = run_ranks(places, 1, folder, settings, device="cuda")
    assert found["vocabulary"] == {("cpu", True)} and found["frozen"] == {("cuda", False)}


def profiled(folder: str, output: str) -> str:
    """What --profile_memory prints of the second of two steps."""
    import contextlib
    import io

    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import Step
    from fsdp_qlora.observe.memory_report import MemoryWatch
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step
    device = torch.device("cuda", torch.cuda.current_device())
    config = RunConfig(model_name=folder, lora_rank=4, profile_memory=True, output_dir=output)
    model = build_model(config, device)
    optimizer, text = build_optimizer(model), io.StringIO()
    watch, batch = MemoryWatch(config, model, optimizer, device), padded_batch(long_rows(1))
    with contextlib.redirect_stdout(text):
        for index in (0, 1):
            with watch.step(Step(index, 0, [batch], 1, 0, 0, 0)): train_step(model, optimizer, [batch])
    return text.getvalue()


def test_the_memory_profile_knows_the_weights_and_finds_every_part(folder, tmp_path):
    text = run_ranks(profiled, min(2, torch.cuda.device_count()), folder, str(tmp_path),
                     device="cuda")[0]
    measured = {line.split()[0]: float(line.split()[1]) for line in text.splitlines()
                if line.count("GiB") == 2}
    assert {"weights", "adapters", "optimizer", "gradients", "activations", "logits"} < set(measured)
    assert measured["activations"] > 0 and measured["allocated"] > 0, text
    assert (tmp_path / "memory.png").stat().st_size > 5000
