"""Blocks, linear layers and heads of the four families, found without a table of families."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from fsdp_qlora.adapters import apply_adapters, lora_config
from fsdp_qlora.experts import apply_stacked_experts
from fsdp_qlora.loading import meta_model
from fsdp_qlora.model.blocks import (
    attention_and_mlp,
    decoder_blocks,
    final_norm,
    is_tied,
    linear_names,
    output_head,
)
from fsdp_qlora.model.conv1d import apply_plain_linears
from fsdp_qlora.model.trained_dtype import train_in
from fsdp_qlora.quantization.quantize import quantize_linears

from .families import FAMILIES, family_config
from .tiny import CONFIGS, TARGETS


def tiny_model(family: str, **settings):
    """Three blocks on the meta device."""
    return meta_model(
        CONFIGS[family](
            **dict(
                vocab_size=97,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
            | settings
        ),
        torch.float32,
    )


@pytest.fixture(params=CONFIGS)
def model(request):
    return tiny_model(request.param)


def test_blocks_are_the_decoder_layers_in_order(model):
    assert decoder_blocks(model) == list(model.model.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_norm_is_found_in_every_family(family):
    model = apply_plain_linears(meta_model(family_config(family), torch.float32))
    found = final_norm(apply_adapters(model, lora_config(rank=4)))
    assert found is (model.transformer.ln_f if family == "GPT-2" else model.model.norm)


def test_blocks_are_found_after_quantization_and_under_peft(model):
    layers = list(model.model.layers)
    quantize_linears(model)
    assert decoder_blocks(model) == layers
    assert decoder_blocks(apply_adapters(model, lora_config(rank=4))) == layers


def test_linear_names_are_all_but_the_head_with_their_counts(model):
    assert linear_names(model) == dict.fromkeys(TARGETS, 3)
    assert linear_names(quantize_linears(model)) == dict.fromkeys(TARGETS, 3)


def test_the_head_is_the_output_embedding_also_under_peft(model):
    head = model.lm_head
    assert output_head(model) is head
    assert output_head(apply_adapters(model, lora_config(rank=4))) is head


def test_attention_and_mlp_are_the_children_that_hold_linears(model):
    block = model.model.layers[0]
    assert list(attention_and_mlp(block)) == [block.self_attn, block.mlp]


@pytest.mark.parametrize("tied", [True, False])
def test_is_tied_follows_the_config(tied):
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    assert is_tied(model) is tied
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_the_largest_list_is_chosen_where_there_are_several():
    """As in a model with a small list of like heads beside its decoder."""
    model = nn.ModuleDict(
        dict(
            heads=nn.ModuleList(nn.Linear(4, 4) for _ in range(5)),
            norms=nn.ModuleList(nn.LayerNorm(999) for _ in range(9)),
            layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(2)),
        )
    )
    assert decoder_blocks(model) == list(model["layers"])


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        nn.ModuleList(),
        nn.ModuleList([nn.LayerNorm(4)]),
        nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]),
    ],
    ids=["linear", "sequential", "empty", "no linear", "unlike"],
)
def test_a_model_without_blocks_is_refused_with_the_remedy(model):
    with pytest.raises(ValueError, match="no list of decoder blocks; pass a wrap policy") as caught:
        decoder_blocks(model)
    assert type(model).__name__ in str(caught.value)


@pytest.mark.parametrize("family", ["Llama 3", "Gemma 2", "GPT-2", "StableLM", "Mixtral"])
def test_a_block_that_is_stored_in_fp32_computes_as_its_bf16_model_does(family):
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(family_config(family)).bfloat16().eval()
    apply_stacked_experts(apply_plain_linears(reference))
    apart, ids = deepcopy(reference), torch.randint(0, 97, (2, 8))
    train_in(decoder_blocks(apart)[0], torch.float32)
    for model in (reference, apart):
        model(input_ids=ids, labels=ids).loss.backward()
    assert apart(input_ids=ids).logits.dtype == torch.bfloat16
    expected, found = (
        [p.grad for p in decoder_blocks(m)[0].parameters()] for m in (reference, apart)
    )
    assert {g.dtype for g in found} == {torch.float32}
    expected, found = (torch.cat([g.float().flatten() for g in all]) for all in (expected, found))
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_the_norm_after_the_blocks_is_found_whatever_its_forward_is_wrapped_in():
    """Trainers wrap it after it is compiled."""
    model = AutoModelForCausalLM.from_config(family_config("Llama 3"))
    norm = final_norm(model)
    norm.forward = partial(lambda forward, *args, **kwargs: forward(*args, **kwargs), norm.forward)
    assert final_norm(model) is norm is model.model.norm
