"""Layers that share an input are joined in a compiled block, and compute the same."""

import copy
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_qlora.adapters import (
    apply_adapters,
    apply_fp8,
    keep_fp8_weights,
    lora_config,
    shared_inputs,
    trainable_parameters,
)
from fsdp_qlora.adapters.lora_ops import _sum_of_products
from fsdp_qlora.build import compile_blocks
from fsdp_qlora.catalog.shapes import shape_from_config
from fsdp_qlora.estimate import resident_bytes
from fsdp_qlora.lora_init import init_adapters
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.plan import Plan
from fsdp_qlora.quantization.quantize import quantize_linears
from tests.parts import rest, slow
from tests.tiny import save_tiny


@pytest.fixture
def calls(monkeypatch):
    """How often each of the project's ops stands in the graphs that were compiled."""
    torch._dynamo.reset()
    counts, whole = Counter(), shared_inputs.SharedInputs.__call__

    def counted(self, graph):
        whole(self, graph)
        counts.update(
            node.target.name().removeprefix("fsdp_qlora::")
            for node in graph.nodes
            if getattr(node.target, "namespace", "") == "fsdp_qlora"
        )

    monkeypatch.setattr(shared_inputs.SharedInputs, "__call__", counted)
    monkeypatch.setattr(
        shared_inputs.SharedInputs, "uuid", lambda self: None
    )  # no graph from a cache
    return counts


def adapted_model(folder, policy: str, targets, dropout: float, quantized: bool = True):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = apply_adapters(
        quantize_linears(model) if quantized else model,
        lora_config(rank=4, target_modules=targets, dropout=dropout),
    )
    init_adapters(model, 0)
    torch.manual_seed(0)
    for name, p in trainable_parameters(model).items():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return apply_activation_policy(model.train(), policy)


def gradients(model) -> dict[str, torch.Tensor]:
    """The loss and every gradient of one batch."""
    torch.manual_seed(0)
    ids = torch.arange(24, device=next(model.parameters()).device).view(2, 12)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return dict(loss=loss.detach()) | {
        n.replace("_orig_mod.", ""): p.grad for n, p in trainable_parameters(model).items()
    }


# Of one graph, which both blocks share.
JOINED = dict(shared_inputs_backward=2, adapted_linear_backward=2)
EXPECTED = {
    ("keep_linears", "llama"): JOINED | dict(shared_inputs=2, adapted_inputs=2, adapted_linear=7),
    # Forward, and all but the last layer's product again in backward.
    ("recompute_all", "llama"): JOINED | dict(shared_inputs=4, adapted_inputs=4, adapted_linear=13),
}


@pytest.mark.parametrize(
    "policy, family", [rest("keep_linears", "llama"), ("recompute_all", "llama")]
)
def test_layers_of_one_input_share_their_passes_and_gradients_stay(policy, family, tmp_path, calls):
    model = adapted_model(save_tiny(tmp_path, family), policy, "all-linear", dropout=0.0)
    eager = gradients(copy.deepcopy(model))
    compile_blocks(model)
    torch.testing.assert_close(gradients(model), eager, rtol=1e-5, atol=1e-6)
    assert calls == EXPECTED[policy, family]


@pytest.mark.slow
def test_layers_of_which_one_is_not_adapted_stay_as_they_are(tmp_path, calls):
    model = adapted_model(save_tiny(tmp_path), "keep_all", ["q_proj", "up_proj"], dropout=0.0)
    eager = gradients(copy.deepcopy(model))
    compile_blocks(model)
    torch.testing.assert_close(gradients(model), eager, rtol=1e-5, atol=1e-6)
    assert not {"shared_inputs", "shared_inputs_backward"} & set(calls)
    assert calls["shared_frozen_backward"] == 1  # k and v


@pytest.mark.parametrize("quantized", [True, slow(False)])
def test_gradients_of_layers_without_an_adapter_are_one_sum(quantized, tmp_path, calls):
    model = adapted_model(
        save_tiny(tmp_path), "keep_all", ["o_proj"], dropout=0.0, quantized=quantized
    )
    if not quantized:
        apply_fp8(model, torch.device("cpu"))
    eager = gradients(copy.deepcopy(model))
    compile_blocks(model)
    found = gradients(model)
    if quantized:
        torch.testing.assert_close(found, eager, rtol=1e-5, atol=1e-6)
    else:
        assert error(found, eager) < 0.1
    # gate and up; q, k and v.
    assert calls["shared_frozen_backward"] == 2 and calls["frozen_linear_backward"] == 1


@pytest.mark.parametrize("targets", [rest("all-linear"), slow(["q_proj", "k_proj", "v_proj"])])
def test_fp8_products_of_one_input_quantize_it_once(targets, tmp_path, calls):
    """As near to full precision as each alone; weights that are kept are kept in this form."""
    model = adapted_model(save_tiny(tmp_path, "qwen2"), "recompute_all", targets, dropout=0.0)
    exact = gradients(copy.deepcopy(model))
    apply_fp8(model, torch.device("cpu"))
    eager = gradients(copy.deepcopy(model))
    kept = keep_fp8_weights(model)
    compile_blocks(model)
    first, forms = gradients(model), dict(kept.kept)
    model.zero_grad()
    second = gradients(model)
    assert kept.kept == forms
    uses = Counter(use for use, _ in forms)
    assert uses["forward"] == uses["backward"] == 2 * 7  # two blocks
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert error(first, exact) < 1.2 * error(eager, exact) < 0.5
    # q, k, v and gate, up, forward and again in backward; o, and down where it runs.
    alone = {"adapted_linear": 3} if targets == "all-linear" else {"frozen_linear": 3}
    assert calls["shared_fp8_linears"] == 2 * 2 and alone.items() <= calls.items()
    shape = shape_from_config(model.config.to_dict(), "tiny")
    expected = resident_bytes(
        shape,
        Plan().change(
            strategy="ddp",
            compute_dtype="fp8",
            keep_fp8_weights=True,
            compile=True,
            lora_rank=4,
            lora_dropout=0.0,
            targets=targets if targets == "all-linear" else tuple(targets),
        ),
    )["fp8"]
    assert sum(t.nbytes for t in kept.tensors()) == expected


def error(found: dict, exact: dict) -> float:
    """Of all gradients together, relative."""
    difference = sum((found[name] - exact[name]).square().sum() for name in exact)
    return (difference / sum(value.square().sum() for value in exact.values())).sqrt().item()


@pytest.mark.slow
def test_layers_that_drop_other_places_of_their_input_are_not_joined(tmp_path, calls):
    """But their seeds are: they drop what they drop where nothing is compiled."""
    model = adapted_model(save_tiny(tmp_path), "recompute_all", "all-linear", dropout=0.5)
    eager = gradients(copy.deepcopy(model))
    compile_blocks(model)
    torch.testing.assert_close(gradients(model), eager, rtol=1e-5, atol=1e-6)
    assert calls["adapted_linear_backward"] == 7 and calls["adapted_linear"] == 13
    assert calls["dropout_seeds"] == 1 and not calls["dropout_seed"]
    assert not {"shared_inputs", "shared_inputs_backward"} & set(calls)


def test_a_dequantized_weight_is_gone_before_the_next_one_is_made():
    made = []

    def weight() -> torch.Tensor:
        assert not any(ref() is not None for ref in made)
        one = torch.ones(4, 3)
        made.append(weakref.ref(one))
        return one

    dys = [torch.full((2, 4), float(i)) for i in range(3)]
    total = _sum_of_products(dys, (weight() for _ in dys))
    assert torch.equal(total, torch.full((2, 3), 12.0)) and len(made) == 3
