"""Mamba 2's scan as one op: against transformers' function and models, and token by token."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

from fsdp_qlora.model import opaque_ops, state_space_mixers
from fsdp_qlora.model import state_space_scan as scans
from fsdp_qlora.model.own_rules import has_own_rule
from fsdp_qlora.model.state_space_mixers import apply_state_space_scan
from fsdp_qlora.model.state_space_scan import state_space_scan, state_space_scan_backward

from .families import SIZES, family_config
from .own_rules import assert_answers_as_transformers, assert_padded_rows_as_transformers, counted
from .test_delta_rule import InTf32, gradients, off

ROWS, HEADS, VALUES, GROUPS, STATE = 2, 6, 16, 2, 24
LIMITS = (0.05, 2.0)  # a third of steps are at one of them
SMALL = dict(vocab_size=SIZES["vocab_size"], hidden_size=64, num_hidden_layers=2)
# Mixers of other classes than those of the families.
OTHERS = {
    "Zamba2": AutoConfig.for_model(
        "zamba2",
        **SMALL,
        layers_block_type=["mamba", "hybrid"],
        num_attention_heads=4,
        num_key_value_heads=4,
        num_mem_blocks=1,
        mamba_d_state=16,
        mamba_ngroups=2,
        n_mamba_heads=8,
        mamba_headdim=16,
    ),
    "Mamba 2": AutoConfig.for_model(
        "mamba2", **SMALL, num_heads=8, head_dim=16, state_size=16, n_groups=2
    ),
}
FAMILIES = ["Granite 4 H", "Falcon-H1", "Bamba", "Nemotron 3", *OTHERS]


def given(
    tokens: int, dtype: torch.dtype, strength: float = 1.0, groups: int = GROUPS
) -> list[Tensor]:
    """Values, dt, keys and queries (B, T, ...); decay, skip and bias (H,), of `strength` times 1."""
    torch.manual_seed(0)
    shape = (ROWS, tokens)
    made = [torch.randn(*shape, HEADS, VALUES), torch.randn(*shape, HEADS)]
    made += [torch.randn(*shape, groups, STATE) for _ in range(2)]
    made += [-strength * (0.1 + torch.rand(HEADS)), torch.randn(HEADS), torch.randn(HEADS)]
    wide = [x.to(torch.promote_types(dtype, torch.float32)) for x in made[4:]]
    return [x.requires_grad_() for x in [x.to(dtype) for x in made[:4]] + wide]


def ours(*tensors: Tensor) -> Tensor:
    flat = [x.flatten(0, 1) for x in tensors[:4]]
    out = state_space_scan(*flat, *tensors[4:], ROWS, *LIMITS)
    return out.unflatten(0, tensors[0].shape[:2])


def theirs(value, dt, key, query, decay, skip, bias) -> Tensor:
    more = dict(D=skip, dt_bias=bias, dt_softplus=True, dt_limit=LIMITS)
    return mamba2_chunk_scan(value, dt, decay, key, query, 32, **more)


def token_by_token(*tensors: Tensor) -> Tensor:
    """The recurrence as the paper writes it, in fp64."""
    value, dt, key, query, decay, skip, bias = (x.double() for x in tensors)
    dt = softplus(dt + bias).clamp(*LIMITS)
    key, query = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (key, query))
    state, read = value.new_zeros(ROWS, HEADS, VALUES, STATE), []
    for t in range(value.shape[1]):
        added = dt[:, t, :, None] * value[:, t]
        state = state * (dt[:, t] * decay).exp()[..., None, None]
        state = state + added[..., None] * key[:, t, :, None]
        read.append((state * query[:, t, :, None]).sum(-1) + skip[:, None] * value[:, t])
    return torch.stack(read, 1)


class InFp64(TorchFunctionMode):
    """Lets transformers' function, which goes over to fp32, compute in fp64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].double()
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("tokens", [1, 50, 128, 300])
@pytest.mark.parametrize("part", [scans.PART, 1500, 1])  # several groups, some heads, each head
def test_what_it_gives_and_its_gradients_are_those_of_transformers(
    part, tokens, groups, monkeypatch
):
    monkeypatch.setattr(scans, "PART", part)
    tensors = given(tokens, torch.float64, groups=groups)
    with InFp64():
        expected = theirs(*tensors)
    found = ours(*tensors)
    assert found.dtype == expected.dtype == torch.float64 and off(found, expected) < 1e-13
    for a, b in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert a.norm() == b.norm() == 0 or off(a, b) < 1e-11


def test_in_fp32_it_is_that_too_and_in_bf16_nearer_to_what_is_exact():
    tensors = given(200, torch.float32)
    expected, found = theirs(*tensors), ours(*tensors)
    assert off(found, expected) < 3e-6
    for a, b in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert off(a, b) < 3e-5
    tensors = given(200, torch.bfloat16)
    exact, found, expected = (f(*tensors) for f in (token_by_token, ours, theirs))
    assert found.dtype == torch.bfloat16 and off(found, exact) < off(expected, exact)
    rounded = (gradients(x, tensors) for x in (exact, found, expected.bfloat16()))
    for a, b, c in zip(*rounded, strict=True):
        assert b.dtype == c.dtype and off(b, a) < 1.1 * off(c, a)


@pytest.mark.parametrize("strength", [1e-3, 1.0, 30.0])
def test_it_is_exact_where_states_last_and_where_they_are_gone_at_once(strength):
    tensors = given(300, torch.float32, strength)
    expected, found = token_by_token(*tensors), ours(*tensors)
    assert off(found, expected) < 5e-6
    for a, b in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert off(a, b) < 1e-4  # a decay's that is gone at once is a small difference of sums


@pytest.mark.parametrize("strength", [1e-3, 1.0])
def test_on_tensor_cores_its_error_is_hardly_more_than_rounding_to_bf16(strength, monkeypatch):
    monkeypatch.setattr(opaque_ops, "_on_gpu", lambda x: True)
    tensors = [x.detach() for x in given(1000, torch.bfloat16, strength)]
    wide = [x.double().requires_grad_() for x in tensors]
    out = token_by_token(*wide)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = [out, *torch.autograd.grad(out, wide, d_out.double())]
    flat = [*(x.flatten(0, 1) for x in tensors[:4]), *tensors[4:]]
    with InTf32() as products:
        found = [state_space_scan._init_fn(*flat, ROWS, *LIMITS)]
        found += state_space_scan_backward._init_fn(d_out.flatten(0, 1), *flat, ROWS, *LIMITS)
    assert products.rounded > 8
    for a, b in zip(found, expected, strict=True):
        of_rows = a.unflatten(0, b.shape[:2]) if a.dim() > 1 else a
        assert off(of_rows, b) < max(1.2 * off(b.bfloat16(), b), 1e-3)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("tokens", [64, 150])
def test_torch_may_trace_it_as_any_op(tokens):
    tensors = [x.detach() for x in given(tokens, torch.float32)]
    flat = [*(x.flatten(0, 1) for x in tensors[:4]), *tensors[4:]]
    given_ = (*(x.requires_grad_() for x in flat), ROWS, 0.0, float("inf"))
    torch.library.opcheck(state_space_scan, given_)


def test_under_autocast_it_still_sums_in_fp32():
    tensors = given(100, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(*tensors)
        grads = gradients(found, tensors)
    expected = ours(*tensors)
    for a, b in zip([found, *grads], [expected, *gradients(expected, tensors)], strict=True):
        assert torch.equal(a, b)


def test_it_keeps_its_inputs_alone():
    tensors = [x.detach() for x in given(256, torch.bfloat16)]
    tensors = [*(x.flatten(0, 1) for x in tensors[:4]), *tensors[4:]]
    tensors = [x.requires_grad_() for x in tensors]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        state_space_scan(*tensors, ROWS, *LIMITS)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in tensors]


def config_of(family: str):
    return copy.deepcopy(OTHERS.get(family)) or family_config(family)


def pair(family: str) -> tuple[nn.Module, nn.Module]:
    """A random model with the op, and the same as transformers makes it."""
    torch.manual_seed(0)
    changed, plain = (
        AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).eval()
        for _ in range(2)
    )
    with torch.no_grad():
        for p in plain.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.1)
    changed.load_state_dict(plain.state_dict())
    apply_state_space_scan(changed)
    apply_state_space_scan(changed)  # once more changes nothing
    return changed, plain


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_have_the_logits_and_gradients_of_transformers(family, monkeypatch):
    calls = counted(monkeypatch, state_space_mixers, "state_space_scan")
    assert_padded_rows_as_transformers(*pair(family), calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family):
    assert_answers_as_transformers(*pair(family))


@pytest.mark.parametrize(
    "installed, gated",
    [(set(), True), ({"mamba_ssm"}, True), ({"mamba_ssm", "causal_conv1d"}, False)],
)
def test_the_op_is_where_kernels_are_missing(installed, gated, install):
    install(installed)
    for family in (*FAMILIES, "Qwen3.5", "Qwen3"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config_of(family))
        kinds = [type(m) for m in model.modules()]
        apply_state_space_scan(model)
        replaced = gated and family in FAMILIES
        assert any(has_own_rule(m) for m in model.modules()) == replaced
        assert replaced or [type(m) for m in model.modules()] == kinds


def test_half_of_the_kernels_is_not_asked(install, monkeypatch):
    """mamba-ssm's mixer as a whole calls causal-conv1d's, and fails without."""

    def fails(*args, **kwargs):
        raise TypeError("'NoneType' object is not callable")

    monkeypatch.setattr(nemotron, "mamba2_split_conv1d_scan_combined", fails)
    install({"mamba_ssm"})
    changed, plain = pair("Nemotron 3")
    ids = torch.randint(3, SIZES["vocab_size"], (1, 20))
    assert changed.train()(ids, use_cache=False).logits.isfinite().all()
    with pytest.raises(TypeError, match="not callable"):
        plain.train()(ids, use_cache=False)


def test_a_state_that_goes_on_or_is_asked_for_is_transformers():
    scan = state_space_mixers._own_scan(mamba2_chunk_scan)
    value, dt, key, query, decay, skip, bias = given(40, torch.float32)
    more = dict(D=skip, dt_bias=bias, dt_softplus=True, dt_limit=LIMITS)
    first, state = scan(value, dt, decay, key, query, 32, return_final_states=True, **more)
    expected, last = mamba2_chunk_scan(
        value, dt, decay, key, query, 32, return_final_states=True, **more
    )
    assert torch.equal(first, expected) and torch.equal(state, last)
    found = scan(value, dt, decay, key, query, 32, initial_states=state, **more)
    expected = mamba2_chunk_scan(value, dt, decay, key, query, 32, initial_states=last, **more)
    assert torch.equal(found, expected)
