"""Types of models that no test knows are tried small: they train, or are refused before weights are read."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fsdp_qlora.adapters.lora import apply_adapters, lora_config
from fsdp_qlora.adapters.targets import left_out
from fsdp_qlora.build import planned_model
from fsdp_qlora.cli import main
from fsdp_qlora.commands.check import _answers
from fsdp_qlora.config import RunConfig
from fsdp_qlora.experts import apply_stacked_experts, check_quantizable
from fsdp_qlora.loading import meta_model
from fsdp_qlora.model import packing_probe
from fsdp_qlora.model.blocks import decoder_blocks, linear_layers, linear_names
from fsdp_qlora.model.packing_probe import keep_rows_apart, small_instance
from fsdp_qlora.quantization.quantize import (
    QuantLinear,
    directly_read,
    is_plain_linear,
    quantize_linears,
)
from fsdp_qlora.type_probe import check_type, why_untried

from .families import SIZES, family_config
from .native import declare

CPU = torch.device("cpu")


def untested(kind: type[LlamaForCausalLM], **more) -> LlamaForCausalLM:
    """A tiny model whose type no test knows."""

    class NewConfig(LlamaConfig):
        model_type = "new_type"

    config = NewConfig(**SIZES | dict(tie_word_embeddings=False) | more)
    config._name_or_path = "org/new"
    return kind(config)


class Plain(LlamaForCausalLM):
    """A type of its own that computes what Llama does."""


class OtherLoss(LlamaForCausalLM):
    """Logits that the chunked loss knows nothing of: the last token's are moved."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, **kwargs)
        if out.logits.shape[1] > 2:
            out.logits = out.logits * (1 + torch.arange(out.logits.shape[1])[:, None])
        return out


class Detached(LlamaForCausalLM):
    """No gradient reaches its blocks."""

    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_hook(lambda *args: args[-1].detach().requires_grad_())


def test_a_type_that_no_test_knows_trains_if_it_computes_what_its_code_does(capsys):
    check_type(untested(Plain))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "kind, fault", [(OtherLoss, "its loss is another"), (Detached, "gradient")]
)
def test_a_type_that_would_train_wrongly_is_refused_by_name_in_one_line(kind, fault):
    with pytest.raises(ValueError, match="--model_name org/new: new_type can't be trained") as told:
        check_type(untested(kind))
    assert fault in str(told.value) and "\n" not in str(told.value)


class OfOneWidth(LlamaForCausalLM):
    """Code that runs at its own width alone, which no field of its configuration tells."""

    def forward(self, input_ids=None, **kwargs):
        if self.config.hidden_size != SIZES["hidden_size"]:
            raise RuntimeError("shape '[1, 9, 4, 0]' is invalid")
        return super().forward(input_ids, **kwargs)


def test_a_type_that_runs_at_its_own_width_alone_is_tried_at_that():
    assert why_untried(untested(OfOneWidth, num_attention_heads=8, num_key_value_heads=4)) == ""


def test_a_type_whose_small_model_does_not_run_is_untried_and_not_refused(monkeypatch, tmp_path):
    """Before, it was refused for computing something else, or said to train without a trial."""
    monkeypatch.setattr(packing_probe, "MOST_WEIGHTS", 1000)
    model = untested(OfOneWidth, num_attention_heads=8, num_key_value_heads=4)
    assert "no small model of it could be made to try it (RuntimeError shape" in why_untried(model)
    AutoConfig.for_model("falcon_mamba").save_pretrained(tmp_path)  # of no heads
    said = dict(_answers(str(tmp_path), {}))
    assert said["type"].startswith("falcon_mamba, not tested: no small model of it could be made")


# As published, or as transformers' own defaults: sizes that belong together in ways of their own.
GRANITE_4_H_SMALL = dict(
    hidden_size=4096, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8,
    mamba_n_heads=128, mamba_d_head=64, mamba_expand=2, mamba_n_groups=1, mamba_d_state=128,
    num_local_experts=72, num_experts_per_tok=10, intermediate_size=768,
    layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
)  # fmt: skip
SIZED = dict(
    granitemoehybrid=GRANITE_4_H_SMALL,
    bamba={},
    zamba2={},
    falcon_mamba={},
    longcat_flash={},
    inkling_text={},
    deepseek_v4={},
)


@pytest.mark.parametrize("kind", SIZED)
def test_models_of_published_sizes_are_made_small_and_run(kind):
    config = AutoConfig.for_model(kind, **SIZED[kind])
    tiny = small_instance(meta_model(config, torch.float32, "eager"))
    assert sum(p.numel() for p in tiny.parameters()) < 1e8
    kinds = [set(getattr(c, "layer_types", None) or ()) for c in (config, tiny.config)]
    assert kinds[0] == kinds[1]


def test_packed_rows_of_granite_4_h_are_tried_at_its_published_sizes():
    """Its Mamba heads are as many as its width has room for, and packing was refused."""
    config = AutoConfig.for_model("granitemoehybrid", **GRANITE_4_H_SMALL)
    keep_rows_apart(meta_model(config, torch.float32, "sdpa"))


def test_the_largest_mixtures_are_made_without_memory_for_their_experts():
    """77 GB for those of one block, which a machine of 24 GB does not grant."""
    with LargestOnCpu() as made:
        model = meta_model(AutoConfig.for_model("longcat_flash"), torch.float32, "eager")
    assert sum(p.numel() for p in model.parameters()) > 7e11
    assert made.largest < 2**30


class LargestOnCpu(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made on the CPU."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.device.type == "cpu":
            self.largest = max(self.largest, out.nbytes)
        return out


@pytest.mark.parametrize(
    "settings, fault",
    [
        (dict(layer_types=["full_attention"] * 2, rope_parameters={}), "--model_name"),
        (dict(num_attention_heads=0), "--model_name"),
    ],
)
def test_a_config_that_makes_no_model_is_not_blamed_on_attention(settings, fault):
    config = AutoConfig.for_model("llama", **SIZES)
    for name, value in settings.items():
        config.__dict__[name] = value
    config._name_or_path = "org/broken"
    with pytest.raises(ValueError) as told:
        meta_model(config, torch.float32, "sdpa")
    assert str(told.value).startswith(fault) and "attn_implementation" not in str(told.value)


def test_a_type_that_cant_be_made_small_is_said_to_be_untried(capsys):
    model = untested(Plain)
    model.config.__dict__["num_attention_heads"] = None
    check_type(model)
    assert "new_type is not among the tested types" in capsys.readouterr().out


# ---- what is not a plain linear layer ----------------------------------------------------------


class Mixer(nn.Module):
    """Reads the weight of one layer, and of one inside of another, as Mamba's fused kernels do."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.gate = nn.Sequential(nn.Linear(64, 64))
        self.gate.inner = nn.Linear(64, 64)

    def forward(self, x):
        x = self.in_proj(x) * self.gate.inner.weight.mean()
        return nn.functional.linear(x, self.out_proj.weight) + self.gate(x)


class Router(nn.Linear):
    """A linear layer that gives more than a product."""

    def forward(self, x):
        return super().forward(x).topk(2)


class Written(nn.Linear):
    """A linear layer that is written out, as Falcon's is."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


def test_layers_whose_weight_the_models_code_reads_stay_as_they_are_and_are_not_adapted():
    model = nn.Sequential(Mixer())
    assert directly_read(model) == {model[0].out_proj, model[0].gate.inner}
    assert list(linear_layers(model)) == ["0.in_proj", "0.gate.0"]
    quantize_linears(model)
    kinds = {name: type(m) for name, m in model.named_modules() if hasattr(m, "in_features")}
    assert kinds == {
        "0.in_proj": QuantLinear,
        "0.out_proj": nn.Linear,
        "0.gate.0": QuantLinear,
        "0.gate.inner": nn.Linear,
    }


def test_a_subclass_of_linear_layers_is_one_if_it_computes_their_product():
    assert is_plain_linear(nn.Linear(4, 3)) and is_plain_linear(Written(4, 3))
    assert not is_plain_linear(Router(4, 3)) and not is_plain_linear(nn.Conv1d(4, 3, 1))
    model = quantize_linears(nn.ModuleDict(dict(router=Router(64, 4), written=Written(64, 4))))
    assert isinstance(model["router"], Router) and isinstance(model["written"], QuantLinear)


def test_names_of_adapted_layers_mean_no_other_module():
    """A list's second linear layer is called `1`, as the second block is."""
    model = AutoModelForCausalLM.from_config(family_config("Gemma 3n"))
    names = linear_names(model)
    assert "altup_projections.1" in names and "1" not in names and "q_proj" in names
    adapted = apply_adapters(model, lora_config(rank=2))
    assert any("altup_projections.1.lora_A" in name for name, _ in adapted.named_parameters())


def test_blocks_of_several_classes_are_the_decoders():
    config = AutoConfig.for_model(
        "jamba", **SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert decoder_blocks(model) == list(model.model.layers)
    assert len({type(block) for block in decoder_blocks(model)}) == 2


@pytest.mark.parametrize("family", ["DeepSeek V3", "GLM-4.5", "Qwen3-Next"])
def test_layers_that_peft_takes_for_experts_are_left_out_said_and_refused_where_asked_for(family):
    """Adapters of them would be saved, and dropped when PEFT loads them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(family_config(family))
    assert {"gate_proj", "up_proj", "down_proj"} <= left_out(model).keys()
    with pytest.raises(ValueError, match="--lora_target_modules gate_proj.*lora_target_parameters"):
        apply_adapters(model, lora_config(rank=2, target_modules=["q_proj", "gate_proj"]))
    adapted = apply_adapters(model, lora_config(rank=2))
    assert {"gate_proj", "up_proj", "down_proj"} <= adapted.left_out.keys()  # which the run prints
    config = adapted.peft_config["default"]
    assert config.target_parameters is None and "gate_proj" not in config.target_modules


def test_experts_outside_of_linear_layers_are_refused_under_quantization_and_small_weights_not():
    with torch.device("meta"):
        dbrx = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(
                "dbrx",
                d_model=64,
                n_heads=4,
                n_layers=1,
                max_seq_len=16,
                vocab_size=97,
                attn_config=dict(kv_n_heads=2, rope_theta=1e4),
            )
        )
        hybrid = AutoModelForCausalLM.from_config(family_config("Granite 4 H"))
    with pytest.raises(ValueError, match=r"--quant nf4: transformer.*ffn.experts.*--quant none"):
        check_quantizable(dbrx, "nf4")
    check_quantizable(apply_stacked_experts(hybrid), "nf4")


# ---- fsdp-qlora check --------------------------------------------------------------------------


def test_check_says_what_works_from_config_json_alone(tmp_path, capsys):
    family_config("Falcon-H1").save_pretrained(tmp_path)
    assert main(["check", "--model_name", str(tmp_path)]) == 0
    said = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert said["type"].strip() == "falcon_h1, tested"
    assert "q_proj x2" in said["all-linear"] and "out_proj" not in said["all-linear"]
    assert "out_proj (the model's code reads its weight)" in said["not adapted"]
    assert "conv1d" in said["in 16 bits"] and "kept apart" in said["packing"]


@pytest.mark.parametrize(
    "family, experts, in_16_bits",
    [
        ("gpt-oss", "frozen, or adapted by --lora_target_parameters experts", "router"),
        ("Llama 4", "frozen, as PEFT can't adapt them", "router"),
        ("Llama 3", "none", "norms and embeddings alone"),
    ],
)
def test_check_says_of_experts_what_a_run_does_with_them(
    tmp_path, capsys, family, experts, in_16_bits
):
    family_config(family).save_pretrained(tmp_path)
    assert main(["check", "--model_name", str(tmp_path)]) == 0
    said = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert said["experts"].strip() == experts and said["in 16 bits"].strip() == in_16_bits
    model = meta_model(family_config(family), torch.float32)
    config = lora_config(rank=2, target_parameters=["experts"])
    refused = (
        nullcontext() if "adapted" in experts else pytest.raises(ValueError, match="that PEFT")
    )
    with refused:
        apply_adapters(model, config)
    frozen = quantize_linears(meta_model(family_config(family), torch.float32), "nf4").model.layers
    matrices = {
        name.split(".")[-2]
        for name, p in frozen.named_parameters()
        if p.dim() > 1 and name.endswith("weight") and p.dtype == torch.float32
    }
    assert matrices == ({"router"} if "router" in in_16_bits else set())


def test_check_refuses_a_kind_of_quantization_that_cant_be_trained_on(tmp_path, capsys):
    family_config("Llama 3").save_pretrained(tmp_path)
    declare(tmp_path, dict(quant_method="eetq", weights="int8"))
    assert main(["check", "--model_name", str(tmp_path)]) == 2
    assert "quantized with eetq, which can't be trained on here" in capsys.readouterr().err


def test_check_refuses_a_type_that_cant_be_trained_in_one_line(tmp_path, capsys):
    AutoConfig.for_model("hrm_text", **SIZES).save_pretrained(tmp_path)
    assert main(["check", "--model_name", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --model_name") and "hrm_text can't be trained here" in said
    with pytest.raises(ValueError, match="hrm_text can't be trained here"):
        planned_model(RunConfig(model_name=str(tmp_path), precision="fp32"), CPU)
