"""The attention that an estimate reckons with is the one that a run takes, and its memory is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, Qwen3_5TextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from fsdp_qlora.bench.accuracy import compare
from fsdp_qlora.bench.row import read_rows, row_files
from fsdp_qlora.catalog.machine import Machine, cpu_machine
from fsdp_qlora.catalog.shapes import model_shape, shape_from_config
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import attention, memory, resolve, step_seconds
from fsdp_qlora.estimate.activations import _state_saved
from fsdp_qlora.estimate.mixers import mixer_held, mixer_saved
from fsdp_qlora.model import attention as of_code
from fsdp_qlora.model import flash_attention_4 as fa4
from fsdp_qlora.model.delta_nets import apply_delta_rule
from fsdp_qlora.model.delta_rule import delta_rule_backward
from fsdp_qlora.plan import Plan

from .allocations import peak_bytes, saved_bytes
from .estimates import H100
from .families import EVERY_FAMILY, family_config
from .test_docs import ROOT
from .test_sinks import MODELS, SIZES

GPU = Machine(gpu=H100, memory_gib=80)
DTYPES = dict(bf16=torch.bfloat16, fp32=torch.float32)


def configs() -> dict:
    """Of every family that tests have, and all with sinks or attention of their own."""
    found = {name: family_config(name) for name in EVERY_FAMILY}
    found |= {name: AutoConfig.for_model(name, **SIZES | more) for name, more in MODELS.items()}
    for name in ("bloom", "gptj", "mpt", "xglm"):
        found[name] = AutoConfig.for_model(name)
    found["heads of 64"] = family_config("gpt-oss", head_dim=64, num_key_value_heads=1)
    found["heads of 128"] = AutoConfig.for_model("gemma3_text")
    return found


def shapes() -> dict:
    """Of those, what estimates know, with their configurations."""
    found = {}
    for name, config in configs().items():
        try:
            found[name] = shape_from_config(config.to_dict(), name), config
        except ValueError:
            continue  # no estimate of such a model
    return found


@pytest.mark.parametrize("installed", [False, True])
def test_an_estimate_reckons_with_the_attention_that_the_models_code_is_given(
    installed, monkeypatch
):
    def why_not(device, dtype, size, *_):
        return "" if installed and size >= 64 else "is not installed"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(attention, "has_flash_attention_4", lambda: installed)
    monkeypatch.setattr(fa4, "why_not", why_not)
    compared = set()
    for name, (shape, config) in shapes().items():
        for device, machine in (("cuda", GPU), ("cpu", cpu_machine(1, 1))):
            for packing in (False, True):
                for dtype in DTYPES:
                    asked = RunConfig(packing=packing, precision=dtype)
                    taken, _ = of_code.choose_attention(
                        "auto", packing, config, torch.device(device), DTYPES[dtype]
                    )
                    found = attention.attention_of(asked, shape, machine)
                    assert found == taken, (name, device, packing, dtype)
                    compared.add(taken)
    assert compared >= {"sdpa", "eager", "flex_attention", "varlen", "torch_fa", "torch_fa_packed"}
    assert {"fa4", "fa4_packed"} <= compared or not installed


def test_what_is_asked_for_is_reckoned_with():
    shape = model_shape("gpt-oss-20b")
    for wanted in ("eager", "flex_attention"):
        asked = RunConfig(attn_implementation=wanted)
        assert attention.attention_of(asked, shape, GPU) == wanted
        assert resolve(asked, shape, GPU).model.attention == wanted


def peak(model: str, length: int, **settings) -> float:
    config = RunConfig(
        batch_size=2, context_length=length, gradient_accumulation_steps=1, **settings
    )
    shape = model_shape(model)
    return memory(shape, resolve(config, shape, GPU)).peak_allocated


def test_memory_grows_with_the_square_of_the_tokens_where_scores_or_masks_are_kept_and_else_not():
    """Three lengths, each twice the one before: what grows with the square grows by four times more."""
    kept = dict(activation_policy="keep_all", train_type="qlora")

    def square(model: str, **settings) -> float:
        short, middle, long = (peak(model, n, **kept | settings) for n in (2048, 4096, 8192))
        return (long - middle) / (middle - short)

    assert square("gpt-oss-20b") == pytest.approx(2, abs=0.1)
    assert square("gpt-oss-20b", packing=True) == pytest.approx(2, abs=0.1)
    assert square("gpt-oss-20b", attn_implementation="eager") > 3
    assert square("mistral-7b-v0.1") == pytest.approx(2, abs=0.1)
    assert square("mistral-7b-v0.1", attn_implementation="sdpa") > 2.12
    assert square("gpt-oss-20b", precision="fp32") > 3  # for which no flash kernel is


def test_eager_attention_with_sinks_was_measured_to_take_what_is_estimated():
    rows = [row for file in row_files(ROOT / "benchmarks" / "results") for row in read_rows(file)]
    measured = [c for c in compare(rows) if c.row.attention_backend == "eager"]
    assert measured
    for found in measured:
        assert abs(found.memory_error) < 0.05 and abs(found.time_error) < 0.1


def delta_net(heads: int, size: int, by_channel: bool) -> tuple[nn.Module, dict]:
    """transformers' mixer of Qwen3.5, or of Kimi Linear, on plain torch, and its config."""
    many = dict(hidden_size=64, num_hidden_layers=1, layer_types=["linear_attention"])
    if by_channel:
        config = family_config("Kimi Linear", linear_num_heads=heads, linear_head_dim=size, **many)
        mixer = KimiLinearDeltaAttention(config, 0)
    else:
        heads_of = dict(linear_num_key_heads=heads, linear_num_value_heads=heads)
        sizes = dict(linear_key_head_dim=size, linear_value_head_dim=size)
        config = Qwen3_5TextConfig(**many, **heads_of, **sizes)
        mixer = Qwen3_5GatedDeltaNet(config, 0)
    apply_delta_rule(mixer)
    return mixer.to(torch.bfloat16).requires_grad_(False), config.to_dict()


@pytest.mark.parametrize(
    "heads, size, by_channel, bound",
    [(2, 64, False, 0.05), (4, 32, False, 0.05), (2, 96, False, 0.05), (8, 32, True, 0.2)],
)
def test_a_delta_net_on_plain_torch_keeps_what_is_estimated(heads, size, by_channel, bound):
    """Traced in transformers' mixers, the inputs' gradients wanted and no weight's."""
    mixer, config = delta_net(heads, size, by_channel)
    given = torch.randn(1, 256, 64, dtype=torch.bfloat16, requires_grad=True)
    plan = Plan().change(micro_batch_size=1, context_length=256, state_kernels=False)
    shape = shape_from_config(config).kinds[0]
    frozen = saved_bytes(mixer, lambda: mixer(given))
    assert mixer_saved(shape, plan) == pytest.approx(frozen, rel=bound)
    # An adapted last layer keeps its input too.
    (mixer.o_proj if by_channel else mixer.out_proj).requires_grad_()
    more = _state_saved(shape, plan) - _state_saved(shape, plan.change(targets=("q_proj",)))
    assert more == saved_bytes(mixer, lambda: mixer(given)) - frozen


@pytest.mark.parametrize("heads, size", [(2, 64), (4, 32), (4, 128)])
@pytest.mark.parametrize("by_channel", [False, True])
def test_the_backward_of_a_delta_net_on_plain_torch_holds_what_is_estimated(
    heads, size, by_channel
):
    tokens = 512
    channels = [size] if by_channel else []
    given = [torch.randn(tokens, heads, size, dtype=torch.bfloat16) for _ in range(4)]
    given += [-torch.rand(tokens, heads, *channels), torch.rand(tokens, heads).bfloat16()]
    held = peak_bytes(lambda: delta_rule_backward(*given, 1, True))
    shape = shape_from_config(delta_net(heads, size, by_channel)[1]).kinds[0]
    plan = Plan().change(micro_batch_size=1, context_length=tokens, state_kernels=False)
    assert mixer_held(shape, plan) == pytest.approx(held, rel=0.05)
    assert mixer_held(shape, plan.change(state_kernels=True)) == 0


def test_a_run_without_kernels_for_delta_nets_says_so_and_takes_more(install):
    config = RunConfig(batch_size=2, context_length=4096, activation_policy="recompute_all")
    shape, plans = model_shape("Qwen/Qwen3.5-9B"), []
    for packages in ({"fla"}, set()):
        install(packages, triton="3.3.1")
        plans.append(resolve(config, shape, GPU))
    said = "flash-linear-attention is not installed: the delta nets of qwen3_5_text run on plain"
    assert [any(said in line for line in plan.choices) for plan in plans] == [False, True]
    with_kernels, without = (memory(shape, plan).peak_allocated for plan in plans)
    assert with_kernels + 1 < without
    fast, slow = (step_seconds(shape, H100, plan) for plan in plans)
    assert fast.parts["mixers"] == 0 < slow.parts["mixers"]
    assert fast.total + slow.parts["mixers"] < slow.total  # blocks run again
