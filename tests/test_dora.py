"""DoRA layers against PEFT's own over bitsandbytes and nn.Linear: values, gradients, dropout, bf16.

Shapes: N tokens, I inputs, O outputs, R rank.  x (N, I), A (R, I), B (O, R), m (O,)
"""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_qlora.adapters import LoraLinear, apply_adapters, dora, lora_config, trainable_parameters
from fsdp_qlora.adapters.dora import adapted_norms
from fsdp_qlora.adapters.dropout import dropout_seed, dropped
from fsdp_qlora.build import compile_blocks
from fsdp_qlora.config import RunConfig
from fsdp_qlora.lora_init import init_adapters
from fsdp_qlora.quantization.formats import FrozenWeight
from fsdp_qlora.quantization.quantize import QuantLinear, quantize_linears, quantize_rows

from .test_adapters import (
    ALPHA,
    IDS,
    SCALING,
    I,
    O,
    R,
    base_linear,
    bnb_linear,
    results,
    values,
    with_values,
)
from .tiny import TARGETS, cut_rows, save_tiny

torch.set_num_threads(1)


def moved(layer):
    """The layer with weights in A and B, and magnitudes that are not the norms."""
    with_values(layer)
    layer.lora_magnitude_vector["default"].weight.data *= 1 + 0.2 * values(O, seed=9)
    return layer.train()


def ours(base: str, bias=False, dropout=0.0, dtype=torch.float32):
    linear = base_linear(bias, dtype)
    if base != "plain":
        linear = QuantLinear.from_linear(linear, base)
    config = lora_config(rank=R, alpha=ALPHA, dropout=dropout, use_dora=True)
    layer = LoraLinear(linear, "default", config, r=R, lora_alpha=ALPHA)
    for adapter in (layer.lora_A, layer.lora_B):
        adapter.float()
    layer.lora_variant["default"].init(layer, "default")  # a magnitude in fp32, as on a model
    return moved(layer)


def pefts(base: str, bias=False, dropout=0.0, dtype=torch.float32):
    linear = base_linear(bias, dtype)
    if base == "nf4":
        linear = bnb_linear(linear, bias, dtype)
    config = LoraConfig(
        r=R, lora_alpha=ALPHA, lora_dropout=dropout, use_dora=True, target_modules=["proj"]
    )
    layer = inject_adapter_in_model(config, nn.ModuleDict(dict(proj=linear)))["proj"]
    if dropout:
        layer.lora_dropout["default"] = OurMask(dropout)
    return moved(layer)


class OurMask(nn.Module):
    """Dropout that takes away what a layer of ours does when it draws the next seed."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x):
        return x * dropped(torch.ones_like(x), dropout_seed(x, x), self.p)


def all_results(layer, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Output and every gradient, the magnitude's too, with the same dropout for every layer."""
    torch.manual_seed(0)
    found = results(layer, dtype)
    return found | dict(dm=layer.lora_magnitude_vector["default"].weight.grad)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_outputs_and_gradients_equal_peft_in_fp32(base, bias, dropout):
    """Under dropout too: what it takes away goes through W alone, as in PEFT."""
    torch.testing.assert_close(
        all_results(ours(base, bias, dropout)),
        all_results(pefts(base, bias, dropout)),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_bf16_outputs_and_gradients_are_near_fp32(base):
    """As for LoRA, with one more rounding: of the product, before it is scaled."""
    exact = all_results(pefts(base, bias=True))
    rounded = all_results(ours(base, bias=True, dtype=torch.bfloat16), torch.bfloat16)
    assert rounded["y"].dtype == rounded["dx"].dtype == torch.bfloat16
    assert rounded["da"].dtype == rounded["db"].dtype == rounded["dm"].dtype == torch.float32
    for name, value in rounded.items():
        assert (value.float() - exact[name]).norm() / exact[name].norm() < 2**-7, name


@pytest.mark.parametrize("base", ["nf4", "int8", "hqq4", "hqq3"])
def test_a_layer_of_any_format_has_the_output_of_its_formula(base):
    layer = ours(base, bias=True)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    whole = layer.base_layer.dequantize(torch.float32) + SCALING * b @ a
    whole *= (layer.lora_magnitude_vector["default"].weight / whole.norm(dim=1))[:, None]
    x = values(5, I)
    torch.testing.assert_close(
        layer(x), x @ whole.t() + layer.base_layer.bias, rtol=1e-5, atol=1e-5
    )


def test_gradients_equal_finite_differences_of_the_layer_with_its_norm_held(monkeypatch):
    layer = ours("plain", bias=True).double()
    parts = [
        layer.lora_A["default"],
        layer.lora_B["default"],
        layer.lora_magnitude_vector["default"],
    ]
    held = dora.norms_of(layer.base_layer, *(p.weight for p in parts[:2]), SCALING, torch.float64)
    monkeypatch.setattr("fsdp_qlora.adapters.lora.norms_of", lambda *_: held)
    weights = [part.weight for part in parts]
    for part in parts:
        part._parameters.clear()

    def forward(x, *new):
        for part, weight in zip(parts, new, strict=True):
            part.weight = weight
        return layer(x)

    assert torch.autograd.gradcheck(
        forward, (values(3, I).double().requires_grad_(), *weights), fast_mode=True
    )


# ---- norms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_norms_are_made_a_part_at_a_time_and_pass_opcheck(quantized, adapted, monkeypatch):
    weight, absmax = values(10, 72, seed=3), None
    if quantized:
        weight, absmax = quantize_rows(weight)
    a, b = (values(R, 72, seed=1), values(10, R, seed=2)) if adapted else (None, None)
    args = weight, absmax, a, b, SCALING, 72, "nf4" if quantized else "", torch.bfloat16
    torch.library.opcheck(adapted_norms, args)
    whole = FrozenWeight(weight, absmax, 72, "nf4").dense(torch.float32)
    expected = (whole + SCALING * b @ a if adapted else whole).norm(dim=1)
    for rows in (1, 3, 10):
        monkeypatch.setattr(dora, "PART_VALUES", rows * 72)
        torch.testing.assert_close(adapted_norms(*args), expected)


# ---- a model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"))


def dora_model(folder, quantized=True, **settings):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if quantized:
        quantize_linears(model)
    return apply_adapters(model, lora_config(rank=R, use_dora=True, **settings))


@pytest.mark.parametrize("quantized", [False, True])
def test_a_loaded_model_starts_as_its_base_with_pefts_names(folder, quantized):
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if quantized:
        quantize_linears(base)
    model = dora_model(folder, quantized)
    torch.testing.assert_close(model(IDS).logits, base(IDS).logits, rtol=1e-5, atol=1e-5)
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(task_type="CAUSAL_LM", r=R, use_dora=True, target_modules=TARGETS),
    )
    shapes = {n: p.shape for n, p in trainable_parameters(theirs).items()}
    assert {n: p.shape for n, p in trainable_parameters(model).items()} == shapes
    assert isinstance(model, PeftModel)


@pytest.mark.parametrize("parts", [1, 3])
def test_initial_magnitudes_are_the_norms_of_the_loaded_rows_however_they_are_split(
    folder, parts, monkeypatch
):
    model = dora_model(folder)
    expected = {n: p.clone() for n, p in trainable_parameters(model).items() if "magnitude" in n}
    for p in trainable_parameters(model).values():
        p.data.fill_(float("nan"))
    for rank in range(parts):
        monkeypatch.setattr("fsdp_qlora.lora_init.default.local_rows", cut_rows(rank, parts))
        init_adapters(model, 0)
    assert len(expected) == 14
    for name, norms in expected.items():
        torch.testing.assert_close(trainable_parameters(model)[name].data, norms.data)


def gradients(model) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {n.replace("_orig_mod.", ""): p.grad for n, p in trainable_parameters(model).items()}


def test_compiled_blocks_have_equal_gradients(folder):
    """With layers of one input joined, as for LoRA: the scale of each output comes after."""
    model = dora_model(folder)
    init_adapters(model, 0)
    for name, p in trainable_parameters(model).items():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    eager = gradients(copy.deepcopy(model.train()))
    compile_blocks(model)
    assert len(eager) == 3 * 14
    torch.testing.assert_close(gradients(model), eager, rtol=1e-5, atol=1e-6)


def test_disable_adapter_gives_the_base_model(folder):
    base = quantize_linears(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    model = dora_model(folder)
    for name, p in trainable_parameters(model).items():
        if "magnitude" in name:
            p.data *= 2
    with model.disable_adapter():
        disabled = model(IDS).logits
    torch.testing.assert_close(disabled, base(IDS).logits, rtol=0, atol=0)
    assert not torch.allclose(model(IDS).logits, disabled)


def test_the_original_scripts_names_are_quant_and_adapter():
    for name, quant in (("bnb_dora", "nf4"), ("hqq_dora", "hqq")):
        config = RunConfig(train_type=name)
        assert (config.quant, config.adapter) == (quant, "dora")
    config = RunConfig(train_type="lora", adapter="dora")
    assert (config.quant, config.adapter) == ("none", "dora")
