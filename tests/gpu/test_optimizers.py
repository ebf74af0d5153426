"""The compiled AdamW update on a GPU: as on the CPU, compiled once, and nothing waits for the GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_qlora.optim import build_optimizer
from fsdp_qlora.training.step import step_if
from tests.ranks import run_ranks
from tests.tiny import save_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OWN = ("adamw_bf16", "adamw_8bit", "adafactor")


def run(name: str, device: str, steps: int = 5):
    """Weights after some steps with given gradients, and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(256, 512), (100, 64), (512,)]
    model = nn.Module()
    model.p = nn.ParameterList(
        torch.randn(s, generator=generator).bfloat16().to(device) for s in shapes
    )
    optimizer = build_optimizer(model, name, 1e-2, 0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        for p in model.p:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(device)
        optimizer.step()
    return [p.detach().float().cpu() for p in model.p], optimizer


@pytest.mark.parametrize("name", OWN)
def test_weights_on_a_gpu_are_those_on_the_cpu_but_for_tipped_roundings(name):
    """Sums differ in the last bits of float32, which tips a rounding now and then."""
    gpu, cpu = run(name, "cuda")[0], run(name, "cpu")[0]
    for ours, reference in zip(gpu, cpu, strict=True):
        torch.testing.assert_close(ours, reference, rtol=2**-6, atol=2e-3)
        assert (ours == reference).float().mean() > 0.9


def test_changing_rates_and_sizes_compile_nothing_again():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    run("adamw_8bit", "cuda")
    first = counters["stats"]["unique_graphs"]
    run("adamw_8bit", "cuda", steps=8)
    assert 0 < first == counters["stats"]["unique_graphs"] <= 2


@pytest.mark.parametrize("name", ("adamw", *OWN))
def test_a_step_does_not_wait_for_the_gpu(name):
    _, optimizer = run(name, "cuda", steps=2)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("finite", [True, False])
def test_a_step_in_host_memory_waits_for_the_gpus_word_whether_it_is_one(finite):
    """Without it torch took what was in its place from the step count, and NaN followed."""
    model = nn.Module()
    model.p = nn.ParameterList([torch.ones(64, 64)])
    optimizer = build_optimizer(model, "adamw", 1e-2)
    model.p[0].grad = torch.ones(64, 64)
    gradient_norm = torch.ones((), device="cuda")
    for _ in range(8):  # leaves pinned memory that is not zero to be used again
        gradient_norm.add(7).to("cpu", non_blocking=True)
    torch.cuda._sleep(2_000_000_000)
    step_if((gradient_norm if finite else gradient_norm * torch.inf).isfinite(), optimizer)
    assert optimizer.state[model.p[0]]["step"] == finite
    assert bool((model.p[0] < 1).all()) == finite


def test_an_8_bit_step_needs_a_gigabyte_beside_weights_gradients_and_states():
    """Half a billion weights in one matrix, as an embedding has: states are unpacked in parts."""
    model = nn.Module()
    model.p = nn.ParameterList([torch.zeros(128 * 1024, 4096, dtype=torch.bfloat16, device="cuda")])
    optimizer = build_optimizer(model, "adamw_8bit", 1e-3)
    model.p[0].grad = torch.ones_like(model.p[0])
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1.1 * 2**30
    assert before < 6.1 * 128 * 1024 * 4096


def losses_of(folder: str, cases: list[dict]) -> list[list[float]]:
    """Losses of 4 steps of each case."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.training.step import train_step
    from tests.tiny import padded_batch, tiny_rows

    found, steps = [], tiny_rows(steps=4, rows_per_step=2)
    for case in cases:
        config = RunConfig(
            model_name=folder,
            lora_rank=16,
            lora_dropout=0.0,
            compile=False,
            use_cpu_offload=True,
            **case,
        )
        model = build_model(config, torch.device("cuda", torch.cuda.current_device()))
        optimizer = build_optimizer(model, config.optimizer, 1e-2)
        found.append([train_step(model, optimizer, [padded_batch(rows)]).loss for rows in steps])
    return found


def test_every_optimizer_trains_weights_in_host_memory_as_on_the_gpu(tmp_path):
    folder = save_tiny(tmp_path, hidden_size=256, intermediate_size=512)
    names = ("adamw", *OWN)
    cases = [
        dict(optimizer=name, use_trained_cpu_offload=there)
        for name in names
        for there in (False, True)
    ]
    for found in run_ranks(losses_of, 2, folder, cases, device="cuda"):
        for on_gpu, on_host in zip(found[::2], found[1::2], strict=True):
            assert on_host == pytest.approx(on_gpu, rel=1e-3) and on_host[-1] < on_host[0]
