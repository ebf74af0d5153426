"""LoRA layers against PEFT's own over bitsandbytes and nn.Linear: values, gradients, what is kept.

Shapes: N tokens, I inputs, O outputs, R rank.  x (N, I), A (R, I), B (O, R)
"""

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from fsdp_qlora.adapters import (
    LoraLinear,
    adapter_counts,
    apply_adapters,
    lora_config,
    resolve_targets,
    trainable_parameters,
)
from fsdp_qlora.adapters.dropout import drop_inputs, dropped
from fsdp_qlora.adapters.lora_ops import adapted_inputs, adapted_linear, adapted_linear_backward
from fsdp_qlora.adapters.shared_inputs import SharedInputs
from fsdp_qlora.choices import POLICIES
from fsdp_qlora.config import RunConfig
from fsdp_qlora.dist import process_group
from fsdp_qlora.export.save import save_adapter
from fsdp_qlora.loading import materialize, meta_model
from fsdp_qlora.lora_init import init_adapters, initial_a
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.quantization.formats import quantize_rows
from fsdp_qlora.quantization.quantize import QuantLinear, quantize_linears
from tests.parts import rest, slow

from .tiny import CONFIGS, TARGETS, cut_rows, save_tiny

torch.set_num_threads(1)  # threads that share a tiny product only wait for each other

I, O, R, ALPHA = 128, 96, 4, 8
SCALING = ALPHA / R


def values(*shape, seed=0, dtype=torch.float32):
    """Normal values that bf16 holds exactly, so that bf16 and fp32 runs start from the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(dtype)


def with_values(layer):
    """The layer with weights in A and B, so that every gradient is of consequence."""
    layer.lora_A["default"].weight.data = values(R, I, seed=1) / math.sqrt(I)
    layer.lora_B["default"].weight.data = values(O, R, seed=2) / math.sqrt(R)
    return layer


def base_linear(bias: bool, dtype=torch.float32) -> nn.Linear:
    linear = nn.Linear(I, O, bias)
    linear.weight.data = values(O, I, seed=3) / 16
    if bias:
        linear.bias.data = values(O, seed=4)
    return linear.to(dtype).requires_grad_(False)


def our_layer(base: str, bias: bool = False, dropout: float = 0.0, dtype=torch.float32):
    linear = base_linear(bias, dtype)
    if base == "nf4":
        linear = QuantLinear.from_linear(linear)
    config = lora_config(rank=R, alpha=ALPHA, dropout=dropout)
    return with_values(LoraLinear(linear, "default", config, r=R, lora_alpha=ALPHA))


def bnb_linear(linear: nn.Linear, bias: bool, dtype) -> Linear4bit:
    """bitsandbytes' 4-bit form of a linear layer."""
    quant = Linear4bit(I, O, bias, dtype, quant_type="nf4")
    quant.weight = Params4bit(
        linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False
    )
    quant.bias = linear.bias
    return quant.to("cpu")


def peft_layer(base: str, bias: bool = False, dtype=torch.float32):
    """PEFT's LoRA layer over bitsandbytes' Linear4bit or nn.Linear."""
    linear = base_linear(bias, dtype)
    if base == "nf4":
        linear = bnb_linear(linear, bias, dtype)
    model = inject_adapter_in_model(
        LoraConfig(r=R, lora_alpha=ALPHA, target_modules=["proj"]), nn.ModuleDict(dict(proj=linear))
    )
    return with_values(model["proj"])


def results(layer, dtype=torch.float32, leading=(2, 3)) -> dict[str, torch.Tensor]:
    """Output and every gradient of a layer, for the same x and dY."""
    x = values(*leading, I, seed=5, dtype=dtype).requires_grad_()
    y = layer(x)
    y.backward(values(*leading, O, seed=6, dtype=dtype))
    return dict(
        y=y.detach(),
        dx=x.grad,
        da=layer.lora_A["default"].weight.grad,
        db=layer.lora_B["default"].weight.grad,
    )


# ---- one layer against PEFT --------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_outputs_and_gradients_equal_peft_in_fp32(base, bias):
    ours, theirs = results(our_layer(base, bias)), results(peft_layer(base, bias))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_bf16_outputs_and_gradients_equal_peft_up_to_rounding(base):
    """bf16 rounds to a relative 2^-9; a value here is rounded about four times on its way (inputs
    of a product, rank-R product, sum, result), so 2^-7 of the norm bounds ours, and PEFT's too.
    """
    exact = results(peft_layer(base, bias=True))
    for layer in (our_layer, peft_layer):
        rounded = results(layer(base, bias=True, dtype=torch.bfloat16), torch.bfloat16)
        for name, value in rounded.items():
            error = (value.float() - exact[name]).norm() / exact[name].norm()
            assert error < 2**-7, (layer.__name__, name, error)


def test_bf16_compute_keeps_outputs_in_bf16_and_adapter_gradients_in_fp32():
    got = results(our_layer("nf4", dtype=torch.bfloat16), torch.bfloat16)
    assert {n: t.dtype for n, t in got.items()} == dict(
        y=torch.bfloat16, dx=torch.bfloat16, da=torch.float32, db=torch.float32
    )


@pytest.mark.parametrize("in_features, out_features", [(72, 100), (31, 33)])
def test_sizes_that_are_not_whole_blocks_equal_the_formula(in_features, out_features):
    torch.manual_seed(0)
    linear = QuantLinear.from_linear(nn.Linear(in_features, out_features))
    layer = LoraLinear(linear, "default", lora_config(rank=3, alpha=6), r=3, lora_alpha=6).float()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    nn.init.normal_(b)
    x = values(5, in_features).requires_grad_()
    wanted = x @ (linear.dequantize(torch.float32) + 2.0 * b @ a).t() + linear.bias
    for ours, formula in zip(
        torch.autograd.grad(layer(x).square().sum(), (x, a, b)),
        torch.autograd.grad(wanted.square().sum(), (x, a, b)),
        strict=True,
    ):
        torch.testing.assert_close(ours, formula, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer(x), wanted)


# ---- dropout -----------------------------------------------------------------------------------


def output_and_mask(layer, x) -> tuple[torch.Tensor, torch.Tensor]:
    """y, and the mask of what dropout kept: its seed is the only whole number saved for the backward."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    (seed,) = (t for t in saved if t.dtype == torch.int64)
    return y, dropped(torch.ones_like(x), seed, layer.lora_dropout["default"].p) != 0


@pytest.mark.parametrize("base", ["nf4", "plain"])
def test_gradients_under_dropout_are_those_of_the_formula_with_the_same_mask(
    base, device="cpu", tolerance=1e-5
):
    layer = our_layer(base, dropout=0.5).to(device)
    linear = layer.base_layer
    weight = linear.weight if base == "plain" else linear.dequantize(torch.float32)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = values(6, I, seed=5).to(device).requires_grad_()
    y, keep = output_and_mask(layer, x)
    assert 0.3 < keep.float().mean() < 0.7
    formula = x @ weight.t() + SCALING * (x * keep / 0.5) @ a.t() @ b.t()
    torch.testing.assert_close(y, formula, rtol=tolerance, atol=tolerance)
    dy = values(6, O, seed=6).to(device)
    for ours, theirs in zip(
        torch.autograd.grad(y, (x, a, b), dy),
        torch.autograd.grad(formula, (x, a, b), dy),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradients_equal_finite_differences(dropout):
    layer = our_layer("plain", bias=True, dropout=dropout).double()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight

    def forward(x, a_, b_):
        torch.manual_seed(0)  # the same mask every time
        layer.lora_A["default"].weight, layer.lora_B["default"].weight = a_, b_
        return layer(x)

    layer.lora_A["default"]._parameters.clear()
    layer.lora_B["default"]._parameters.clear()
    assert torch.autograd.gradcheck(
        forward, (values(3, I).double().requires_grad_(), a, b), fast_mode=True
    )


def test_dropout_keeps_the_expected_output_and_drops_the_given_share():
    """Linear in the mask, so the mean over draws is the output without dropout: the mean of 2,000
    has a standard error of sqrt(p / (1 - p) / 2000) = 1.5% of a term; four of them are allowed.
    """
    layer = our_layer("plain", dropout=0.3)
    x = values(1, I, seed=5)
    expected = layer.eval()(x)
    layer.train()
    y, keep = output_and_mask(layer, x.expand(2000, I).contiguous().requires_grad_())
    assert keep.shape == (2000, I) and abs(keep.float().mean() - 0.7) < 0.005
    adapter = expected - layer.base_layer(x)
    spread = 4 * math.sqrt(0.3 / 0.7 / 2000) * x.norm() / math.sqrt(I) * SCALING * 2
    assert adapter.abs().max() > 3 * spread  # else the next line says nothing
    assert (y.mean(0) - expected).abs().max() < spread


def test_dropout_masks_differ_from_call_to_call_and_eval_has_none():
    layer, x = our_layer("nf4", dropout=0.5), values(4, I)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    torch.testing.assert_close(layer(x), our_layer("nf4")(x), rtol=0, atol=0)


# ---- the ops -----------------------------------------------------------------------------------


def op_arguments(quantized: bool, dropout: bool, bias: bool, dtype=torch.float32, strided=False):
    x = values(16, 6, seed=5, dtype=dtype).t() if strided else values(6, 16, seed=5, dtype=dtype)
    a, b = values(R, 16, seed=1).requires_grad_(), values(10, R, seed=2).requires_grad_()
    weight, absmax = values(10, 16, seed=3, dtype=dtype), None
    if quantized:
        weight, absmax = quantize_rows(weight)
    seed = torch.tensor(7) if dropout else None
    return (
        x.requires_grad_(),
        weight,
        absmax,
        a,
        b,
        seed,
        SCALING,
        0.5,
        16,
        "nf4" if quantized else "",
        "",
    ), values(10, seed=4, dtype=dtype) if bias else None


@pytest.mark.parametrize(
    "kinds",
    [
        dict(quantized=True, dropout=False, bias=False),
        dict(quantized=True, dropout=True, bias=True),
        dict(quantized=False, dropout=True, bias=False),
        dict(quantized=True, dropout=False, bias=True, dtype=torch.bfloat16),
        dict(quantized=True, dropout=False, bias=False, strided=True),
    ],
    ids=lambda kinds: "+".join(k for k, v in kinds.items() if v),
)
def test_adapted_linear_passes_opcheck(kinds):
    args, bias = op_arguments(**kinds)
    torch.library.opcheck(adapted_inputs, args)
    x, weight, absmax, a, b, seed, scaling, p, *form = args
    xa, token = adapted_inputs(*args)
    torch.library.opcheck(
        adapted_linear,
        (
            token.detach().requires_grad_(),
            x.detach(),
            xa.detach(),
            weight,
            absmax,
            bias,
            a.detach(),
            b.detach(),
            scaling,
            *form,
        ),
    )
    dy = values(6, 10, seed=6, dtype=x.dtype)
    torch.library.opcheck(
        adapted_linear_backward,
        (
            dy,
            x.detach(),
            xa.detach(),
            weight,
            absmax,
            a.detach(),
            b.detach(),
            seed,
            scaling,
            p,
            *form,
        ),
    )
    if seed is not None:
        torch.library.opcheck(drop_inputs, (x, seed, p))


def saved_by(forward) -> list[torch.Tensor]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        forward()
    return saved


@pytest.mark.parametrize("base", ["nf4", "plain"])
@pytest.mark.parametrize("bias", [False, True])
def test_only_x_xa_packed_weight_scales_a_and_b_are_saved_for_backward(base, bias):
    layer, n = our_layer(base, bias, dtype=torch.bfloat16), 10
    x = values(2, 5, I, dtype=torch.bfloat16).requires_grad_()
    saved = saved_by(lambda: layer(x))
    frozen = [layer.base_layer.weight, *([layer.base_layer.absmax] if base == "nf4" else [])]
    adapters = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    assert {t.data_ptr() for t in (x, *frozen, *adapters)} < {t.data_ptr() for t in saved}
    assert sum(t.nbytes for t in saved) == (
        sum(t.nbytes for t in (x, *frozen, *adapters)) + n * R * 2
    )  # the rest is xa (N, R) in bf16


# ---- disabling ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"))


def adapted_model(folder, quantized=True, targets="all-linear", **settings):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if quantized:
        quantize_linears(model)
    model = apply_adapters(model, lora_config(rank=R, target_modules=targets, **settings))
    materialize(model, torch.device("cpu"), torch.device("cpu"))
    init_adapters(model, 0)
    return model


IDS = torch.tensor([[5, 17, 3, 96, 0, 41]])


def test_disable_adapter_gives_the_base_model(folder):
    base = quantize_linears(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    model = adapted_model(folder)
    for name, p in trainable_parameters(model).items():
        if "lora_B" in name:
            nn.init.normal_(p)
    adapted = model(IDS).logits
    with model.disable_adapter():
        disabled = model(IDS).logits
    torch.testing.assert_close(disabled, base(IDS).logits, rtol=0, atol=0)
    assert not torch.allclose(adapted, disabled)
    torch.testing.assert_close(model(IDS).logits, adapted, rtol=0, atol=0)


class _Ops(TorchDispatchMode):
    """The names of the package's own ops that run, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "fsdp_qlora":
            self.names.append(op.name())
        return op(*args, **kwargs or {})


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_adapter_that_is_off_runs_the_same_ops_as_one_that_is_on(folder, dropout):
    """On a GPU each op unpacks weights in its own way: another op would give a reference other weights."""
    model = adapted_model(folder, dropout=dropout).train()
    with _Ops() as on:
        model(IDS)
    with model.disable_adapter(), _Ops() as off:
        model(IDS)
    assert on.names == off.names and "fsdp_qlora::adapted_linear" in on.names


# ---- targets -----------------------------------------------------------------------------------


def meta_llama(family="llama", **settings):
    return meta_model(
        CONFIGS[family](
            vocab_size=97,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            **settings,
        ),
        torch.bfloat16,
    )


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "flag, names",
    [
        ("all-linear", TARGETS),
        ("all", [t for t in TARGETS if t != "o_proj"]),
        ("default", ["q_proj", "v_proj"]),
        ("q_proj,down_proj", ["q_proj", "down_proj"]),
        ("lm_head,q_proj", ["lm_head", "q_proj"]),
    ],
)
def test_targets_adapt_what_they_say(family, flag, names):
    """all is the original script's list, default PEFT's; the head only where it is asked for."""
    targets = RunConfig(lora_target_modules=flag).target_modules
    model = apply_adapters(
        quantize_linears(meta_llama(family)), lora_config(rank=R, target_modules=targets)
    )
    assert adapter_counts(model) == {n: 1 if n == "lm_head" else 3 for n in names}
    trained = trainable_parameters(model)
    assert all(".lora_A." in n or ".lora_B." in n for n in trained)
    assert len(trained) == 2 * sum(adapter_counts(model).values())


def test_default_targets_are_those_that_peft_chooses():
    theirs = get_peft_model(meta_llama(), LoraConfig(task_type="CAUSAL_LM", r=R))
    ours = apply_adapters(meta_llama(), lora_config(rank=R, target_modules=None))
    assert trainable_parameters(ours).keys() == trainable_parameters(theirs).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_stored_in_their_own_dtype(dtype):
    model = apply_adapters(quantize_linears(meta_llama()), lora_config(rank=R), dtype)
    assert {p.dtype for p in trainable_parameters(model).values()} == {dtype}


@pytest.mark.parametrize("quantized", [False, True])
def test_adapters_of_a_loaded_model_are_real_and_start_as_the_base_model(folder, quantized):
    """As in a script of the user's: from_pretrained, quantize_linears, apply_adapters, train."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if quantized:
        quantize_linears(model)
    expected = model(IDS).logits
    model = apply_adapters(model, lora_config(rank=R))
    assert not any(p.is_meta for p in model.parameters())
    torch.testing.assert_close(model(IDS).logits, expected)
    assert all(p.any() for n, p in trainable_parameters(model).items() if ".lora_A." in n)


@pytest.mark.parametrize("targets", [["qproj"], ["q_proj", "qkv_proj"], ["Q_PROJ"], ["proj"]])
def test_an_unknown_target_is_refused_with_the_candidates(targets):
    with pytest.raises(ValueError) as caught:
        resolve_targets(meta_llama(), targets)
    message = str(caught.value)
    assert "\n" not in message
    assert f"--lora_target_modules {targets[-1]}" in message
    assert all(name in message for name in (*TARGETS, "lm_head"))


@pytest.mark.parametrize("target", ["self_attn", "input_layernorm", "norm", "embed_tokens", "0"])
def test_a_target_that_is_no_linear_layer_is_refused_with_the_candidates(target):
    """PEFT would print the whole module, or train an embedding adapter that gets no values here."""
    with pytest.raises(ValueError) as caught:
        apply_adapters(
            quantize_linears(meta_llama()), lora_config(target_modules=["q_proj", target])
        )
    message = str(caught.value)
    assert "\n" not in message
    assert f"--lora_target_modules {target}" in message and "down_proj" in message


def test_ranks_alphas_and_rslora_scales_are_those_of_peft():
    patterns = dict(
        use_rslora=True,
        rank_pattern={"q_proj": 2, "layers.1.mlp.down_proj": 8},
        alpha_pattern={"v_proj": 5},
    )
    ours = apply_adapters(meta_llama(), lora_config(rank=R, **patterns))
    theirs = get_peft_model(
        meta_llama(),
        LoraConfig(task_type="CAUSAL_LM", r=R, lora_alpha=16, target_modules=TARGETS, **patterns),
    )
    layers = {n: m.scaling for n, m in theirs.named_modules() if isinstance(m, LoraLayer)}
    assert {n: m.scaling for n, m in ours.named_modules() if isinstance(m, LoraLayer)} == layers
    assert len({scaling["default"] for scaling in layers.values()}) == 4
    shapes = {n: p.shape for n, p in trainable_parameters(theirs).items()}
    assert {n: p.shape for n, p in trainable_parameters(ours).items()} == shapes


@pytest.mark.parametrize(
    "ranks, alphas",
    [
        ({"q_proj": 2, "layers.0.self_attn.q_proj": 8}, {}),
        ({"layers.0.self_attn.q_proj": 8, "q_proj": 2}, {}),
        ({}, {"q_proj": 3, "layers.0.self_attn.q_proj": 64}),
        ({r"self_attn\..*": 2, "layers.1.self_attn.v_proj": 6}, {"v_proj": 5, ".*proj": 7}),
    ],
)
def test_ranks_and_alphas_that_overlap_are_saved_as_they_were_trained(
    folder, tmp_path, ranks, alphas
):
    """PEFT takes the first key that fits, and writes keys sorted: q_proj behind layers.0...q_proj."""
    config = lora_config(rank=R, rank_pattern=dict(ranks), alpha_pattern=dict(alphas))
    ours = apply_adapters(AutoModelForCausalLM.from_pretrained(folder), config)
    with process_group(torch.device("cpu")):
        save_adapter(ours, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folder)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    scaling, rank = (
        [
            {n: getattr(m, kind) for n, m in model.named_modules() if isinstance(m, LoraLayer)}
            for model in (ours, theirs)
        ]
        for kind in ("scaling", "r")
    )
    assert scaling[0] == scaling[1] and rank[0] == rank[1]
    assert len({(rank[0][n]["default"], scaling[0][n]["default"]) for n in rank[0]}) > 1


@pytest.mark.parametrize("flag", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("name", ["qproj", "k_proj", "lm_head"])
def test_a_rank_or_alpha_of_a_module_that_is_not_adapted_is_refused(flag, name):
    with pytest.raises(
        ValueError, match=f"--lora_{flag} {name}: no adapted layer of that name.*q_proj"
    ):
        apply_adapters(meta_llama(), lora_config(target_modules=["q_proj"], **{flag: {name: 8}}))


def test_a_base_in_a_folder_is_named_so_that_it_is_found_from_anywhere(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(Path(folder).parent)
    for name, saved in ((Path(folder).name, str(Path(folder).absolute())), ("me/base", "me/base")):
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.config._name_or_path = model.name_or_path = name
        model = apply_adapters(model, lora_config(rank=R))
        with process_group(torch.device("cpu")):
            save_adapter(model, tmp_path / "adapter")
        config = LoraConfig.from_pretrained(str(tmp_path / "adapter"))
        assert config.base_model_name_or_path == saved


# ---- initial values ----------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_initial_values_are_the_same_however_rows_are_split(folder, parts, monkeypatch):
    """`parts` ranks, each with its own rows of every parameter, as `fully_shard` cuts them."""
    once, cut = adapted_model(folder), adapted_model(folder)
    for p in trainable_parameters(cut).values():
        p.data.fill_(float("nan"))
    for rank in range(parts):
        monkeypatch.setattr("fsdp_qlora.lora_init.default.local_rows", cut_rows(rank, parts))
        init_adapters(cut, 0)
    torch.testing.assert_close(
        trainable_parameters(cut), trainable_parameters(once), rtol=0, atol=0
    )


def test_a_is_distributed_as_pefts_and_b_is_zero(folder):
    ours = trainable_parameters(adapted_model(folder))
    theirs = trainable_parameters(
        get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            LoraConfig(task_type="CAUSAL_LM", r=R, target_modules=TARGETS),
        )
    )
    assert ours.keys() == theirs.keys()
    for name, p in ours.items():
        if ".lora_B." in name:
            assert not p.any()
            continue
        bound = 1 / math.sqrt(p.shape[1])
        for a in (p, theirs[name]):  # 256 values or more of a uniform distribution
            assert 0.95 * bound < a.abs().max() <= bound
            assert abs(a.std() - bound / math.sqrt(3)) < 0.15 * bound


def test_a_depends_on_name_and_seed_alone():
    first = initial_a("layers.0.q_proj.lora_A", 1, (4, 64))
    torch.manual_seed(123)
    assert torch.equal(initial_a("layers.0.q_proj.lora_A", 1, (4, 64)), first)
    assert not torch.equal(initial_a("layers.1.q_proj.lora_A", 1, (4, 64)), first)
    assert not torch.equal(initial_a("layers.0.q_proj.lora_A", 2, (4, 64)), first)


# ---- a block under torch.compile ---------------------------------------------------------------


def as_compiled(graphs: list):
    """A backend that partitions and joins graphs as a run's does, without kernels, and keeps them."""

    def compiler(module, _):
        SharedInputs()(module.graph)
        module.recompile()
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition
    )


@pytest.mark.parametrize(
    "dropout, policy",
    [
        (0.0, "keep_all"),
        rest(0.1, "keep_attention"),
        *(slow(0.1, p) for p in POLICIES if p != "keep_attention"),
    ],
)
def test_a_compiled_block_has_no_graph_break_and_equal_results(folder, dropout, policy):
    """Also of a second length, by a graph for any, and where two forwards come before their backwards.

    Dropout's seeds are drawn once, in the forward, and not by setting back the generator's state, which
    fails in a CUDA graph.
    """
    model = adapted_model(folder, dropout=dropout).train()
    for name, p in trainable_parameters(model).items():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    decoder, graphs = apply_activation_policy(model, policy).get_base_model().model, []
    block = decoder.layers[0]

    def run(block, length):
        torch.manual_seed(0)
        xs = [values(2, length, 64, seed=seed).requires_grad_() for seed in (0, 1)]
        model.zero_grad()
        positions = decoder.rotary_emb(xs[0], torch.arange(length)[None])
        ys = [block(x, position_embeddings=positions) for x in xs]
        for y in ys:
            y.square().sum().backward()
        grads = {name: p.grad for name, p in trainable_parameters(decoder.layers[0]).items()}
        return dict(ys=ys, dxs=[x.grad for x in xs], **grads)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(block, fullgraph=True, backend=as_compiled(graphs))
    for length in 6, 10, 12:
        ours, eager = run(compiled, length), run(block, length)
        assert not torch._dynamo.utils.counters["graph_break"]
        assert len(ours) == 2 + 14
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (1 if length == 6 else 2)
    calls = Counter(
        str(part)
        for graph in graphs
        for node in graph.nodes
        for part in (node.target, *node.args[:1])
        if "fsdp_qlora.dropout" in str(part)
    )
    assert calls == ({"fsdp_qlora.dropout_seeds.default": 2} if dropout else {})


# ---- what PEFT can ask for and these layers don't compute --------------------------------------


def loaded_llama(**settings) -> nn.Module:
    return AutoModelForCausalLM.from_config(
        CONFIGS["llama"](
            vocab_size=97,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            **settings,
        )
    )


@pytest.mark.parametrize(
    "option, value",
    [
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1, 2]),
        ("layer_replication", [(0, 1), (0, 2)]),
        ("use_qalora", True),
        ("alora_invocation_tokens", [3]),
        ("fan_in_fan_out", True),
        ("ensure_weight_tying", True),
    ],
)
def test_an_option_of_peft_that_is_not_computed_here_is_refused_by_name(option, value):
    with pytest.raises(ValueError, match=rf"LoraConfig\.{option} = "):
        apply_adapters(loaded_llama(), lora_config(rank=R, **{option: value}))


def test_every_option_of_peft_is_followed_or_refused():
    plain = lora_config()
    known = {
        "r",
        "lora_alpha",
        "lora_dropout",
        "lora_bias",
        "target_modules",
        "exclude_modules",
        "bias",
        "target_parameters",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "use_rslora",
        "alpha_pattern",
        "use_dora",
        "init_lora_weights",
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "runtime_config",
        "megatron_core",
        "qalora_group_size",
        "loftq_config",
    }
    others = [name for name in vars(plain) if name not in known and not name.startswith("_")]
    assert len(others) > 10
    for name in others:
        config = lora_config(rank=R)
        setattr(config, name, "something")  # of a later PEFT, too
        with pytest.raises(ValueError, match=rf"LoraConfig\.{name} = "):
            apply_adapters(loaded_llama(), config)


def test_first_values_that_need_weights_are_refused_on_meta_and_kept_on_a_loaded_model():
    model = meta_model(loaded_llama().config, torch.float32)
    with pytest.raises(ValueError, match="init_lora_weights = 'gaussian': on the meta device"):
        apply_adapters(model, lora_config(rank=R, init_lora_weights="gaussian"))
    model = apply_adapters(loaded_llama(), lora_config(rank=R, init_lora_weights=False))
    assert all(p.abs().sum() > 0 for n, p in model.named_parameters() if "lora_B" in n)


def test_an_adapter_that_is_added_later_is_computed_as_in_peft():
    torch.manual_seed(0)
    ours, ids = loaded_llama(), torch.tensor([[5, 17, 40, 8]])
    theirs = loaded_llama()
    theirs.load_state_dict(ours.state_dict())
    only_q = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=False
    )
    first = LoraConfig(
        task_type="CAUSAL_LM", r=R, lora_alpha=16, target_modules=TARGETS, init_lora_weights=False
    )
    ours = apply_adapters(ours, lora_config(rank=R, init_lora_weights=False))
    theirs = get_peft_model(theirs, first)
    for model in (ours, theirs):
        model.add_adapter("second", only_q)
    theirs.load_state_dict(ours.state_dict())
    logits = {}
    for name in ("second", "default"):
        for model in (ours, theirs):
            model.set_adapter(name)
        logits[name] = ours(ids).logits
        assert torch.allclose(logits[name], theirs(ids).logits, atol=1e-5)
    assert not torch.allclose(*logits.values(), atol=1e-3)


PEFTS = {
    "second": dict(adapters={"default": {}, "second": dict(r=2, target_modules=["q_proj"])}),
    "another name": dict(adapters={"mine": {}}),
    "whole modules": dict(adapters={"mine": dict(modules_to_save=["lm_head"])}),
    "whole modules of two": dict(
        adapters={name: dict(modules_to_save=["lm_head"]) for name in ("default", "mine")}
    ),
    "magnitudes": dict(adapters={"default": {}, "mine": dict(use_dora=True)}),
    "tokens": dict(adapters={"default": dict(trainable_token_indices=[1, 2])}),
}


@pytest.mark.parametrize("case", PEFTS)
def test_any_adapter_of_peft_is_saved_under_its_own_names(case, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, names = loaded_llama(), list(PEFTS[case]["adapters"])
    for name, more in PEFTS[case]["adapters"].items():
        config = LoraConfig(
            **dict(
                task_type="CAUSAL_LM",
                r=R,
                target_modules=["q_proj", "up_proj"],
                init_lora_weights=False,
            )
            | more
        )
        if name == names[0]:
            model = get_peft_model(model, config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    model.set_adapter(names[-1])
    with process_group(torch.device("cpu")):
        save_adapter(model, tmp_path / "ours")
    model.save_pretrained(tmp_path, selected_adapters=[names[-1]], save_embedding_layers=False)
    theirs = tmp_path if names[-1] == "default" else tmp_path / names[-1]
    found, wanted = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "ours", theirs)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
