"""PEFT's calls on a model whose layers are packed: each equals plain PEFT over the dequantized weights."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from fsdp_qlora.adapters import LoraLinear
from fsdp_qlora.integrations.peft import register_with_peft
from fsdp_qlora.quantization.quantize import QuantLinear, dequantize_linears, quantize_linears
from tests.ranks import run_ranks
from tests.tiny import CONFIGS

IDS = torch.tensor([[5, 17, 40, 8], [1, 2, 3, 4], [9, 9, 8, 7]])
KINDS = {
    "plain": {},
    "dora": dict(use_dora=True),
    "rslora": dict(use_rslora=True),
    "bias of B": dict(lora_bias=True, target_modules=["q_proj", "v_proj"]),
    "dropout": dict(lora_dropout=0.3),
}


def base_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = CONFIGS["qwen2"](
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data = 0.1 * torch.randn(p.shape)  # or a lost one would not be seen
    return model


def lora(**more) -> LoraConfig:
    given = dict(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear")
    return LoraConfig(**given | more)


def random_adapters(model: nn.Module) -> nn.Module:
    """Values in every adapter that are of consequence, equal for equal names."""
    generator = torch.Generator().manual_seed(3)
    for name, p in sorted(model.named_parameters()):
        if "lora_" in name and "magnitude" not in name:
            p.data = 0.1 * torch.randn(p.shape, generator=generator)
    return model


def pair(quant: str, **more) -> tuple[PeftModel, PeftModel]:
    """One model over packed weights with our layers, one with PEFT's over the same in fp32."""
    register_with_peft()
    packed = quantize_linears(base_model(), quant)
    dense = dequantize_linears(copy.deepcopy(packed), torch.float32)
    ours, theirs = (
        random_adapters(get_peft_model(m, lora(**more))).eval() for m in (packed, dense)
    )
    assert any(isinstance(m, LoraLinear) for m in ours.modules())
    assert not any(isinstance(m, LoraLinear) for m in theirs.modules())
    return ours, theirs


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters, as bytes: packed ones may be no numbers."""
    return {n: p.detach().clone().view(torch.uint8) for n, p in model.named_parameters()}


def equal(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return (found - wanted).norm() < tolerance * wanted.norm()


def logits(model: nn.Module, **more) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, **more).logits


# ---- merging ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_packs_what_peft_merges_and_unmerging_gives_every_bit_back(kind):
    ours, theirs = pair("nf4", **KINDS[kind])
    before, out = bits(ours), logits(ours)
    assert close(out, logits(theirs))
    ours.merge_adapter()
    theirs.merge_adapter()
    for (name, layer), wanted in zip(
        [(n, m) for n, m in ours.named_modules() if isinstance(m, LoraLinear)],
        [m for m in theirs.modules() if hasattr(m, "lora_A")],
        strict=True,
    ):
        packed = QuantLinear.from_linear(wanted.base_layer)
        found = layer.base_layer.dequantize(torch.float32)
        differing = (found - packed.dequantize(torch.float32)).abs() > 1e-6
        # A value between two codes may round either way.
        assert differing.float().mean() < 2e-3, name
        if layer.base_layer.bias is not None:
            assert close(layer.base_layer.bias, wanted.base_layer.bias), name
    assert not equal(before, bits(ours))
    ours.unmerge_adapter()
    assert equal(before, bits(ours)) and torch.equal(logits(ours), out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unload_gives_packed_layers_and_dense_ones_after_dequantize_linears(kind, safe):
    ours, theirs = pair("int8", **KINDS[kind])
    dense = dequantize_linears(copy.deepcopy(ours), torch.float32)
    wanted = logits(theirs)
    merged = ours.merge_and_unload(safe_merge=safe)
    assert any(isinstance(m, QuantLinear) for m in merged.modules())
    assert not any(hasattr(m, "lora_A") for m in merged.modules())
    assert close(logits(merged), wanted, 3e-2)  # rounded to the format again
    dense = dense.merge_and_unload(safe_merge=safe)
    assert not any(isinstance(m, QuantLinear) or hasattr(m, "lora_A") for m in dense.modules())
    assert close(logits(dense), wanted)


def test_adapters_merged_one_by_one_round_once_and_those_of_nan_are_refused_and_change_nothing():
    both, single = pair("nf4")[0], pair("nf4")[0]
    for model in (both, single):
        model.add_adapter("second", lora(target_modules=["q_proj", "down_proj"]))
        random_adapters(model)
    both.merge_adapter(["default", "second"])
    single.merge_adapter(["default"])
    with pytest.warns(UserWarning, match="additionally merging second"):
        single.merge_adapter(["second"])
    assert equal(bits(both), bits(single))
    single.unmerge_adapter()
    before = bits(single)
    for name, p in single.named_parameters():
        if "lora_B.default" in name:
            p.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaNs detected"):
        single.merge_adapter(safe_merge=True)
    assert {n for n, b in bits(single).items() if not torch.equal(b, before[n])} == {
        n for n in before if "lora_B.default" in n
    }


def test_what_can_not_be_merged_is_refused_in_a_line():
    ours, _ = pair("nf4", lora_bias=True)
    with pytest.raises(ValueError, match=r"lora_bias=True, and can't be merged into a layer with"):
        ours.merge_adapter()
    ours, _ = pair("nf4", alora_invocation_tokens=[3])
    with pytest.raises(ValueError, match="ALoraLinearVariant can't be merged into a quantized"):
        ours.merge_adapter()
    merged = pair("nf4")[0]
    merged.merge_adapter()
    with pytest.raises(ValueError, match=r"has merged adapters; call unmerge_adapter\(\) first"):
        dequantize_linears(merged)
    for first in ("pissa", "olora"):
        with pytest.raises(ValueError, match=f"init_lora_weights = '{first}' decomposes weights"):
            pair("nf4", init_lora_weights=first)
    with torch.device("meta"):
        unloaded = quantize_linears(base_model())
    with pytest.raises(ValueError, match="init_lora_weights = 'gaussian': on the meta device"):
        get_peft_model(unloaded, lora(init_lora_weights="gaussian"))


# ---- several adapters -----------------------------------------------------------------------------


def with_three(quant: str) -> tuple[PeftModel, PeftModel]:
    models = pair(quant)
    for model in models:
        model.add_adapter("second", lora(r=2, target_modules=["q_proj", "up_proj"]))
        model.add_adapter("third", lora(r=8, use_rslora=True, lora_dropout=0.5))
        random_adapters(model).eval()
    return models


def test_any_set_of_active_adapters_and_any_mix_of_them_in_a_batch_equals_peft():
    ours, theirs = with_three("nf4")
    names, seen = ["default", "second", "third"], []
    for count in (1, 2, 3):
        for active in itertools.combinations(names, count):
            for model in (ours, theirs):
                model.base_model.set_adapter(list(active))
            assert close(logits(ours), logits(theirs)), active
            seen.append(logits(ours))
    assert all(not close(a, b, 1e-3) for a, b in itertools.combinations(seen, 2))
    for mix in (["default", "__base__", "third"], ["second", "second", "default"]):
        found, wanted = (logits(m, adapter_names=mix) for m in (ours, theirs))
        assert close(found, wanted), mix


def test_several_active_adapters_have_the_gradients_of_peft():
    ours, theirs = with_three("nf4")
    for model in (ours, theirs):
        model.base_model.set_adapter(["default", "third"])
        model(IDS, labels=IDS).loss.backward()
    wanted = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys() and len(found) > 20
    assert all(close(found[n], wanted[n], 1e-4) for n in found)


def test_adapters_are_deleted_added_again_combined_and_compared_as_in_peft():
    ours, theirs = with_three("nf4")
    for model in (ours, theirs):
        model.delete_adapter("third")
        model.add_adapter("third", lora(r=3))
        random_adapters(model)
        model.add_weighted_adapter(["default", "third"], [0.7, 0.4], "mix", combination_type="cat")
        model.set_adapter("mix")
        model.eval()
    assert close(logits(ours), logits(theirs))
    layers = [
        [m for m in model.modules() if hasattr(m, "get_delta_weight")] for model in (ours, theirs)
    ]
    for found, wanted in zip(*layers, strict=True):
        assert close(found.get_delta_weight("mix"), wanted.get_delta_weight("mix"))
    with ours.disable_adapter(), theirs.disable_adapter():
        assert close(logits(ours), logits(theirs))


# ---- files ------------------------------------------------------------------------------------------


def test_a_quantized_model_is_not_saved_as_if_its_bytes_were_weights(tmp_path):
    ours, theirs = pair("nf4")
    wanted = logits(theirs)
    for model in (ours.get_base_model(), ours.merge_and_unload()):
        with pytest.raises(ValueError, match="save_pretrained can't write quantized weights"):
            model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    ours, _ = pair("nf4")
    ours.save_pretrained(tmp_path / "adapter")  # adapters alone are
    again = quantize_linears(base_model())
    assert close(logits(PeftModel.from_pretrained(again, str(tmp_path / "adapter"))), wanted)
    dense = dequantize_linears(ours, torch.float32).merge_and_unload()
    dense.save_pretrained(tmp_path / "dense")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert close(logits(loaded.eval()), wanted)


def test_load_quantized_fills_a_meta_model_in_one_call_whatever_was_made_of_it_before(tmp_path):
    from fsdp_qlora import OnHost, load_quantized, meta_model
    from fsdp_qlora.adapters import apply_adapters

    saved = base_model()
    saved.save_pretrained(tmp_path)
    cpu = torch.device("cpu")
    for quant in ("nf4", "none"):
        wanted = saved if quant == "none" else quantize_linears(copy.deepcopy(saved), quant)
        found = load_quantized(meta_model(saved.config, torch.float32), tmp_path, quant, device=cpu)
        assert close(logits(found.eval()), logits(wanted.eval()))
    adapted = quantize_linears(meta_model(saved.config, torch.float32), "int8")
    adapted = apply_adapters(adapted, lora())
    wanted = quantize_linears(copy.deepcopy(saved), "int8").eval()
    assert close(
        logits(load_quantized(adapted, tmp_path, device=cpu, on_host=OnHost()).eval()),
        logits(wanted),
    )
    with pytest.raises(ValueError, match="fills a model on the meta device, and this one has weig"):
        load_quantized(saved, tmp_path)


# ---- on ranks -----------------------------------------------------------------------------------------


def on_shards(strategy: str, quant: str, kind: str) -> dict:
    """What merges, deltas and mixes give on this rank, and what is refused."""
    from fsdp_qlora import shard_and_load

    register_with_peft()
    model = base_model()
    if quant != "none":
        quantize_linears(model, quant)
    model = random_adapters(get_peft_model(model, lora(**KINDS[kind]))).eval()
    if quant == "none":
        model = _with_our_layers(kind)
    if kind == "plain":
        model.add_adapter("second", lora(target_modules=["q_proj"]))
        random_adapters(model)
    shard_and_load(model, torch.device("cpu"), sharding_strategy=strategy)
    found = dict(before=logits(model))
    layer = next(m for m in model.modules() if isinstance(m, LoraLinear))
    if kind == "plain":
        delta = layer.get_delta_weight("default")
        found["delta"] = delta.full_tensor() if isinstance(delta, DTensor) else delta
        found["mix"] = logits(model, adapter_names=["default", "second", "__base__"])
    held = bits_of_rows(model)
    found["gathered"] = _message(lambda: _merge_between_passes(model))
    model.merge_adapter()
    found["merged"] = logits(model)
    found["refused"] = _refusals(model, strategy)
    model.unmerge_adapter()
    found["same"] = equal(held, bits_of_rows(model))
    found["after"] = logits(model)
    if strategy == "ddp":
        found["unloaded"] = logits(model.merge_and_unload(safe_merge=True))
    else:
        found["refused"].append(_message(model.merge_and_unload))
    return found


def _with_our_layers(kind: str) -> PeftModel:
    from fsdp_qlora.adapters import apply_adapters

    return random_adapters(apply_adapters(base_model(), lora(**KINDS[kind]))).eval()


def bits_of_rows(model: nn.Module) -> dict[str, torch.Tensor]:
    from fsdp_qlora import local_rows

    return {n: local_rows(p)[0].clone().view(torch.uint8) for n, p in model.named_parameters()}


def _refusals(model: PeftModel, strategy: str) -> list[str]:
    """Messages of what a model on ranks does not do."""
    late = _message(lambda: model.add_adapter("late", lora(target_modules=["q_proj"])))
    if strategy == "ddp":
        return [late]
    return [
        late,
        _message(lambda: model.disable_adapter().__enter__()),
        _message(lambda: dequantize_linears(model.get_base_model())),
    ]


def _merge_between_passes(model: PeftModel):
    """Merge while the backward of a forward is still to come, and what that forward gathered is there."""
    loss = model(IDS, labels=IDS).loss
    try:
        layer = next(m for m in model.modules() if isinstance(m, LoraLinear))
        layer.merge()
        layer.unmerge()
    finally:
        loss.backward()


def _message(call) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


CASES = [
    ("full_shard", "nf4", "plain"),
    ("full_shard", "nf4", "dora"),
    ("full_shard", "none", "plain"),
    ("full_shard", "nf4", "bias of B"),
    ("shard_grad_op", "int8", "plain"),
    ("ddp", "nf4", "plain"),
]


def all_on_shards() -> list[dict]:
    return [on_shards(*case) for case in CASES]


def test_sharded_models_merge_their_own_rows_as_one_process_merges_the_whole():
    ranks = run_ranks(all_on_shards, 2)
    for case, *found in zip(CASES, *ranks, strict=True):
        wanted = run_alone(*case)
        for one in found:
            assert one["same"] and torch.equal(one["before"], one["after"]), case
            for name in ("before", "delta", "mix", "merged", "unloaded"):
                if name in wanted and name in one:
                    assert close(one[name], wanted[name]), (case, name)
            assert "comes after apply_sharding" in one["refused"][0], case
            gathered = "merge and unmerge after the backward" in one["gathered"]
            assert gathered == (case[0] == "shard_grad_op"), case
            if case[0] != "ddp":
                assert "a sharded model can't lose its PEFT wrapper" in one["refused"][3], case
                assert "call unmerge_adapter() before they are" in one["refused"][1], case
            if case[0] != "ddp" and case[1] != "none":
                assert one["refused"][2], case


def run_alone(strategy: str, quant: str, kind: str) -> dict:
    """The same in one process, without sharding."""
    register_with_peft()
    if quant == "none":
        model = _with_our_layers(kind)
    else:
        model = random_adapters(
            get_peft_model(quantize_linears(base_model(), quant), lora(**KINDS[kind]))
        ).eval()
    found = dict(before=logits(model))
    if kind == "plain":
        model.add_adapter("second", lora(target_modules=["q_proj"]))
        random_adapters(model)
        layer = next(m for m in model.modules() if isinstance(m, LoraLinear))
        found["before"] = logits(model)
        found["delta"] = layer.get_delta_weight("default").detach()
        found["mix"] = logits(model, adapter_names=["default", "second", "__base__"])
    model.merge_adapter()
    found["merged"] = found["unloaded"] = logits(model)
    return found
