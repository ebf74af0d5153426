"""What Mamba 2 and lightning attention take on plain torch, as estimated, against transformers' modules."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fsdp_qlora.catalog.arch import ModelShape
from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.machine import Machine, cpu_machine
from fsdp_qlora.catalog.shapes import model_shape, shape_from_config
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import constants, memory, resolve, step_seconds
from fsdp_qlora.estimate.activations import saved_by_block
from fsdp_qlora.estimate.compute import launch_seconds
from fsdp_qlora.estimate.mixers import mixer_held, mixer_launches, mixer_saved, mixer_seconds
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
        ("Nemotron 3", (4, 32, 48, 2, 16), 256, {}),
        ("Nemotron 3", (4, 32, 48, 2, 64), 500, {}),  # the last chunk is filled up
        ("Granite 4 H", (8, 16, 64, 1, 64), 256, {}),
        ("Bamba", (8, 64, 16, 1, 32), 128, {}),
        ("Falcon-H1", (4, 32, 48, 2, 32), 256, {}),
        ("Falcon-H1", (4, 32, 48, 2, 32), 256, dict(mamba_rms_norm=True)),
    ],
)
def test_mamba_on_plain_torch_keeps_and_holds_what_is_estimated(family, sizes, tokens, more):
    mixer, shape = mixer_of(family, *sizes, **more)
    plan, given = EAGER.change(context_length=tokens), inputs(tokens)
    assert mixer_saved(shape, plan) == pytest.approx(
        saved_bytes(mixer, partial(run, mixer, given)), rel=0.02
    )
    assert mixer_held(shape, plan) == pytest.approx(held_in_backward(mixer, given), rel=0.05)


@pytest.mark.parametrize("sizes, tokens", [((4, 32, 48, 2, 64), 256), ((6, 16, 80, 2, 32), 128)])
def test_inductor_leaves_of_a_compiled_mamba_what_is_estimated(sizes, tokens):
    mixer, shape = mixer_of("Nemotron 3", *sizes)
    torch.compiler.reset()
    compiled = torch.compile(mixer)
    plan, given = COMPILED.change(context_length=tokens), inputs(tokens)

    def call(_, given):
        return compiled(given)

    held = held_in_backward(mixer, given, call)
    assert mixer_saved(shape, plan) == pytest.approx(
        saved_bytes(mixer, partial(call, mixer, given)), rel=0.05
    )
    assert mixer_held(shape, plan) == pytest.approx(held, rel=0.1)
    eager = plan.change(rows_apart=True)  # packed rows keep a mixer out of torch.compile
    assert mixer_held(shape, eager) == mixer_held(shape, plan.change(compile=False)) > 2 * held


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
        ("Nemotron 3", (4, 32, 48, 2, 64), 256, 1),
        ("Nemotron 3", (8, 48, 16, 1, 16), 128, 2),
        ("MiniMax 01", (4, 32, 16), 256, 1),
        ("MiniMax 01", (8, 16, 64), 512, 2),
        ("MiniMax 01", (4, 32, 16), 512, 2),
    ],
)
def test_a_mixer_on_plain_torch_launches_and_moves_what_is_counted(family, sizes, tokens, rows):
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
    assert peaks[0] + 1 < peaks[1] and peaks[2] > 60  # two sums over (C, C, H, S): 32 GiB each
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
