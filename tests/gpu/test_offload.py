"""Offload on a GPU: copies beside compute change no gradient and do free memory. `pytest -m gpu`.

All that the tests look at is found in one start of the ranks: a start takes longer than most of them.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import time
from pathlib import Path

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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LAYERS, HIDDEN, TOKENS, REPEATS = 3, 1024, 2048, 20
SHAPE = dict(
    hidden_size=HIDDEN,
    intermediate_size=2048,
    num_hidden_layers=LAYERS,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=TOKENS,
)
BOTH = OFFLOADS[3]
KEEPS = dict(activation_policy="keep_attention")
DEEP = 8  # blocks, of which no more than three keep their outputs on the GPU at a time
EQUAL = {  # cases of one list have the same gradients; what follows names is common to them
    "eager": (OFFLOADS + PARTS, dict(compile=False)),
    "reduced once a step": ([OFFLOADS[0], BOTH], dict(compile=False, no_sync=True)),
    "in tiles": ([OFFLOADS[0], BOTH], dict(compile=False, mlp_tiles=3)),
    "compiled": ([OFFLOADS[0], BOTH], dict(compile=True)),
    "attention kept": ([OFFLOADS[0], OFFLOADS[2], BOTH], dict(compile=False, **KEEPS)),
    "attention kept, compiled": ([OFFLOADS[0], OFFLOADS[2], BOTH], dict(compile=True, **KEEPS)),
}
PLACES = [(False, True), (True, True), (False, False)]  # trained weights, vocabulary on the host


def long_rows(count: int) -> list[tuple[list, list]]:
    """Rows of one length, so that a compiled block has one graph; all tokens trained."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 97, (TOKENS,), generator=generator).tolist() for _ in range(count)]
    return [(row, row) for row in rows]


def everything(folder: str, output: str) -> dict:
    """What each test looks at, from one process of each rank."""
    import torch.distributed as dist

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # kernels that give the same bits every time
    torch.use_deterministic_algorithms(True)  # with warn_only, torch's attention stays as it is
    rows = long_rows(2 * dist.get_world_size())
    found: dict = {}
    for name in EQUAL:
        began = time.monotonic()
        found[name] = accumulated_gradients(folder, "cuda", cases_of(name), REPEATS, rows)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    found["allocated"] = {
        compiled: [
            allocated_after_forward(folder, case | dict(compile=compiled))
            for case in (OFFLOADS[0], OFFLOADS[2])
        ]
        for compiled in (False, True)
    }
    found["kept"] = {
        compiled: [
            kept_and_peak(str(Path(output, "deep")), KEEPS | case | dict(compile=compiled))
            for case in (OFFLOADS[0], OFFLOADS[2])
        ]
        for compiled in (False, True)
    }
    found["places"] = [
        places(
            folder,
            dict(
                use_cpu_offload=True,
                use_trained_cpu_offload=trained,
                use_vocabulary_cpu_offload=rows,
            ),
        )
        for trained, rows in PLACES
    ]
    found["vocabulary"] = places(
        folder, dict(sharding_strategy="ddp", use_vocabulary_cpu_offload=True)
    )
    found["profile"] = profiled(folder, output)
    return found


def cases_of(name: str) -> list[dict]:
    """The settings of a list of equal cases."""
    offloads, common = EQUAL[name]
    return [offload | common | dict(precision="bf16") for offload in offloads]


def allocated_after_forward(folder: str, case: dict) -> int:
    """Bytes on the GPU that a second step holds between its forward and its backward."""
    return kept_and_peak(folder, case)[0]


def kept_and_peak(folder: str, case: dict) -> tuple[int, int, list]:
    """Of a second step: bytes that it holds between its forward and its backward, and at its peak.

    And its gradients, on the CPU.
    """
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig

    device = torch.device("cuda", torch.cuda.current_device())
    batch = {k: v.to(device) for k, v in padded_batch(long_rows(1)).items()}
    model = build_model(
        RunConfig(
            model_name=folder, lora_rank=4, lora_dropout=0.0, sharding_strategy="ddp", **case
        ),
        device,
    )
    model(**batch).loss.backward()
    gc.collect()
    before = torch.cuda.memory_allocated()
    loss = model(**batch).loss
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    for p in model.parameters():
        p.grad = None
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    torch.cuda.synchronize()
    gradients = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    return held, torch.cuda.max_memory_allocated(), gradients


def places(folder: str, settings: dict) -> dict[str, set]:
    """Where each kind of weight is after a step: (device, pinned) of its shards; regions on the host."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    model = build_model(
        RunConfig(model_name=folder, lora_rank=4, compile=False, **settings),
        torch.device("cuda", torch.cuda.current_device()),
    )
    optimizer = build_optimizer(model)
    train_step(model, optimizer, [padded_batch(long_rows(1))])
    found: dict[str, set] = dict(frozen=set(), trained=set(), vocabulary=set(), regions=set())
    for name, p in model.named_parameters():
        kind = "trained" if p.requires_grad else "frozen"
        if "embed_tokens" in name or "lm_head" in name:
            kind = "vocabulary"
        local = p.to_local() if hasattr(p, "to_local") else p
        if not local.numel():
            continue
        found[kind].add((local.device.type, local.device.type == "cpu" and local.is_pinned()))
        if local.device.type == "cpu":
            found["regions"].add(local.untyped_storage().data_ptr())
    return found


def profiled(folder: str, output: str) -> tuple[str, int]:
    """What --profile_memory prints of the second of two steps, and the bytes of rank 0's picture."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.data import Step
    from fsdp_qlora.observe.memory_report import MemoryWatch
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.run_plan import plan_run
    from fsdp_qlora.training.step import train_step

    device = torch.device("cuda", torch.cuda.current_device())
    config = RunConfig(
        model_name=folder, lora_rank=4, compile=False, profile_memory=True, output_dir=output
    )
    plan = plan_run(config, device)
    model = build_model(config, device, plan=plan)
    optimizer, text = build_optimizer(model), io.StringIO()
    watch, batch = MemoryWatch(config, plan, model, optimizer, device), padded_batch(long_rows(1))
    with contextlib.redirect_stdout(text):
        for index in (0, 1):
            with watch.step(Step(index, 0, [batch], 1, 0, 0, 0)):
                train_step(model, optimizer, [batch])
    picture = Path(output, "memory.png")
    return text.getvalue(), picture.stat().st_size if picture.exists() else 0


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """`everything` of each rank."""
    folder = save_tiny(tmp_path_factory.mktemp("wide"), **SHAPE)
    output = tmp_path_factory.mktemp("profile")
    save_tiny(output / "deep", **SHAPE | dict(num_hidden_layers=DEEP))
    return run_ranks(everything, 2, folder, str(output), device="cuda")


@pytest.mark.parametrize("name", EQUAL)
def test_twenty_accumulated_steps_are_bit_equal_with_every_offload(found, name):
    assert_all_equal(found[0][name], cases_of(name))


def test_gradients_of_tiles_are_those_of_whole_mlps(found):
    whole, tiled = found[0]["eager"][0][0], found[0]["in tiles"][0][0]
    for name, gradient in whole.items():
        assert (tiled[name] - gradient).norm() < 0.02 * gradient.norm(), name  # rounding of bf16


@pytest.mark.parametrize("compiled", [False, True])
def test_block_inputs_leave_the_gpu(found, compiled):
    kept, moved = found[0]["allocated"][compiled]
    one_input = TOKENS * HIDDEN * 2
    assert kept - moved == pytest.approx((LAYERS - 1) * one_input, rel=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_attentions_kept_outputs_leave_the_gpu_and_the_peak_falls_by_them(found, compiled):
    """An output is as large as an input; those of a block and of the one before it come back at once."""
    (kept, peak, gradients), (left, lower, same) = found[0]["kept"][compiled]
    both = 2 * TOKENS * HIDDEN * 2
    assert kept - left == pytest.approx((DEEP - 1) * both, rel=0.05)
    assert (DEEP - 4) * both < peak - lower < DEEP * both
    assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))


@pytest.mark.parametrize("index", range(len(PLACES)))
def test_what_is_offloaded_is_pinned_in_one_region_and_the_rest_is_on_the_gpu(found, index):
    (trained, rows), host, gpu = PLACES[index], {("cpu", True)}, {("cuda", False)}
    for here in (rank["places"][index] for rank in found):
        assert (here["frozen"], here["trained"]) == (host, host if trained else gpu)
        assert here["vocabulary"] == (host if rows else gpu) and len(here["regions"]) == 1


def test_on_one_gpu_the_vocabulary_alone_may_be_on_the_host(found):
    here = found[0]["vocabulary"]
    assert here["vocabulary"] == {("cpu", True)} and here["frozen"] == {("cuda", False)}


def test_the_memory_profile_knows_the_weights_and_finds_every_part(found):
    text, picture = found[0]["profile"]
    measured = {
        line.split()[0]: float(line.split()[1])
        for line in text.splitlines()
        if line.count("GiB") == 2
    }
    assert {"weights", "adapters", "optimizer", "gradients", "activations", "logits"} < set(
        measured
    )
    assert measured["activations"] > 0 and measured["allocated"] > 0, text
    assert picture > 5000
