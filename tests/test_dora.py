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
from fsdp_qlora.adapters.dora import adapted_norms, turned_linear
from fsdp_qlora.adapters.dropout import dropout_seed, dropped
from fsdp_qlora.build import compile_blocks
from fsdp_qlora.config import RunConfig
from fsdp_qlora.lora_init import init_adapters
from fsdp_qlora.quantization.formats import FrozenWeight
from fsdp_qlora.quantization.quantize import QuantLinear, quantize_linears, quantize_rows

from .allocations import peak_bytes
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
    plain = dora.turned_linear
    monkeypatch.setattr(
        "fsdp_qlora.adapters.lora_layer.turned_linear", lambda *args: (plain(*args)[0], held)
    )
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


def whole_norms(dense, a, b) -> torch.Tensor:
    """|W + scaling B A| of each row, with B A made, in fp64."""
    return (dense.double() + SCALING * b.double() @ a.double()).norm(dim=1)


@pytest.mark.parametrize("base", ["nf4", "int8", "hqq4", ""])
@pytest.mark.parametrize("share", [0.0, 1e-3, 1.0, 30.0])
def test_norms_are_those_of_the_whole_weight_however_large_the_change_is(base, share):
    """share: of |W| that B A has."""
    weight, absmax = values(O, 192, seed=3), None
    if base:
        weight, absmax = quantize_rows(weight, base)
    dense = FrozenWeight(weight, absmax, 192, base).dense(torch.float32)
    a, b = values(R, 192, seed=1), values(O, R, seed=2)
    b *= share * dense.norm() / (SCALING * b @ a).norm()
    norms = adapted_norms(weight, absmax, a, b, SCALING, 192, base, torch.float32)
    torch.testing.assert_close(norms.double(), whole_norms(dense, a, b), rtol=1e-6, atol=0)


def test_norms_of_rows_that_the_change_nearly_takes_away_keep_four_digits():
    """A hundredth of a row's square is left, so a rounding of the whole counts a hundred times."""
    a, b = values(R, 192, seed=1), values(O, R, seed=2)
    weight = -SCALING * b @ a / 0.9
    norms = adapted_norms(weight, None, a, b, SCALING, 192, "", torch.float32)
    torch.testing.assert_close(norms.double(), whole_norms(weight, a, b), rtol=1e-4, atol=0)


def test_a_row_that_the_change_takes_away_has_no_norm():
    a, b = values(R, 192, seed=1), values(O, R, seed=2)
    norms = adapted_norms(-SCALING * b @ a, None, a, b, SCALING, 192, "", torch.float32)
    assert norms.isfinite().all() and norms.max() < 1e-2 * (b @ a).norm(dim=1).min()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_gives_its_norms_and_passes_opcheck(dtype, monkeypatch):
    monkeypatch.setattr(dora, "PART_VALUES", 3 * I)
    weight, absmax = quantize_rows(values(O, I, seed=3))
    a, b, x = values(R, I, seed=1), values(O, R, seed=2), values(5, I).to(dtype)
    xa, token = x @ a.to(dtype).t(), torch.zeros(1, dtype=dtype).expand(5, O)
    args = token, x, xa, weight, absmax, a, b, SCALING, I, "nf4"
    torch.library.opcheck(turned_linear, args)
    y, norms = turned_linear(*args)
    dense = FrozenWeight(weight, absmax, I, "nf4").dense(torch.float32)
    exact = x.float() @ (dense + SCALING * b @ a).t()
    within = 1e-5 if dtype == torch.float32 else 2**-8
    assert (y.float() - exact).norm() < within * exact.norm()
    assert y.dtype == dtype and norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), whole_norms(dense, a, b), rtol=within / 2, atol=0)


def test_a_layer_makes_its_weight_once_in_each_direction(monkeypatch):
    """The norms are of the weight that the product has."""
    layer, made, plain = ours("nf4"), [], FrozenWeight.dense
    monkeypatch.setattr(FrozenWeight, "dense", lambda w, dtype: made.append(1) or plain(w, dtype))
    y = layer(values(5, I).requires_grad_())
    assert len(made) == 1
    y.sum().backward()
    assert len(made) == 2


@pytest.mark.parametrize("product_dtype", ["", "fp8"])
def test_where_a_kernel_unpacks_the_whole_sum_norms_are_those_of_its_rows(
    product_dtype, monkeypatch
):
    """As on a GPU: W + scaling B A in bf16, made once for product and norms."""
    made = []

    def unpacked(w, a, b, scaling):
        made.append(len(w.weight))
        return torch.addmm(w.dense(torch.float32), b, a, alpha=scaling).bfloat16()

    monkeypatch.setattr(dora, "can_unpack_adapted", lambda w, rank, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(dora, "unpack_adapted", unpacked)
    monkeypatch.setattr(dora, "PART_VALUES", O // 3 * I)
    layer = ours("nf4", bias=True, dtype=torch.bfloat16)
    layer.product_dtype = product_dtype
    found, exact = all_results(layer, torch.bfloat16), all_results(pefts("nf4", bias=True))
    for name, value in found.items():
        within = 0.1 if product_dtype else 2**-6
        assert (value.float() - exact[name]).norm() / exact[name].norm() < within, name
    assert made == ([O // 3] * 3 if product_dtype else [O])


def test_norms_copy_a_part_of_the_weight_and_never_make_the_low_rank_product(monkeypatch):
    monkeypatch.setattr(dora, "PART_VALUES", 8 * 512)
    weight, a, b = (values(*size).bfloat16() for size in ((512, 512), (R, 512), (512, R)))
    x, token = values(4, 512).bfloat16(), torch.zeros(1).bfloat16().expand(4, 512)
    args = token, x, x @ a.t(), weight, None, a.float(), b.float(), SCALING, 512, ""
    assert peak_bytes(lambda: turned_linear(*args)) < weight.nbytes / 4


def test_norms_of_products_in_fp8_are_those_of_the_weight_in_16_bits():
    exact = all_results(pefts("nf4", bias=True))
    layer = ours("nf4", bias=True, dtype=torch.bfloat16)
    layer.product_dtype = "fp8"
    found = all_results(layer, torch.bfloat16)
    for name, value in found.items():
        assert (value.float() - exact[name]).norm() / exact[name].norm() < 0.1, name


def test_norms_follow_an_update_of_the_adapter():
    layer, theirs = ours("nf4"), pefts("nf4")
    for seed in (21, 22):
        torch.testing.assert_close(all_results(layer), all_results(theirs), rtol=1e-5, atol=1e-5)
        for each in (layer, theirs):
            for part in (each.lora_A, each.lora_B):
                weight = part["default"].weight
                weight.data += 0.3 * values(*weight.shape, seed=seed)
            each.zero_grad()


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
