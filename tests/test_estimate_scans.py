"""What Mamba 2 and lightning attention take on plain torch, as estimated, against transformers' modules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from fsdp_qlora.catalog.arch import ModelShape
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.machine import Machine, cpu_machine
from fsdp_qlora.catalog.shapes import model_shape, shape_from_config
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import constants, mamba2, memory, resolve, step_seconds
from fsdp_qlora.estimate.activations import saved_by_block
from fsdp_qlora.estimate.compute import launch_seconds
from fsdp_qlora.estimate.delta_nets import fp32_rate
from fsdp_qlora.estimate.mixers import mixer_held, mixer_launches, mixer_saved, mixer_seconds
from fsdp_qlora.model import state_space_scan
from fsdp_qlora.model.state_space_mixers import apply_state_space_scan
from fsdp_qlora.plan import Plan

from .allocations import peak_bytes, saved_bytes
from .estimates import H100
from .families import family_config
from .test_estimate_delta_nets import Moved

HIDDEN = 64
GPU = Machine(gpu=H100, memory_gib=80)
EAGER = Plan().change(micro_batch_size=2, compile=False, state_kernels=False)
COMPILED = EAGER.change(compile=True)
BYTES_PER_SECOND = find_gpu("H200").reached_bandwidth_gb_s * 1e9 * constants.COPY_SHARE
_SIZES = {
    "mamba2": (
        "mamba_n_heads",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_n_groups",
        "mamba_chunk_size",
    ),
    "nemotron": ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "chunk_size"),
    "lightning": ("num_attention_heads", "head_dim", "block_size"),
}
_MIXERS = {"Nemotron 3": "nemotron", "MiniMax 01": "lightning"}


def mixer_of(family: str, *sizes: int, **more) -> tuple[nn.Module, ModelShape]:
    """The first mixer of a family's tiny model in bf16, frozen, with heads and chunks of these sizes."""
    fields = dict(zip(_SIZES[_MIXERS.get(family, "mamba2")], sizes, strict=True))
    if family not in _MIXERS:
        width = sizes[0] * sizes[1]
        fields |= dict(mamba_d_ssm=width, mamba_expand=width // HIDDEN)
    config = family_config(family, hidden_size=HIDDEN, **fields, **more)
    model = AutoModelForCausalLM.from_config(config)
    mixer = next(m for m in model.modules() if hasattr(m, "A_log") or hasattr(m, "slope_rate"))
    shape = shape_from_config(config.to_dict()).kinds[0]
    apply_state_space_scan(mixer)
    return mixer.to(torch.bfloat16).requires_grad_(False).train(), shape


def run(mixer: nn.Module, given: Tensor) -> Tensor:
    if not hasattr(mixer, "slope_rate"):
        return mixer(given)
    return mixer(given, position_embeddings=None, attention_mask=None)[0]


def inputs(tokens: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True)


def held_in_backward(mixer: nn.Module, given: Tensor, call=run) -> int:
    """The most bytes that a backward allocates, less what it frees before: of the forward it saw made."""
    call(mixer, given).sum().backward()  # what is made once
    made: list[Tensor] = []
    peak_bytes(lambda: made.append(call(mixer, given)))
    gradient = torch.randn_like(made[0])
    return peak_bytes(lambda: made[0].backward(gradient))


@pytest.mark.parametrize(
    "family, sizes, tokens, more",
    [
        ("Nemotron 3", (4, 32, 48, 2, 16), 64, {}),
        ("Nemotron 3", (4, 32, 48, 2, 64), 500, {}),  # the last chunk is filled up
        ("Granite 4 H", (8, 16, 64, 1, 64), 256, {}),
        ("Bamba", (8, 64, 16, 1, 32), 128, {}),
        ("Falcon-H1", (4, 32, 48, 2, 32), 256, {}),
        ("Falcon-H1", (4, 32, 48, 2, 32), 256, dict(mamba_rms_norm=True)),
    ],
)
def test_mamba_on_plain_torch_keeps_what_is_estimated(family, sizes, tokens, more):
    mixer, shape = mixer_of(family, *sizes, **more)
    plan, given = EAGER.change(context_length=tokens), inputs(tokens)
    kept = saved_bytes(mixer, partial(run, mixer, given))
    assert mixer_saved(shape, plan) == pytest.approx(kept, rel=0.02)


@pytest.mark.parametrize("family", ["Nemotron 3", "Falcon-H1"])
def test_a_compiled_mamba_keeps_what_is_estimated(family):
    mixer, shape = mixer_of(family, 4, 32, 48, 2, 64)
    torch.compiler.reset()
    compiled, given = torch.compile(mixer), inputs(256)
    plan = COMPILED.change(context_length=256)
    kept = saved_bytes(mixer, lambda: compiled(given))
    assert mixer_saved(shape, plan) == pytest.approx(kept, rel=0.02)
    eager = plan.change(rows_apart=True)  # packed rows keep a mixer out of torch.compile
    assert mixer_saved(shape, eager) == mixer_saved(shape, plan.change(compile=False)) > kept


@pytest.mark.parametrize(
    "sizes, tokens, rows, part",
    [
        ((8, 64, 128, 1), 1024, 1, 2**17),
        ((8, 64, 128, 2), 1024, 1, 2**12),  # a group at a time,
        ((16, 80, 128, 1), 1024, 1, 2**12),  # four heads
        ((4, 96, 64, 1), 512, 2, 2**17),
        ((8, 64, 128, 1), 64, 16, 2**17),  # rows of one chunk
        ((8, 16, 16, 1), 256, 4, 2**17),
    ],
)
def test_the_scan_holds_moves_and_launches_what_is_counted(sizes, tokens, rows, part, monkeypatch):
    monkeypatch.setattr(state_space_scan, "PART", part)
    monkeypatch.setattr(constants, "SCAN_PART", part)
    heads, width, state, groups = sizes
    given = [torch.randn(rows * tokens, heads, width), torch.randn(rows * tokens, heads)]
    given += [torch.randn(rows * tokens, groups, state) for _ in range(2)]
    given = [x.bfloat16() for x in given] + [-torch.rand(heads), torch.rand(heads)] * 2
    given, d_out = given[:7], torch.randn(rows * tokens, heads, width).bfloat16()
    settings = (*given, rows, 0.0, float("inf"))
    with Moved() as forward:
        state_space_scan.state_space_scan._init_fn(*settings)
    with Moved() as backward:
        state_space_scan.state_space_scan_backward._init_fn(d_out, *settings)
    held = peak_bytes(lambda: state_space_scan.state_space_scan_backward(d_out, *settings))
    _, shape = mixer_of("Nemotron 3", *sizes, 64)
    plan = EAGER.change(context_length=tokens, micro_batch_size=rows)
    assert mixer_held(shape, plan) == pytest.approx(held, rel=0.08)
    assert mixer_held(shape, plan.change(state_kernels=True)) == 0
    moved = [x * BYTES_PER_SECOND for x in mixer_seconds(shape, plan, find_gpu("H200"))]
    launches = mixer_launches(shape, plan)
    for done, count, launched in zip((forward, backward), moved, launches, strict=True):
        assert count == pytest.approx(done.bytes, rel=0.05)
        assert launched == pytest.approx(done.launches, rel=0.05)


def test_in_fp32_products_of_the_scan_count_too():
    _, shape = mixer_of("Nemotron 3", 8, 64, 128, 2, 64)
    given = [torch.randn(1024, 8, 64), torch.randn(1024, 8), *torch.randn(2, 1024, 2, 128)]
    given += [-torch.rand(8), torch.rand(8), torch.rand(8)]
    with FlopCounterMode(display=False) as counted:
        state_space_scan.state_space_scan._init_fn(*given, 1, 0.0, float("inf"))
    plan = EAGER.change(context_length=1024, micro_batch_size=1)
    flops = mamba2.product_flops(shape.block.mixer, plan)
    assert flops == pytest.approx(counted.get_total_flops())
    seconds = sum(mixer_seconds(shape, plan, H100))
    in_fp32 = sum(mixer_seconds(shape, plan.change(product_dtype="fp32"), H100))
    assert in_fp32 - seconds == pytest.approx(4 * flops / fp32_rate(H100))


def test_the_estimates_chunks_and_parts_are_the_ops():
    assert constants.SCAN_CHUNK == state_space_scan.CHUNK
    assert constants.SCAN_PART == state_space_scan.PART


@pytest.mark.parametrize(
    "sizes, tokens", [((4, 32, 16), 64), ((4, 32, 64), 256), ((8, 16, 64), 512), ((4, 64, 16), 256)]
)
def test_lightning_attention_keeps_and_holds_what_is_estimated(sizes, tokens):
    mixer, shape = mixer_of("MiniMax 01", *sizes)
    for rows, plan in ((1, EAGER), (2, EAGER), (2, COMPILED)):
        given = inputs(tokens, rows)
        plan = plan.change(micro_batch_size=rows, context_length=tokens)
        assert mixer_saved(shape, plan) == pytest.approx(
            saved_bytes(mixer, partial(run, mixer, given)), rel=0.02
        )
        assert mixer_held(shape, plan) == pytest.approx(held_in_backward(mixer, given), rel=0.1)


@pytest.mark.parametrize(
    "family, sizes, tokens, rows",
    [
        ("MiniMax 01", (4, 32, 16), 256, 1),
        ("MiniMax 01", (8, 16, 64), 512, 2),
        ("MiniMax 01", (4, 32, 16), 512, 2),
    ],
)
def test_lightning_attention_launches_and_moves_what_is_counted(family, sizes, tokens, rows):
    mixer, shape = mixer_of(family, *sizes)
    plan = EAGER.change(context_length=tokens, micro_batch_size=rows)
    with Moved() as forward:
        out = run(mixer, inputs(tokens, rows))
    gradient = torch.randn_like(out)
    with Moved() as backward:
        out.backward(gradient)
    gpu, launches = find_gpu("H200"), mixer_launches(shape, plan)
    moved = [seconds * BYTES_PER_SECOND for seconds in mixer_seconds(shape, plan, gpu)]
    for done, seconds, count in zip((forward, backward), moved, launches, strict=True):
        assert count == pytest.approx(done.launches, abs=2)
        assert seconds == pytest.approx(done.bytes, rel=0.05)


def test_a_run_without_kernels_for_mamba_says_what_is_missing_and_takes_more(install):
    config = RunConfig(batch_size=1, context_length=4096, activation_policy="recompute_all")
    shape, found = model_shape("nvidia/NVIDIA-Nemotron-Nano-9B-v2"), {}
    both = "mamba-ssm and causal-conv1d are not installed: the Mamba mixers of nemotron_h run on"
    one = "causal-conv1d is not installed: the Mamba mixers of nemotron_h run on plain torch"
    for packages, said in ((("mamba_ssm", "causal_conv1d"), ""), (("mamba_ssm",), one), ((), both)):
        install(set(packages))
        plan = resolve(config, shape, GPU)
        lines = [line for line in plan.choices if "Mamba mixers" in line]
        assert [line.startswith(said) for line in lines] == [True] * bool(said)
        assert not said or "(pip install " in lines[0]
        assert plan.model.state_kernels == (not said)
        found[said] = plan
    fast, slow = found[""], found[both]
    packed = resolve(replace(config, packing=True), shape, GPU)
    peaks = [memory(shape, plan).peak_allocated for plan in (fast, slow, packed)]
    assert peaks[0] < peaks[1] < peaks[2] < peaks[0] + 1  # a few heads' chunks at a time
    with_kernels, without = (step_seconds(shape, H100, plan) for plan in (fast, slow))
    assert with_kernels.parts["mixers"] == 0 < without.parts["mixers"]
    assert with_kernels.total < without.total
    assert launch_seconds(shape, slow) > launch_seconds(shape, fast)


def test_without_a_gpu_mixers_run_on_plain_torch_and_nothing_is_said():
    plan = resolve(RunConfig(), model_shape("granite-4.0-h-tiny"), cpu_machine(1, 16))
    assert not plan.model.state_kernels
    assert not any("plain torch" in line for line in plan.choices)


def test_lightning_attention_has_no_kernels_whatever_is_installed(install):
    install({"fla", "mamba_ssm", "causal_conv1d"})
    shape = shape_from_config(family_config("MiniMax 01").to_dict())
    plan = resolve(RunConfig(), shape, GPU)
    assert any("transformers has no kernels for it" in line for line in plan.choices)
    assert saved_by_block(shape.kinds[0], plan) > saved_by_block(
        shape.kinds[0], plan.change(state_kernels=True)
    )
