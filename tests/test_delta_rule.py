"""The gated delta rule as one op: against transformers' functions and models, and token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from fsdp_qlora.catalog.hardware import find_gpu
from fsdp_qlora.catalog.machine import Machine
from fsdp_qlora.catalog.shapes import shape_from_config
from fsdp_qlora.config import RunConfig
from fsdp_qlora.estimate import resolve
from fsdp_qlora.model import delta_nets, opaque_ops
from fsdp_qlora.model import delta_rule as rules
from fsdp_qlora.model.delta_nets import apply_delta_rule
from fsdp_qlora.model.delta_rule import delta_rule, delta_rule_backward
from fsdp_qlora.model.own_rules import has_own_rule

from .families import family_config, two_alike
from .own_rules import assert_answers_as_transformers, assert_padded_rows_as_transformers, counted

THEIRS = dict(
    head=qwen.torch_chunk_gated_delta_rule,
    channel=kimi.chunk_kimi_delta_attention,
)
DELTA_NETS = ["Qwen3.5", "Qwen3.5-MoE", "Qwen3-Next", "OLMo Hybrid", "Kimi Linear"]
ROWS, HEADS, KEYS, VALUES = 2, 3, 16, 24


def given(decays: str, tokens: int, dtype: torch.dtype, strength: float = 1.0) -> list[Tensor]:
    """query, key, value, decay and beta of rows (B, T, H, ...); keys that are alike, as of real text."""
    torch.manual_seed(0)
    shape = (ROWS, tokens, HEADS)
    values = VALUES if decays == "head" else KEYS
    decay = torch.randn(*shape, *([KEYS] if decays == "channel" else []))
    made = [torch.randn(*shape, KEYS), torch.randn(*shape, KEYS) + 0.5, torch.randn(*shape, values)]
    made = [x.to(dtype) for x in made]
    made += [-strength * nn.functional.softplus(decay), torch.randn(shape).sigmoid().to(dtype)]
    return [x.requires_grad_() for x in made]


def ours(query, key, value, decay, beta) -> Tensor:
    flat = [x.flatten(0, 1) for x in (query, key, value, decay, beta)]
    return delta_rule(*flat, len(query), True).unflatten(0, query.shape[:2])


def token_by_token(query, key, value, decay, beta) -> Tensor:
    """The rule as papers write it, in fp64."""
    query, key, value, decay, beta = (x.double() for x in (query, key, value, decay, beta))
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    decay = decay if decay.dim() == 4 else decay[..., None]
    state = query.new_zeros(ROWS, HEADS, key.shape[-1], value.shape[-1])
    read = []
    for t in range(query.shape[1]):
        state = state * decay[:, t].exp()[..., None]
        wrong = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], beta[:, t, :, None] * wrong)
        read.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(read, 1) * query.shape[-1] ** -0.5


def gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(out, tensors, torch.randn(out.shape).to(out.dtype)))


def off(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("tokens", [1, 50, 64, 200])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 3e-6), (torch.bfloat16, 3e-4)])
@pytest.mark.parametrize("decays", THEIRS)
def test_what_it_gives_and_its_gradients_are_those_of_transformers(decays, dtype, bound, tokens):
    tensors = given(decays, tokens, dtype)
    query, key, value, decay, beta = tensors
    more = dict(g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    expected, _ = THEIRS[decays](query, key, value, **more)
    found = ours(*tensors)
    assert found.dtype == expected.dtype and off(found, expected) < bound
    for a, b in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert a.dtype == b.dtype and (a.norm() == b.norm() == 0 or off(a, b) < bound)


@pytest.mark.parametrize("strength", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("decays", THEIRS)
def test_it_is_exact_where_states_last_and_where_they_are_gone_at_once(decays, strength):
    tensors = given(decays, 150, torch.float32, strength)
    expected, found = token_by_token(*tensors), ours(*tensors)
    assert off(found, expected) < 2e-6
    for a, b in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert off(a, b) < 1e-4  # a decay's that is gone at once is a small difference of sums


class InTf32(TorchDispatchMode):
    """Products of fp32 as a GPU makes them where torch lets it: of factors with 11 bits, summed in fp32."""

    def __init__(self):
        super().__init__()
        self.rounded = self.exact = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name
        if name in ("aten::bmm", "aten::baddbmm_"):
            rounds = torch.get_float32_matmul_precision() == "high"
            self.rounded, self.exact = self.rounded + rounds, self.exact + (not rounds)
            first = name == "aten::baddbmm_"
            if rounds:
                factors = (of_11_bits(x) for x in args[first : first + 2])
                args = (*args[:first], *factors, *args[first + 2 :])
        return op(*args, **kwargs or {})


def of_11_bits(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("strength", [1e-3, 1.0])
@pytest.mark.parametrize("decays", THEIRS)
def test_on_tensor_cores_its_error_is_hardly_more_than_rounding_to_bf16(
    decays, strength, monkeypatch
):
    monkeypatch.setattr(opaque_ops, "_on_gpu", lambda x: True)
    tensors = [x.detach() for x in given(decays, 1000, torch.bfloat16, strength)]
    wide = [x.double().requires_grad_() for x in tensors]
    out = token_by_token(*wide)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = [out, *torch.autograd.grad(out, wide, d_out.double())]
    flat = [x.flatten(0, 1) for x in tensors]
    with InTf32() as products:
        found = [delta_rule._init_fn(*flat, ROWS, True)]
        found += delta_rule_backward._init_fn(d_out.flatten(0, 1), *flat, ROWS, True)
    assert products.rounded > 20 and products.exact > 3 * 1000 / rules.CHUNK - 4
    for a, b in zip(found, expected, strict=True):
        rounded = off(b.bfloat16(), b)
        assert off(a.unflatten(0, b.shape[:2]), b) < 1.2 * rounded
    assert torch.get_float32_matmul_precision() == "highest"


def test_products_of_fp32_inputs_and_those_set_by_torchs_newer_names_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(opaque_ops, "_on_gpu", lambda x: True)
    flat = [x.detach().flatten(0, 1) for x in given("head", 100, torch.float32)]
    with InTf32() as products:
        delta_rule._init_fn(*flat, ROWS, True)
    assert not products.rounded and products.exact
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        before = matmul.fp32_precision
        matmul.fp32_precision = "tf32"
        try:
            delta_rule._init_fn(*[x.bfloat16() for x in flat], ROWS, True)
            assert matmul.fp32_precision == "tf32"
        finally:
            matmul.fp32_precision = before


@pytest.mark.parametrize("tokens, rows", [(64, 1), (64, 2), (70, 2)])
@pytest.mark.parametrize("decays", THEIRS)
def test_torch_may_trace_it_as_any_op(decays, tokens, rows):
    tensors = [x.detach()[:rows] for x in given(decays, tokens, torch.float32)]
    flat = [x.flatten(0, 1).requires_grad_() for x in tensors]
    torch.library.opcheck(delta_rule, (*flat, rows, True))


@pytest.mark.parametrize("decays", THEIRS)
def test_under_autocast_it_still_sums_in_fp32(decays):
    tensors = given(decays, 100, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(*tensors)
        grads = gradients(found, tensors)
    expected = ours(*tensors)
    for a, b in zip([found, *grads], [expected, *gradients(expected, tensors)], strict=True):
        assert torch.equal(a, b)


def pair(family: str) -> tuple[nn.Module, nn.Module]:
    """A random model with the op, and the same as transformers makes it."""
    changed, plain = two_alike(family)
    apply_delta_rule(changed)
    apply_delta_rule(changed)  # once more changes nothing
    return changed, plain


@pytest.mark.parametrize("family", DELTA_NETS)
def test_padded_rows_have_the_logits_and_gradients_of_transformers(family, monkeypatch):
    calls = counted(monkeypatch, delta_nets, "delta_rule")
    assert_padded_rows_as_transformers(*pair(family), calls)


@pytest.mark.parametrize("family", DELTA_NETS)
def test_answers_are_those_of_transformers(family):
    assert_answers_as_transformers(*pair(family))


def test_a_mixer_that_has_its_rule_as_an_attribute_calls_the_op():
    """As those of transformers 5.3."""

    class OlderNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.chunk_gated_delta_rule = THEIRS["head"]

        def forward(self, query, key, value, decay, beta):
            more = dict(initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True)
            return self.chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, **more)

    net, tensors = OlderNet(), given("head", 70, torch.float32)
    expected, _ = net(*tensors)
    apply_delta_rule(net)
    found, state = net(*tensors)
    assert state is None and "delta_rule" in type(found.grad_fn.next_functions[0][0]).__name__
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "hopper, triton, installed, gated, by_channel",
    [
        (True, "3.6.0", {"fla"}, True, False),
        (True, "3.4.0", {"fla"}, True, False),
        (True, "3.7.1", {"fla"}, False, False),
        (True, "3.3.1", {"fla"}, False, False),
        (True, "3.6.0", {"fla", "tilelang"}, False, False),
        (False, "3.6.0", {"fla"}, False, False),
        (True, "3.6.0", set(), True, True),
        (False, "3.6.0", set(), True, True),
    ],
)
def test_the_op_is_where_kernels_are_missing_or_give_wrong_gradients(
    hopper, triton, installed, gated, by_channel, install, monkeypatch
):
    """In runs, and in estimates of the same machine; elsewhere a model stays as transformers makes it."""
    install(installed, triton)
    monkeypatch.setattr(delta_nets, "is_hopper", lambda: hopper)
    gpu = find_gpu("H200" if hopper else "A100 80GB")
    for family in DELTA_NETS:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(family_config(family))
        kinds = [type(m) for m in model.modules()]
        apply_delta_rule(model)
        replaced = by_channel if family == "Kimi Linear" else gated
        assert any(has_own_rule(m) for m in model.modules()) == replaced
        assert replaced or [type(m) for m in model.modules()] == kinds
        shape = shape_from_config(family_config(family).to_dict())
        plan = resolve(RunConfig(context_length=512), shape, Machine(gpu=gpu, memory_gib=79))
        assert plan.model.state_kernels != replaced
        remedy = "tilelang" if installed else "flash-linear-attention"
        assert any(f"pip install {remedy})" in said for said in plan.choices) == replaced


def test_it_keeps_its_inputs_alone():
    tensors = [
        x.detach().flatten(0, 1).requires_grad_() for x in given("head", 256, torch.bfloat16)
    ]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        delta_rule(*tensors, ROWS, True)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in tensors]
