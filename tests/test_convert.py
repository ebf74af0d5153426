"""Adapters of the original script, rebuilt here with its own modules, give the same logits in PEFT."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_qlora import convert_adapter
from fsdp_qlora.cli import main
from fsdp_qlora.commands.generate import load_for_inference
from fsdp_qlora.export.merge import merge_adapter

from .test_merge import IDS, logits
from .tiny import save_tiny

SIX = ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj", "gate_proj")


class Lora(nn.Module):
    """The original's custom LoRA layer: y + scaling B A x."""

    def __init__(self, base_layer, rank, alpha):
        super().__init__()
        self.base_layer, self.scaling = base_layer, alpha / rank
        self.lora_AB = nn.Sequential(
            nn.Linear(base_layer.in_features, rank, bias=False),
            nn.Linear(rank, base_layer.out_features, bias=False),
        )

    def forward(self, x):
        return self.base_layer(x) + self.lora_AB(x) * self.scaling


class Dora(nn.Module):
    """The original's DoRA layer: magnitude (y + B A x) / |W + B A|."""

    def __init__(self, base_layer, rank, _):
        super().__init__()
        self.base_layer, (out, wide) = base_layer, base_layer.weight.shape
        self.dora_layer = nn.ModuleDict(
            dict(lora_A=nn.Linear(wide, rank, bias=False), lora_B=nn.Linear(rank, out, bias=False))
        )
        self.magnitude_layer = nn.ParameterDict(dict(magnitude=torch.rand(out) + 0.5))

    def forward(self, x):
        a, b = self.dora_layer["lora_A"], self.dora_layer["lora_B"]
        norm = (self.base_layer.weight + b.weight @ a.weight).norm(dim=1)
        return (self.base_layer(x) + b(a(x))) / norm * self.magnitude_layer["magnitude"]


def original_run(
    base: str, folder, layer: type, norms: bool = False, prefix: str = ""
) -> torch.Tensor:
    """Save an adapter as the original did; the logits of its model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(2)
    for name, module in list(model.named_modules()):
        if name.endswith(SIX):
            model.set_submodule(name, layer(module, 4, 10))
    if norms:
        for name, p in model.named_parameters():
            if "layernorm" in name:
                p.data += 0.3
    state = {
        prefix + k: v
        for k, v in model.state_dict().items()
        if "lora" in k or "magnitude" in k or norms and "layernorm" in k
    }
    folder.mkdir()
    save_file(state, folder / "model_state_dict.safetensors")
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "layer, norms, prefix",
    [
        (Lora, False, ""),
        (Dora, False, ""),
        (Dora, True, ""),
        (Lora, False, "_fsdp_wrapped_module."),
    ],
)
def test_a_converted_adapter_gives_the_logits_of_the_original_in_peft(
    tmp_path, layer, norms, prefix
):
    base = save_tiny(tmp_path / "base")
    expected = original_run(base, tmp_path / "original", layer, norms, prefix)
    assert (
        main(
            [
                "convert",
                "--weights",
                str(tmp_path / "original"),
                "--model_name",
                base,
                "--output_dir",
                str(tmp_path / "adapter"),
                "--lora_alpha",
                "10",
            ]
        )
        == 0
    )
    again = convert_adapter(tmp_path / "original", tmp_path / "again", base, lora_alpha=10)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (again / file).read_bytes() == (tmp_path / "adapter" / file).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        assert (model(IDS).logits - expected).norm() > 0.01 * expected.norm()
        peft = PeftModel.from_pretrained(model, tmp_path / "adapter").eval()(IDS).logits
    torch.testing.assert_close(peft, expected, rtol=1e-4, atol=1e-4)
    merged = logits(merge_adapter(base, tmp_path / "adapter", tmp_path / "merged", dtype="fp32"))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)


def test_a_state_dict_of_the_old_peft_path_is_converted_without_its_base(tmp_path, capsys):
    from peft import LoraConfig, get_peft_model

    base = save_tiny(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=10, target_modules=list(SIX)),
    )
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.normal_(0, 0.1)
        expected = model.eval()(IDS).logits
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    assert (
        main(
            [
                "convert",
                "--weights",
                str(tmp_path / "weights.safetensors"),
                "--model_name",
                base,
                "--lora_alpha",
                "10",
                "--output_dir",
                str(tmp_path / "adapter"),
                "--train_type",
                "qlora",
            ]
        )
        == 0
    )
    assert "left out " in capsys.readouterr().out
    assert json.loads((tmp_path / "adapter" / "fsdp_qlora.json").read_text())["quant"] == "nf4"
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        found = PeftModel.from_pretrained(plain, tmp_path / "adapter")(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_base_that_can_not_be_repeated_is_refused_where_it_is_needed(tmp_path, capsys):
    base = save_tiny(tmp_path / "base")
    original_run(base, tmp_path / "original", Dora)
    adapter = str(tmp_path / "adapter")
    assert (
        main(
            [
                "convert",
                "--weights",
                str(tmp_path / "original"),
                "--model_name",
                base,
                "--output_dir",
                adapter,
                "--train_type",
                "hqq_dora",
            ]
        )
        == 0
    )
    with pytest.raises(ValueError, match="original script's hqq.*--base_quant none"):
        load_for_inference(base, adapter)
    with pytest.raises(ValueError, match="original script's hqq.*--merge_base original"):
        merge_adapter(base, adapter, tmp_path / "merged")
    merge_adapter(base, adapter, tmp_path / "merged", merge_base="original")
    assert "though the adapter was trained on the original script's hqq" in capsys.readouterr().out


def test_what_can_not_be_converted_is_said_in_one_line(tmp_path, capsys):
    base, other = save_tiny(tmp_path / "base"), save_tiny(tmp_path / "other", hidden_size=32)
    original_run(base, tmp_path / "original", Dora)
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "empty.safetensors")
    biased = save_tiny(tmp_path / "biased", "qwen2")
    for weights, model, part in [
        (tmp_path / "original", other, "does not have; give the model that it was trained on"),
        (tmp_path / "empty.safetensors", base, "no adapter of the original script"),
        (
            tmp_path / "absent",
            base,
            "no such file; give the model_state_dict.safetensors that the original script saved",
        ),
        (tmp_path / "original", biased, "has a bias"),
    ]:
        out = tmp_path / "adapter"
        assert (
            main(
                [
                    "convert",
                    "--weights",
                    str(weights),
                    "--model_name",
                    model,
                    "--output_dir",
                    str(out),
                ]
            )
            == 2
        )
        (line,) = [s for s in capsys.readouterr().err.splitlines() if s.startswith("error: ")]
        assert part in line and "--" in line and not out.exists()


def test_a_train_type_that_the_original_script_did_not_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--train_type galore: choose full, lora"):
        convert_adapter(tmp_path, tmp_path / "adapter", "base", train_type="galore")
